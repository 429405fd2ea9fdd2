//! What streams to guests have in common: how one is opened through a coordinator, why it ends, and for how long one that
//! broke is opened again.

use std::time::Duration;

use mvm_proto::Problem;
use mvm_proto::wire::frames::MAX_TUNNEL_FRAME_BYTES;
use mvm_proto::wire::tunnel::v1::guests_client::GuestsClient;
use mvm_proto::wire::tunnel::v1::{Ended, Frame};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tonic::Streaming;

use crate::channel::Channel;
use crate::error::CallError;

/// How long a stream that broke is tried to be opened again: longer than a coordinator or an agent takes to restart.
pub const RESUME_WITHIN: Duration = Duration::from_secs(60);
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// What is asked for again: the coordinator, the node or the guest may be back in a moment.
const PASSING: [&str; 9] = [
    "stream_lost",
    "stopping",
    "tunnel_lost",
    "tunnel_failed",
    "node_not_connected",
    "node_silent",
    "node_busy",
    "guest_unreachable",
    "instance_busy",
];

/// Why nothing more comes of a stream.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    #[error(transparent)]
    Call(#[from] CallError),
    /// The coordinator or the node ended the stream.
    #[error("{0}")]
    Ended(Problem),
    #[error("the stream was lost before it was known whether the program had begun")]
    Unknown,
    #[error("the stream was lost, and could not be opened again within {} s", RESUME_WITHIN.as_secs())]
    Lost(#[source] Box<StreamError>),
    #[error("the answer is not one of such a stream's")]
    Unexpected,
}

impl StreamError {
    /// What the server says against it.
    #[must_use]
    pub fn problem(&self) -> Option<Problem> {
        match self {
            Self::Call(error) => error.problem(),
            Self::Ended(problem) => Some(problem.clone()),
            Self::Lost(cause) => cause.problem(),
            Self::Unknown | Self::Unexpected => None,
        }
    }

    /// Whether opening the stream again may help.
    fn is_passing(&self) -> bool {
        match self {
            Self::Ended(problem) => PASSING.contains(&problem.code.as_str()),
            Self::Call(error) => {
                error.is_lost()
                    || error.problem().is_some_and(|problem| PASSING.contains(&problem.code.as_str()))
            }
            Self::Unknown | Self::Lost(_) | Self::Unexpected => false,
        }
    }

    /// The server's last word on a stream, as what it means.
    pub(crate) fn told(ended: &Ended) -> Self {
        serde_json::from_slice(&ended.problem).map_or(Self::Unexpected, Self::Ended)
    }
}

/// Since when there is no stream, and how long to wait before the next try. It counts on until a stream is open again,
/// whatever began to be one meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Retry(Option<(Instant, Duration)>);

impl Retry {
    /// There is no stream. The error where none is to be tried for any more.
    pub(crate) fn broke(&mut self, error: StreamError) -> Result<(), StreamError> {
        if !error.is_passing() {
            return Err(error);
        }
        match &mut self.0 {
            None => self.0 = Some((Instant::now(), FIRST_WAIT)),
            Some((since, _)) if since.elapsed() >= RESUME_WITHIN => {
                return Err(StreamError::Lost(Box::new(error)));
            }
            Some((_, wait)) => *wait = wait.saturating_mul(2).min(LONGEST_WAIT),
        }
        Ok(())
    }

    pub(crate) fn is_open(&mut self) {
        self.0 = None;
    }

    pub(crate) async fn wait(&self) {
        if let Some((_, wait)) = self.0 {
            sleep(wait).await;
        }
    }
}

pub(crate) fn guests(channel: Channel) -> GuestsClient<Channel> {
    GuestsClient::new(channel)
        .max_decoding_message_size(MAX_TUNNEL_FRAME_BYTES)
        .max_encoding_message_size(MAX_TUNNEL_FRAME_BYTES)
}

/// Opens a stream; what comes from `outgoing` is sent, its header first.
pub(crate) async fn open(
    client: &mut GuestsClient<Channel>,
    outgoing: mpsc::UnboundedReceiver<Frame>,
) -> Result<Streaming<Frame>, StreamError> {
    let outgoing = futures::stream::unfold(outgoing, |mut outgoing| async move {
        let frame = outgoing.recv().await?;
        Some((frame, outgoing))
    });
    Ok(client.open(outgoing).await.map_err(CallError::from)?.into_inner())
}

/// How the next frame of a stream can be none.
pub(crate) fn broken(received: Result<Option<Frame>, tonic::Status>) -> StreamError {
    let status = match received {
        Err(status) => status,
        Ok(_) => tonic::Status::unavailable("the stream ended"),
    };
    CallError::from(status).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(code: &str) -> StreamError {
        StreamError::Ended(Problem::new(503, code, "told", "do this"))
    }

    #[test]
    fn only_what_may_pass_is_asked_again() {
        assert!(PASSING.iter().all(|code| ended(code).is_passing()));
        for code in ["asleep", "replaced", "exec_unknown", "forbidden", "caller_streams_full"] {
            assert!(!ended(code).is_passing(), "{code}");
        }
        assert!(!StreamError::Unknown.is_passing() && !StreamError::Unexpected.is_passing());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_breaks_again_and_again_before_it_is_open_is_given_up() {
        let (mut retry, begun) = (Retry::default(), Instant::now());
        let error = loop {
            match retry.broke(ended("stream_lost")) {
                Ok(()) => retry.wait().await,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, StreamError::Lost(_)));
        assert!((RESUME_WITHIN..RESUME_WITHIN + 2 * LONGEST_WAIT).contains(&begun.elapsed()));
        retry.is_open();
        assert!(retry.broke(ended("stream_lost")).is_ok(), "it begins anew");
    }
}
