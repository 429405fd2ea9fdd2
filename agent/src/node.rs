//! The loop of a node and what it decides with: it observes, has the planner decide, hands out the steps, and says what
//! came of them.
//!
//! [`assemble`] puts a node's parts together, [`reconcile_task`] runs it, and [`NodeHandle`](handle::NodeHandle) is what
//! everybody else holds of it: to read its status, to wake an instance, to act by hand, to move one away.

pub mod actions;
mod actor;
pub mod assemble;
pub(crate) mod engine;
pub mod error;
pub mod event_log;
pub mod export;
pub mod handle;
mod in_force;
pub mod info;
pub mod moves;
mod needs;
pub mod observe;
mod once;
pub mod reconcile_task;
mod revoked;
pub(crate) mod status;
mod sweep;
mod wake;
mod work;

pub use actor::Place;
pub use in_force::InForce;
pub use once::{OnceSettings, Report, peek, reconcile_once};
