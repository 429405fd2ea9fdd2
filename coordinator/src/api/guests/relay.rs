//! Passes frames between a caller and a node until either has no more, the caller's credential is revoked, or this
//! coordinator stops.
//!
//! Nothing is kept but the few frames that wait for the caller to read; while they wait the node's stream is not read, and
//! its window fills. What the caller says is passed on beside that.

use std::sync::Arc;
use std::time::Duration;

use mvm_proto::wire::tunnel::v1::{Ended, Frame, frame};
use mvm_proto::{NodeId, Problem};
use mvm_telemetry::Span;
use mvm_transport::{TunnelReceiver, TunnelSender, TunnelStream};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tonic::{Status, Streaming};

use super::StreamSlot;
use crate::api::identify::Credential;
use crate::refuse;
use crate::state::State;
use crate::tunnels::stream_lost;

/// How often it is looked whether the caller may still be here.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// How long the last word to a caller may wait for it to read.
const LAST_WORD_WITHIN: Duration = Duration::from_secs(1);

type Answers = mpsc::Sender<Result<Frame, Status>>;

pub(super) struct Relay {
    pub(super) state: Arc<State>,
    pub(super) node: NodeId,
    pub(super) credential: Credential,
    pub(super) caller_frames: Streaming<Frame>,
    pub(super) answers: Answers,
    pub(super) span: Span,
    pub(super) _slot: StreamSlot,
}

/// How a relay ends.
enum End {
    /// The node has said its last.
    Over,
    /// The caller is gone: what runs in the guest goes on.
    Gone,
    /// The caller is told.
    Problem(Problem),
}

impl Relay {
    pub(super) async fn run(self, stream: TunnelStream<Frame>) {
        let Self { state, node, credential, caller_frames, answers, mut span, _slot } = self;
        let TunnelStream { frames_in, frames_out } = stream;
        state.metrics.streams.inc();
        let end = tokio::select! {
            end = outward(&node, frames_in, &answers) => end,
            end = inward(caller_frames, frames_out, &node) => end,
            () = answers.closed() => End::Gone,
            problem = revoked(&state, &credential) => End::Problem(problem),
            () = state.shutdown.cancelled() => End::Problem(refuse::stopping()),
        };
        state.metrics.streams.dec();
        if let End::Problem(problem) = end {
            span.fail(&problem.code);
            let problem = serde_json::to_vec(&problem).unwrap_or_default().into();
            let last = Frame { body: Some(frame::Body::Ended(Ended { problem })) };
            // A caller that does not read learns it by the stream's end.
            let _ = timeout(LAST_WORD_WITHIN, answers.send(Ok(last))).await;
        }
    }
}

/// From the node to the caller.
async fn outward(node: &NodeId, mut frames_in: TunnelReceiver<Frame>, answers: &Answers) -> End {
    loop {
        match frames_in.recv().await {
            Ok(Some(frame)) => {
                let is_last = matches!(frame.body, Some(frame::Body::Exit(_) | frame::Body::Ended(_)));
                if answers.send(Ok(frame)).await.is_err() {
                    return End::Gone;
                }
                if is_last {
                    return End::Over;
                }
            }
            Ok(None) => return End::Over,
            Err(error) => {
                tracing::debug!(%node, %error, "lost a stream to a guest");
                return End::Problem(stream_lost(node));
            }
        }
    }
}

/// From the caller to the node.
async fn inward(mut frames: Streaming<Frame>, mut frames_out: TunnelSender<Frame>, node: &NodeId) -> End {
    loop {
        match frames.message().await {
            Ok(Some(frame)) => {
                use frame::Body::{Input, Resize, Signal, Taken};
                if !matches!(frame.body, Some(Input(_) | Taken(_) | Signal(_) | Resize(_))) {
                    return End::Problem(refuse::bad_request("the frame is not one of a stream's caller"));
                }
                if frames_out.send(&frame).await.is_err() {
                    // Where the node has ended the stream, its last word says why.
                    tracing::debug!(%node, "a node takes no more of a stream");
                    return std::future::pending().await;
                }
            }
            // It has nothing more to say, and still listens.
            Ok(None) => {
                frames_out.finish();
                return std::future::pending().await;
            }
            Err(_) => return End::Gone,
        }
    }
}

/// Waits until the caller's credential is refused.
async fn revoked(state: &State, credential: &Credential) -> Problem {
    let mut ticks = interval(CHECK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match credential.check(state).await {
            // What can't be looked up now is looked up again.
            Ok(_) => {}
            Err(problem) if problem.status >= 500 => {}
            Err(problem) => return problem,
        }
    }
}
