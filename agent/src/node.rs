//! The reconcile loop of a node: observes, plans, hands out the steps, and reports.
//!
//! [`assemble`] puts a node's parts together and [`reconcile_task`] runs the loop. All other code uses its handle: to read the
//! status, wake an instance, act on one by hand, or export and import one.

pub mod actions;
mod actor;
pub mod assemble;
mod current_document;
pub(crate) mod engine;
pub mod error;
pub mod event_log;
pub mod export;
pub mod handle;
pub mod hold;
pub mod info;
pub mod logs;
pub mod migration;
mod needs;
pub mod observe;
mod once;
mod pool_readiness;
pub mod reconcile_task;
pub(crate) mod removals;
mod resolvers;
mod revoked;
pub(crate) mod status;
mod sweep;
pub mod transfer;
mod wake;
mod work;

pub use actor::Place;
pub use current_document::CurrentDocument;
pub use once::{OnceSettings, Report, peek, reconcile_once};
