//! A request's body as it arrives: never more than the limit, never later than the deadline, and as long as announced.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes};
use h3::error::Code;
use h3::server::RequestStream;
use http_body::Frame;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::h3_streams::Recv;

/// Why a body ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Failure {
    #[error("the body is longer than the limit")]
    TooLarge,
    #[error("the body did not arrive in time")]
    TooSlow,
    #[error("the body ended early")]
    BrokenOff,
    #[error("the body's length differs from its content-length")]
    WrongLength,
}

/// What the router reads. Dropping it early tells the peer to stop sending.
pub(super) struct RequestBody {
    stream: RequestStream<Recv, Bytes>,
    left: usize,
    /// What is still to come of a body whose length was announced.
    announced: Option<u64>,
    deadline: Pin<Box<Sleep>>,
    ended: bool,
    failure: Arc<OnceLock<Failure>>,
}

impl RequestBody {
    /// The second value is filled when the body fails, even if the body has been moved.
    pub(super) fn new(
        stream: RequestStream<Recv, Bytes>,
        limit: usize,
        announced: Option<u64>,
        deadline: Instant,
    ) -> (Self, Arc<OnceLock<Failure>>) {
        let failure = Arc::new(OnceLock::new());
        let deadline = Box::pin(sleep_until(deadline));
        let body =
            Self { stream, left: limit, announced, deadline, ended: false, failure: Arc::clone(&failure) };
        (body, failure)
    }

    fn fail(&mut self, failure: Failure) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        self.ended = true;
        // Only the first failure counts; there is no second one after the end.
        self.failure.set(failure).ok();
        self.stream.stop_sending(Code::H3_NO_ERROR);
        Poll::Ready(Some(Err(failure)))
    }
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let piece = match self.stream.poll_recv_data(cx) {
            Poll::Ready(Ok(Some(mut piece))) => piece.copy_to_bytes(piece.remaining()),
            Poll::Ready(Ok(None)) if self.announced.is_some_and(|left| left > 0) => {
                return self.fail(Failure::WrongLength);
            }
            Poll::Ready(Ok(None)) => {
                self.ended = true;
                return Poll::Ready(None);
            }
            Poll::Ready(Err(_)) => return self.fail(Failure::BrokenOff),
            Poll::Pending => {
                return match self.deadline.as_mut().poll(cx) {
                    Poll::Ready(()) => self.fail(Failure::TooSlow),
                    Poll::Pending => Poll::Pending,
                };
            }
        };
        if let Some(announced) = &mut self.announced {
            match announced.checked_sub(piece.len() as u64) {
                Some(left) => *announced = left,
                None => return self.fail(Failure::WrongLength),
            }
        }
        match self.left.checked_sub(piece.len()) {
            Some(left) => {
                self.left = left;
                Poll::Ready(Some(Ok(Frame::data(piece))))
            }
            None => self.fail(Failure::TooLarge),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        // Most requests have no body, and no handler looked: only one that goes on needs to be told.
        let mut cx = Context::from_waker(Waker::noop());
        match self.stream.poll_recv_data(&mut cx) {
            Poll::Ready(Ok(None)) => {
                if self.announced.is_some_and(|left| left > 0) {
                    self.failure.set(Failure::WrongLength).ok();
                }
            }
            _ => self.stream.stop_sending(Code::H3_NO_ERROR),
        }
    }
}
