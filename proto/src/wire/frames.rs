//! The frames of a node session, and how much each kind of body may be: in bytes, and in memory once decoded.
//!
//! Both sides decode what comes with [`decode_frame`]. A body that may be as long as the session's frame limit lets it
//! says so with [`ANY_LENGTH`].

use bytes::Bytes;

use super::measure::{self, DecodeError, Meter, Shaped, Value};
use super::session::v1::{AgentFrame, CoordinatorFrame};
use super::tunnel::v1::Frame as TunnelFrame;

/// How much one kind of body may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodyLimit {
    pub bytes: usize,
    /// Once decoded.
    pub memory: usize,
}

/// As long as the session's limit on frames allows.
pub const ANY_LENGTH: usize = usize::MAX;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// The first frame of each side, a hello or a welcome: it comes before anything is known of the peer but its
/// certificate. A description of a node takes a hundredth of it.
pub const MAX_FIRST_FRAME_BYTES: usize = 128 * KIB;

/// Kinds that are not named below, those of newer versions included.
const OTHER: BodyLimit = BodyLimit { bytes: MIB, memory: 4 * MIB };

/// A frame: one body of one kind.
pub trait Frame: Shaped {
    /// What the kind with this field number may be.
    fn limit(kind: u32) -> BodyLimit;
}

impl Frame for AgentFrame {
    fn limit(kind: u32) -> BodyLimit {
        match kind {
            // Hello and heartbeat, each with a description of the node.
            1 | 3 => BodyLimit { bytes: MAX_FIRST_FRAME_BYTES, memory: MIB },
            // Status, whole or what changed: 25,000 pools. Agents cut theirs to far less (`status::fit`); older ones do not.
            4 | 7 => BodyLimit { bytes: ANY_LENGTH, memory: 16 * MIB },
            // Reply: the end of a console, or 90,000 instances of an agent that does not know pages.
            6 => BodyLimit { bytes: ANY_LENGTH, memory: 64 * MIB },
            // Acks, with the problems of refused documents; events.
            _ => OTHER,
        }
    }
}

impl Frame for CoordinatorFrame {
    fn limit(kind: u32) -> BodyLimit {
        match kind {
            // Trust: a chain of a thousand roots. Document: the largest envelope.
            2 | 3 => BodyLimit { bytes: ANY_LENGTH, memory: 16 * MIB },
            // Welcome, goodbye, heartbeat answers.
            1 | 5 | 6 => BodyLimit { bytes: MAX_FIRST_FRAME_BYTES, memory: MIB },
            // A piece of secrets: 64 KiB and its names.
            20 => BodyLimit { bytes: MAX_FIRST_FRAME_BYTES, memory: MIB },
            // Requests.
            _ => OTHER,
        }
    }
}

/// The largest frame of a tunnel's stream: the longest command line that a guest takes, with its variables. Pieces of a
/// stream are a quarter of it.
pub const MAX_TUNNEL_FRAME_BYTES: usize = 128 * KIB;

impl Frame for TunnelFrame {
    fn limit(_kind: u32) -> BodyLimit {
        BodyLimit { bytes: MAX_TUNNEL_FRAME_BYTES, memory: MIB }
    }
}

/// Decodes a frame whose body is within the limits of its kind.
pub fn decode_frame<F: Frame>(bytes: Bytes) -> Result<F, DecodeError> {
    let mut rest = &bytes[..];
    let mut seen = false;
    while let Some((kind, value)) = measure::next_field(&mut rest)? {
        let limit = F::limit(kind);
        let Value::Bytes(body) = value else { continue };
        if body.len() > limit.bytes {
            return Err(DecodeError::BodyTooLong { kind, bytes: body.len(), limit: limit.bytes });
        }
        let Some(shape) = F::SHAPE.message(kind) else { continue };
        // Two bodies of one kind would be merged, and could be more together than either may be.
        if std::mem::replace(&mut seen, true) {
            return Err(DecodeError::SecondBody);
        }
        Meter::new(limit.memory).walk(shape, body)?;
    }
    F::decode(bytes).map_err(DecodeError::Invalid)
}
