//! A program whose stream is lost: waits for another, then runs on alone for a while.

use std::sync::Arc;

use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{END_KEPT, GRACE, LEFT_ALONE};
use crate::guest::{ExecEvent, ExecHandle, LinkError};
use crate::intake::api::exec::Audited;
use crate::intake::tunnel::limits::StreamSlot;

/// Ends with the program, with the stream that takes it over, or with the agent, which leaves it running.
pub(super) async fn parked(
    handle: Arc<ExecHandle>,
    mut audited: Audited,
    slot: Arc<StreamSlot>,
    shutdown: CancellationToken,
) {
    let alone = async {
        handle.count_as_work(false);
        // Nothing is read meanwhile, so that the guest keeps what the lost stream's caller may lack.
        sleep(GRACE).await;
        let has_let_go = handle.let_go();
        timeout(LEFT_ALONE, until_its_end(&handle, has_let_go)).await
    };
    let ended = tokio::select! {
        ended = alone => ended,
        () = shutdown.cancelled() => {
            return audited.leave("left running: the agent stopped");
        }
    };
    match ended {
        Ok(Ok(exit)) => {
            audited.hear(&Ok(exit));
            // What has ended takes no slot, and its end can be asked for a little longer.
            drop(slot);
            sleep(END_KEPT).await;
        }
        Ok(Err(LinkError::Replaced)) => audited.leave("followed by another stream"),
        Ok(Err(error)) => audited.hear(&Err(error)),
        Err(_) => {
            handle.kill_when_dropped();
            audited.leave("ended: no stream followed it any more");
        }
    }
}

/// Waits for the program's end. The guest keeps the newest of its output for those that attach; one that can't let go of a
/// program would have it wait for its reader, so that it is read and dropped.
async fn until_its_end(handle: &ExecHandle, has_let_go: bool) -> Result<ExecEvent, LinkError> {
    loop {
        match handle.next().await? {
            // What was under way, or is told again by a guest whose link broke.
            ExecEvent::Output { .. } if has_let_go => {}
            ExecEvent::Output { data, offset, .. } => {
                handle.confirm(offset.saturating_add(data.len() as u64));
            }
            exit @ ExecEvent::Exit { .. } => return Ok(exit),
            ExecEvent::Accepted | ExecEvent::Taken(_) => {}
        }
    }
}
