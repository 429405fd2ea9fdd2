//! The program inside a microVM: serves the agent's requests, and tells how the workload fares.
//!
//! [`Guest`] is everything it knows: one value under one lock, which outlives every connection. A connection is a
//! [`serve`] call: the calling thread reads requests, one more thread writes. Whatever takes time (an exec, a relay, a
//! file, sleep, shutdown) has a thread of its own that puts what it has to say into the `Guest`; the writing thread takes
//! it from there when the agent is there to hear it. So a connection that breaks loses nothing that was accepted, and a
//! reader that is slow or gone costs no memory beyond the limits in [`limits`].
//!
//! Nothing here polls: every thread blocks in the kernel or on the lock's condition, and an idle guest uses no processor.

mod account;
pub mod boot;
pub mod channel;
mod exec;
mod files;
mod handle;
mod health;
pub mod limits;
mod network;
mod program;
mod readiness;
mod reborn;
mod refusal;
mod relay;
mod secrets;
mod serve;
mod settings;
mod shutdown;
mod sleep;
mod state;
mod vitals;
mod wake;
mod workload;

pub use mvm_proto_guest::guest as protocol;
pub use serve::serve;
pub use settings::{Machine, Settings};
pub use state::Guest;
