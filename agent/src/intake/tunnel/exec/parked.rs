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
        timeout(LEFT_ALONE, drain(&handle)).await
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

/// Reads what the program says until it ends. The guest keeps the newest of it for those that attach.
async fn drain(handle: &ExecHandle) -> Result<ExecEvent, LinkError> {
    loop {
        match handle.next().await? {
            ExecEvent::Output { data, offset, .. } => {
                handle.confirm(offset.saturating_add(data.len() as u64));
            }
            exit @ ExecEvent::Exit { .. } => return Ok(exit),
            ExecEvent::Accepted | ExecEvent::Taken(_) => {}
        }
    }
}
