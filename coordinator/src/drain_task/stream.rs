//! The bytes of a move: what the source's stream brings goes into the target's, frame by frame. Nothing is kept here: while the
//! target does not read, the source's stream is not read either, and its window fills.

use mvm_proto::moves::TICKET_BYTES;
use mvm_proto::wire::tunnel::v1::{Export, Frame, Import, Open, frame};
use mvm_proto::{NodeId, Problem};
use mvm_transport::{TunnelReceiver, TunnelSender, TunnelStream};

use crate::state::State;
use crate::tunnels::stream_lost;
use crate::world::MoveRecord;

/// Not to be guessed; see [`mvm_proto::moves`].
pub(super) fn ticket() -> [u8; TICKET_BYTES] {
    let mut ticket = [0; TICKET_BYTES];
    for half in ticket.chunks_exact_mut(TICKET_BYTES / 2) {
        half.copy_from_slice(&fastrand::u128(..).to_be_bytes());
    }
    ticket
}

/// Returns once the target has all of it, durably.
pub(super) async fn relay(
    state: &State,
    record: &MoveRecord,
    export: &[u8],
    import: &[u8],
) -> Result<(), Problem> {
    let instance_id = record.instance.as_ref().map(|moved| moved.id.to_string()).unwrap_or_default();
    let header = |kind: &str| Open {
        kind: kind.to_owned(),
        tenant_id: record.tenant.to_string(),
        pool_id: record.pool.to_string(),
        instance_id: instance_id.clone(),
        actor: "the coordinator".to_owned(),
        ..Open::default()
    };
    let asked = Export { ticket: export.to_vec().into() };
    let source = open(state, &record.from, Open { export: Some(asked), ..header("export") }).await?;
    let asked = Import { ticket: import.to_vec().into(), ..Import::default() };
    let target = open(state, &record.to, Open { import: Some(asked), ..header("import") }).await?;
    let TunnelStream { frames_in: from_target, frames_out: to_target } = target;
    tokio::select! {
        // The target's word counts more: it says why it takes nothing.
        biased;
        told = outcome(from_target, &record.to) => told,
        failed = pump(source, to_target, record) => Err(failed),
    }
}

async fn open(state: &State, node: &NodeId, open: Open) -> Result<TunnelStream<Frame>, Problem> {
    let header = Frame { body: Some(frame::Body::Open(open)) };
    // A tunnel that ended just now, as idle ones do, is dialled once more.
    for _ in 0..2 {
        let tunnel = state.tunnels.of(&state.fleet, node).await?;
        if let Ok(mut stream) = tunnel.open::<Frame>().await
            && stream.frames_out.send(&header).await.is_ok()
        {
            return Ok(stream);
        }
    }
    Err(stream_lost(node))
}

/// Passes pieces on until the last; then waits, because the target has yet to say what became of them. Its end is an error.
async fn pump(
    source: TunnelStream<Frame>,
    mut to_target: TunnelSender<Frame>,
    record: &MoveRecord,
) -> Problem {
    // The other half is kept: dropped, it would reset the stream.
    let TunnelStream { mut frames_in, frames_out: _own_side } = source;
    loop {
        let Ok(Some(frame)) = frames_in.recv().await else { return stream_lost(&record.from) };
        match &frame.body {
            Some(frame::Body::Piece(piece)) => {
                let is_last = piece.last;
                let is_gone = to_target.send(&frame).await.is_err();
                if is_last {
                    to_target.finish();
                }
                if is_gone || is_last {
                    // What became of it the target says last.
                    return std::future::pending().await;
                }
            }
            Some(frame::Body::Ended(ended)) => return problem_of(&ended.problem, &record.from),
            _ => {}
        }
    }
}

async fn outcome(mut from_target: TunnelReceiver<Frame>, target: &NodeId) -> Result<(), Problem> {
    loop {
        match from_target.recv().await {
            Ok(Some(Frame { body: Some(frame::Body::Done(_)) })) => return Ok(()),
            Ok(Some(Frame { body: Some(frame::Body::Ended(ended)) })) => {
                return Err(problem_of(&ended.problem, target));
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => return Err(stream_lost(target)),
        }
    }
}

fn problem_of(bytes: &[u8], node: &NodeId) -> Problem {
    serde_json::from_slice(bytes).unwrap_or_else(|_| stream_lost(node))
}
