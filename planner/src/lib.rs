//! The decisions of mvm. Everything here is a function of its arguments: no clock, no random numbers, no files,
//! no async. Time arrives as a [`mvm_proto::Timestamp`], ids are made when a plan is executed.
//!
//! [`fleet`] decides which nodes run what; [`node`] decides what one node does next; [`observation`] is what it is told, [`plan`] is what it answers.

#![forbid(unsafe_code)]

// Tests inside this crate share their random worlds with those outside, which know it by this name.
#[cfg(test)]
extern crate self as mvm_planner;

pub mod effect;
pub mod fleet;
mod limits;
pub mod node;
pub mod observation;
pub mod plan;
pub mod revision;
mod usage;
pub mod workload;

pub use effect::Effect;
pub use node::{MAX_OVERRIDE, check_arrival, check_move, plan_expired, plan_node};
pub use observation::{Blocked, Capacity, Observation, ObservationErrors, ObservedInstance};
pub use plan::{Action, Deferred, NodePlan, OverLimit, Step, Unmanaged};
pub use revision::revision_of;
pub use workload::{RESTARTS_IN_PLACE, Workload};
