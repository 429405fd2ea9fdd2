//! How a session frame looks on the wire: a big-endian u32 length, then that many bytes of protobuf.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

/// Bytes of the length before each frame.
pub const PREFIX_BYTES: usize = 4;

/// The frame of a message, prefix included, in one allocation. Cloning the result copies nothing, so one document can be
/// encoded once and sent to a thousand sessions.
#[must_use]
pub fn encode_once<M: Message>(message: &M) -> Bytes {
    let length = message.encoded_len();
    let mut frame = BytesMut::with_capacity(PREFIX_BYTES + length);
    // A message this long is past every frame limit, and the sender refuses it by its true length.
    frame.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(&mut frame);
    frame.freeze()
}
