//! The node daemon: accepts signed desired state, makes it true, and says how it fares.
//!
//! One document's way through this crate: it comes in and is verified and recorded ([`intake`]), planned (in
//! `mvm_planner`), executed ([`node`], [`execute`], through a driver of `mvm_vmm`) and reported (status and events, back
//! through [`intake`]). [`serve`] is where the tasks are put together; nothing else starts one.
//!
//! The folders import each other downwards only, in the order of `tests/tidy.rs`.

pub mod audit;
pub mod clock;
pub mod crash;
pub mod events;
pub mod execute;
pub mod guest;
pub mod instance;
pub mod intake;
pub mod isolation;
pub mod metrics;
pub mod node;
pub mod persist;
pub mod secrets;
pub mod serve;
pub mod upkeep;

pub use intake::api::RateSettings;
pub use node::info::CapacityCaps;
pub use serve::settings::AgentSettings;
pub use serve::{Agent, AgentError, serve};
