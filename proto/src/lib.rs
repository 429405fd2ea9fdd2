//! The nouns of mvm: ids, the desired-state document and its envelope, instance phases, errors, messages.
//!
//! Nothing here does I/O, reads a clock or draws a random number. Every other crate builds on this one.

#[cfg(feature = "control")]
pub mod control;
#[cfg(feature = "control")]
pub mod digest;
#[cfg(feature = "control")]
pub mod document;
#[cfg(feature = "control")]
pub mod envelope;
pub mod guest;
#[cfg(feature = "control")]
pub mod id;
#[cfg(feature = "control")]
pub mod instance;
#[cfg(feature = "control")]
pub mod json;
#[cfg(feature = "control")]
pub mod moves;
pub mod named;
#[cfg(feature = "control")]
pub mod object;
#[cfg(feature = "control")]
pub mod patch;
#[cfg(feature = "control")]
pub mod placement;
#[cfg(feature = "control")]
pub mod problem;
#[cfg(feature = "control")]
pub mod status;
#[cfg(feature = "control")]
pub mod text;
#[cfg(feature = "control")]
pub mod time;
#[cfg(feature = "control")]
pub mod trace;
pub mod wire;

#[cfg(feature = "control")]
pub use digest::Digest;
#[cfg(feature = "control")]
pub use document::{DesiredState, Provenance, SignedDocument};
#[cfg(feature = "control")]
pub use envelope::{Envelope, Unverified, Verified};
#[cfg(feature = "control")]
pub use id::{ClusterId, IdError, InstanceId, NodeId, PoolId, ProfileId, TenantId};
#[cfg(feature = "control")]
pub use instance::{ManualAction, Phase, WakeKind, WorkloadState};
#[cfg(feature = "control")]
pub use problem::{FieldError, Problem};
#[cfg(feature = "control")]
pub use time::Timestamp;
#[cfg(feature = "control")]
pub use trace::TraceContext;
