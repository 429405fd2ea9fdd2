//! A response's body, read as it arrives.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes, BytesMut};
use futures::future::poll_fn;
use h3::client::RequestStream;
use http_body::Frame;
use tokio::time::timeout;

use super::{RequestError, Shared};
use crate::h3_streams::Bidi;

/// Dropping it early tells the server to stop.
pub struct ResponseBody {
    stream: RequestStream<Bidi, Bytes>,
    ended: bool,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for ResponseBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResponseBody").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl ResponseBody {
    pub(super) fn new(stream: RequestStream<Bidi, Bytes>, shared: Arc<Shared>) -> Self {
        Self { stream, ended: false, shared }
    }

    /// The next piece, or `None` at the end. Waits as long as the connection lives: a body may be endless. Cancel-safe.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, RequestError> {
        poll_fn(|cx| self.poll_piece(cx)).await
    }

    /// The whole body, if it is at most `limit` bytes and arrives within the request timeout.
    pub async fn bytes(mut self, limit: usize) -> Result<Bytes, RequestError> {
        let waited = self.shared.request_timeout;
        let gathering = async {
            let mut whole = BytesMut::new();
            while let Some(piece) = self.chunk().await? {
                if piece.len() > limit - whole.len() {
                    return Err(RequestError::TooLarge { limit });
                }
                whole.extend_from_slice(&piece);
            }
            Ok(whole.freeze())
        };
        timeout(waited, gathering).await.unwrap_or(Err(RequestError::TimedOut { waited }))
    }

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, RequestError>> {
        if self.ended {
            return Poll::Ready(Ok(None));
        }
        let polled = match self.stream.poll_recv_data(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Ok(piece)) => Ok(piece.map(|mut piece| piece.copy_to_bytes(piece.remaining()))),
            Poll::Ready(Err(error)) => Err(RequestError::from(error)),
        };
        self.ended = !matches!(polled, Ok(Some(_)));
        Poll::Ready(polled)
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = RequestError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RequestError>>> {
        self.poll_piece(cx).map(|piece| piece.map(|piece| piece.map(Frame::data)).transpose())
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}
