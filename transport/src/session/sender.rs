//! Sends frames.

use std::marker::PhantomData;

use bytes::Bytes;
use prost::Message;

use super::control::SessionError;

/// Writes frames to a session's stream.
#[derive(Debug)]
pub struct FrameSender<M> {
    message: PhantomData<fn(M)>,
}

impl<M: Message> FrameSender<M> {
    /// Sends one message. Waits while the peer's window is full, at most the request timeout.
    pub async fn send(&mut self, _message: &M) -> Result<(), SessionError> {
        todo!()
    }

    /// Sends what [`crate::frame::encode_once`] made; the bytes are shared, not copied.
    pub async fn send_encoded(&mut self, _frame: Bytes) -> Result<(), SessionError> {
        todo!()
    }

    /// Says that nothing more will be sent, and waits until the peer has it all.
    pub async fn finish(&mut self) -> Result<(), SessionError> {
        todo!()
    }
}
