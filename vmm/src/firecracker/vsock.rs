//! Connects to the program inside a guest through Firecracker's vsock, a unix socket on the host.
//!
//! A connection says `CONNECT <port>` and is answered `OK <port>` once the guest took it; from there on it is the
//! stream. While the guest does not listen the connection is closed, and while the guest is paused or has no driver
//! yet nothing is said at all. [`GuestConnection`] is a stream that waits all of that out.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

use crate::run_files::Dial;

/// `OK 4294967295\n`.
const LONGEST_ANSWER: usize = 14;

/// How soon a guest that does not listen yet is asked again.
const RETRY: Duration = Duration::from_millis(20);

/// A request that was not answered is made anew: a snapshot in between has lost it.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub(super) enum VsockError {
    /// The socket is gone or not served: the VMM has ended.
    #[error("could not connect to the vsock socket")]
    Connect(#[source] io::Error),
    /// The guest does not listen.
    #[error("the guest does not listen on vsock port {0}")]
    Closed(u32),
    #[error("the guest did not answer on vsock port {port} within {waited:?}")]
    Silent { port: u32, waited: Duration },
    #[error("the answer on vsock port {0} is none")]
    Nonsense(u32),
}

/// One attempt: connects to `port` of the guest behind this socket.
pub(super) async fn connect(vsock: &Dial, port: u32, limit: Duration) -> Result<UnixStream, VsockError> {
    let mut stream = vsock.connect().await.map_err(VsockError::Connect)?;
    let answered = timeout(limit, handshake(&mut stream, port)).await;
    answered.map_err(|_| VsockError::Silent { port, waited: limit })??;
    Ok(stream)
}

async fn handshake(stream: &mut UnixStream, port: u32) -> Result<(), VsockError> {
    let closed = |_| VsockError::Closed(port);
    stream.write_all(format!("CONNECT {port}\n").as_bytes()).await.map_err(closed)?;
    let mut answer = Vec::with_capacity(LONGEST_ANSWER);
    // Byte by byte: what follows the line is the guest's.
    while answer.last() != Some(&b'\n') {
        if answer.len() == LONGEST_ANSWER {
            return Err(VsockError::Nonsense(port));
        }
        answer.push(stream.read_u8().await.map_err(closed)?);
    }
    let text = std::str::from_utf8(&answer).ok().and_then(|text| text.strip_prefix("OK "));
    let number = text.and_then(|text| text.strip_suffix('\n')).filter(|text| !text.starts_with('+'));
    number.and_then(|text| text.parse::<u32>().ok()).ok_or(VsockError::Nonsense(port))?;
    Ok(())
}

/// Attempts until the guest takes the connection. Ends with an error only when the VMM is gone.
async fn connect_when_listening(vsock: Dial, port: u32) -> io::Result<UnixStream> {
    loop {
        match connect(&vsock, port, ANSWER_LIMIT).await {
            Ok(stream) => return Ok(stream),
            Err(VsockError::Connect(cause)) => return Err(cause),
            Err(VsockError::Closed(_) | VsockError::Silent { .. }) => sleep(RETRY).await,
            Err(error @ VsockError::Nonsense(_)) => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
    }
}

type Connecting = Pin<Box<dyn Future<Output = io::Result<UnixStream>> + Send>>;

enum State {
    Connecting(Connecting),
    Open(UnixStream),
    Failed(io::ErrorKind),
}

/// A stream to the guest that connects when it can; until then what is sent waits.
pub(super) struct GuestConnection {
    state: State,
    waiting: Arc<Waiting>,
}

impl std::fmt::Debug for GuestConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuestConnection").finish_non_exhaustive()
    }
}

/// The tasks that wait for the connection: its reader and its writer may be two, and both must be woken.
#[derive(Default)]
struct Waiting(Mutex<Vec<Waker>>);

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        for waker in self.0.lock().drain(..) {
            waker.wake();
        }
    }
}

impl GuestConnection {
    #[must_use]
    pub(super) fn new(vsock: Dial, port: u32) -> Self {
        let connecting = Box::pin(connect_when_listening(vsock, port));
        Self { state: State::Connecting(connecting), waiting: Arc::default() }
    }

    fn poll_open(&mut self, context: &Context<'_>) -> Poll<io::Result<Pin<&mut UnixStream>>> {
        if let State::Connecting(connecting) = &mut self.state {
            {
                let mut waiting = self.waiting.0.lock();
                if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                    waiting.push(context.waker().clone());
                }
            }
            let all = Waker::from(Arc::clone(&self.waiting));
            let connected = ready!(connecting.as_mut().poll(&mut Context::from_waker(&all)));
            self.state = match connected {
                Ok(stream) => State::Open(stream),
                Err(cause) => State::Failed(cause.kind()),
            };
            all.wake();
        }
        match &mut self.state {
            State::Open(stream) => Poll::Ready(Ok(Pin::new(stream))),
            State::Failed(kind) => Poll::Ready(Err((*kind).into())),
            State::Connecting(_) => Poll::Pending,
        }
    }
}

impl AsyncRead for GuestConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_open(context))?.poll_read(context, buffer)
    }
}

impl AsyncWrite for GuestConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_open(context))?.poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_open(context))?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.state {
            // Nothing was sent yet, so that there is nothing to finish.
            State::Connecting(_) | State::Failed(_) => Poll::Ready(Ok(())),
            State::Open(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
#[path = "vsock_tests.rs"]
mod tests;
