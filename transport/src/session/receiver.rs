//! Receives frames.

use std::marker::PhantomData;
use std::time::Duration;

use prost::Message;

use super::control::SessionError;

/// Reads frames from a session's stream.
#[derive(Debug)]
pub struct FrameReceiver<M> {
    message: PhantomData<fn() -> M>,
}

impl<M: Message + Default> FrameReceiver<M> {
    /// The next frame, or `None` when the peer finished its side. Cancel-safe: dropping the future loses nothing.
    pub async fn recv(&mut self) -> Result<Option<M>, SessionError> {
        todo!()
    }

    /// How long the peer may stay silent between frames; `None` leaves it to the connection's idle timeout.
    pub fn set_silence(&mut self, _silence: Option<Duration>) {
        todo!()
    }
}
