//! Passes frames between a caller and a node until either has no more, the caller's credential is revoked, or this
//! coordinator stops.
//!
//! Nothing is kept but the few frames that wait for the caller to read; while they wait the node's stream is not read, and
//! its window fills. What the caller says is passed on beside that. Neither side is believed: each may send the frames of its
//! side alone, and where the instance is, the caller hears from this coordinator.

use std::sync::Arc;
use std::time::Duration;

use mvm_proto::Problem;
use mvm_proto::wire::tunnel::v1::{Ended, Frame, Opened, frame};
use mvm_telemetry::Span;
use mvm_transport::{TunnelReceiver, TunnelSender, TunnelStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::{Status, Streaming};

use super::StreamSlots;
use super::locate::Located;
use crate::api::identify::{Credential, ended};
use crate::refuse;
use crate::state::State;
use crate::tunnels::{stream_broken, stream_lost};

/// A program's id has eighteen characters.
const MAX_EXEC_ID_CHARS: usize = 32;
/// After the store could not say whether the caller may still be here.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How long the last word to a caller may wait for it to read.
const LAST_WORD_WITHIN: Duration = Duration::from_secs(1);

type Answers = mpsc::Sender<Result<Frame, Status>>;

pub(super) struct Relay {
    pub(super) state: Arc<State>,
    pub(super) located: Located,
    /// It reads a console; else it follows a program.
    pub(super) is_logs: bool,
    pub(super) credential: Credential,
    pub(super) caller_frames: Streaming<Frame>,
    pub(super) answers: Answers,
    pub(super) span: Span,
    pub(super) _slots: StreamSlots,
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
        let Self { state, located, is_logs, credential, caller_frames, answers, mut span, _slots } = self;
        let TunnelStream { frames_in, frames_out } = stream;
        state.metrics.streams.inc();
        let end = tokio::select! {
            end = outward(&located, is_logs, frames_in, &answers) => end,
            end = inward(caller_frames, frames_out, &located) => end,
            () = answers.closed() => End::Gone,
            problem = revoked(&state, credential) => End::Problem(problem),
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
async fn outward(
    located: &Located,
    is_logs: bool,
    mut frames_in: TunnelReceiver<Frame>,
    answers: &Answers,
) -> End {
    let node = &located.node;
    loop {
        match frames_in.recv().await {
            Ok(Some(frame)) => {
                let Some(frame) = of_node(frame, located, is_logs) else {
                    tracing::warn!(%node, "a node answers a stream with frames of another kind");
                    return End::Problem(stream_broken(node));
                };
                let is_last = matches!(
                    frame.body,
                    Some(frame::Body::Exit(_) | frame::Body::Ended(_) | frame::Body::Done(_))
                );
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
async fn inward(
    mut frames: Streaming<Frame>,
    mut frames_out: TunnelSender<Frame>,
    Located { node, .. }: &Located,
) -> End {
    loop {
        match frames.message().await {
            Ok(Some(frame)) => {
                use frame::Body::{Input, Piece, Resize, Signal, Taken};
                if !matches!(frame.body, Some(Input(_) | Taken(_) | Signal(_) | Resize(_) | Piece(_))) {
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

/// A node's frame as the caller gets it; none if it is not one of such a stream's.
fn of_node(frame: Frame, located: &Located, is_logs: bool) -> Option<Frame> {
    use frame::Body;
    let body = match frame.body {
        // Not the node's to say: the caller opens its next stream to where this one says that it is.
        Some(Body::Opened(opened)) => Body::Opened(Opened {
            tenant_id: located.place.as_ref().map(|place| place.tenant.to_string()).unwrap_or_default(),
            pool_id: located.place.as_ref().map(|place| place.pool.to_string()).unwrap_or_default(),
            instance_id: located.place.as_ref().map(|place| place.instance.to_string()).unwrap_or_default(),
            node_id: located.node.to_string(),
            exec_id: mvm_proto::text::one_line(&opened.exec_id, MAX_EXEC_ID_CHARS),
            woken: opened.woken,
        }),
        Some(body @ Body::Ended(_)) => body,
        Some(body @ Body::Log(_)) if is_logs => body,
        Some(body @ (Body::Output(_) | Body::Taken(_) | Body::Exit(_))) if !is_logs => body,
        Some(body @ (Body::Piece(_) | Body::Done(_))) if !is_logs => body,
        // Of a kind that a newer node knows.
        None => return Some(frame),
        Some(_) => return None,
    };
    Some(Frame { body: Some(body) })
}

/// Waits until the caller's credential counts no more. It is pushed here, for a caller that reads no answer learns nothing
/// of the end of its call.
async fn revoked(state: &Arc<State>, credential: Credential) -> Problem {
    // Before it is judged, so that no revocation falls between.
    let revocations = state.revocations.subscribe();
    loop {
        match credential.check(state).await {
            Ok(caller) => return ended(Arc::clone(state), credential, caller, revocations).await,
            // What can't be looked up now is looked up again.
            Err(problem) if problem.status >= 500 => tokio::time::sleep(LOOK_AGAIN).await,
            Err(problem) => return problem,
        }
    }
}

#[cfg(test)]
mod tests {
    use mvm_proto::wire::tunnel::v1::{Exit, Hello, LogPiece, Output};

    use crate::api::guests::locate::Place;

    use super::*;

    #[test]
    fn a_node_answers_with_frames_of_its_side_and_does_not_say_where_an_instance_is() {
        let located = Located {
            node: "n1".parse().unwrap(),
            place: Some(Place {
                tenant: "acme".parse().unwrap(),
                pool: "web".parse().unwrap(),
                instance: "i-00000001".parse().unwrap(),
            }),
        };
        let passed = |body, is_logs| of_node(Frame { body: Some(body) }, &located, is_logs)?.body;
        let lie = Opened {
            exec_id: "x-1\n; rm".into(),
            tenant_id: "zeta".into(),
            node_id: "$(reboot)".into(),
            ..Opened::default()
        };
        let Some(frame::Body::Opened(told)) = passed(frame::Body::Opened(lie), false) else { panic!() };
        assert_eq!((told.tenant_id.as_str(), told.node_id.as_str()), ("acme", "n1"));
        assert!(!told.exec_id.contains('\n'));
        let (log, output) = (frame::Body::Log(LogPiece::default()), frame::Body::Output(Output::default()));
        assert!(passed(log.clone(), true).is_some() && passed(output.clone(), true).is_none());
        assert!(passed(log, false).is_none() && passed(output, false).is_some());
        assert!(passed(frame::Body::Exit(Exit::default()), true).is_none());
        assert!(passed(frame::Body::Hello(Hello::default()), false).is_none());
    }
}
