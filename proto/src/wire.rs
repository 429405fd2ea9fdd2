//! The generated messages: node status, node sessions, the operators' gRPC service.
//!
//! The `.proto` files under `proto/` are the source; field numbers there are never reused. What a peer sent is decoded
//! by [`frames`] and [`codec`], which [`measure`] it first.

#![allow(missing_debug_implementations, unreachable_pub, clippy::all, clippy::semicolon_if_nothing_returned)]

#[cfg(feature = "control")]
pub mod codec;
#[cfg(feature = "control")]
pub mod document_delta;
#[cfg(feature = "control")]
pub mod frames;
#[cfg(feature = "control")]
pub mod measure;
#[cfg(feature = "control")]
mod secrets;

/// The newest version of the node session that this build speaks.
#[cfg(feature = "control")]
pub const SESSION_PROTOCOL: u32 = 1;

/// After the first whole status of a session only what changed of it is sent.
#[cfg(feature = "control")]
pub const FEATURE_STATUS_DELTAS: &str = "status-deltas";

/// The agent opens a tunnel when its session asks for one: a connection of its own for all that is not an order.
#[cfg(feature = "control")]
pub const FEATURE_TUNNEL: &str = "tunnel";

/// Agents ask for the bundles of secrets that their documents name, and get them in pieces.
#[cfg(feature = "control")]
pub const FEATURE_SECRETS: &str = "secrets";

/// The bytes of one piece: a document waits for no more.
#[cfg(feature = "control")]
pub const SECRETS_PIECE_BYTES: usize = 64 * 1024;

/// The most bundles that an agent asks for at once; it asks for the others when these have come.
#[cfg(feature = "control")]
pub const MAX_SECRETS_WANTED: usize = 64;
/// A document may be sent as what changed of the one before.
#[cfg(feature = "control")]
pub const FEATURE_DOCUMENT_DELTAS: &str = "document-deltas";
/// A document's signature may be one that it shares with others (`mvm_pki::batch`).
#[cfg(feature = "control")]
pub const FEATURE_BATCH_SIGNATURES: &str = "batch-signatures";

/// What this build can do in a session beyond the version. Agents name theirs in the hello, and coordinators answer
/// with those that both know.
#[cfg(feature = "control")]
pub const SESSION_FEATURES: &[&str] = &[
    FEATURE_STATUS_DELTAS,
    FEATURE_TUNNEL,
    FEATURE_SECRETS,
    FEATURE_DOCUMENT_DELTAS,
    FEATURE_BATCH_SIGNATURES,
];

/// The largest message of the operators' services: the largest document with room for what gRPC puts around it.
#[cfg(feature = "control")]
pub const MAX_MESSAGE_BYTES: usize = crate::envelope::MAX_ENVELOPE_BYTES + 64 * 1024;

/// The descriptors of all services, for gRPC reflection.
#[cfg(feature = "control")]
pub const FILE_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

#[cfg(feature = "control")]
pub mod node {
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/mvm.node.v1.rs"));
    }
}

#[cfg(feature = "control")]
pub mod session {
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/mvm.session.v1.rs"));
    }
}

#[cfg(feature = "control")]
pub mod control {
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/mvm.control.v1.rs"));
    }
}

#[cfg(feature = "control")]
pub mod objects {
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/mvm.objects.v1.rs"));
    }
}

/// The streams of tunnels; see [`tunnel::v1::Frame`].
#[cfg(feature = "control")]
pub mod tunnel {
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/mvm.tunnel.v1.rs"));
    }
}

/// Between an agent and the program inside a microVM; see [`crate::guest`].
pub mod guest {
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/mvm.guest.v1.rs"));
    }
}
