//! The nouns of mvm: ids, the desired-state document and its envelope, instance phases, errors, messages.
//!
//! Nothing here does I/O, reads a clock or draws a random number. Every other crate builds on this one.

#[cfg(feature = "arbitrary")]
pub mod arbitrary;
pub mod digest;
pub mod document;
pub mod envelope;
pub mod guest;
pub mod id;
pub mod instance;
pub mod json;
pub mod problem;
pub mod status;
pub mod time;
pub mod wire;

pub use digest::Digest;
pub use document::{DesiredState, Provenance, SignedDocument};
pub use envelope::{Envelope, Unverified, Verified};
pub use id::{ClusterId, IdError, InstanceId, NodeId, PoolId, ProfileId, TenantId};
pub use instance::Phase;
pub use problem::{FieldError, Problem};
pub use time::Timestamp;
