//! The node daemon: accepts signed desired state, makes it true, and says how it fares.
//!
//! One document's way through this crate: it is received ([`api`] or [`session_task`], or read by [`source`]),
//! verified and recorded ([`ledger`]), planned (in `mvm_planner`), executed ([`reconcile_task`], through a
//! [`driver`]) and reported (status and events, back through [`session_task`] and [`api`]).
//! [`serve`] is where the tasks are put together; nothing else starts one.

pub mod acceptor;
pub mod api;
pub mod archive;
pub mod audit;
pub mod authz;
pub mod certs;
pub mod crash;
mod dir_watch;
pub mod doctor;
pub mod driver;
pub mod driver_choice;
pub mod event_log;
pub mod execute;
pub mod export;
mod give_back_task;
pub mod guest_link;
pub mod health;
pub mod image;
mod image_gc_task;
pub mod isolation;
pub mod ledger;
pub mod local_socket;
pub mod metrics;
pub mod node_actions;
pub mod node_info;
pub mod node_moves;
pub mod observe;
pub mod persist;
mod pressure_task;
pub mod privileges;
pub mod rate_limit;
pub mod reconcile;
pub mod reconcile_task;
pub mod record;
pub mod removed_operators;
pub mod secrets;
pub mod serve;
pub mod session_task;
mod sessions_task;
pub mod settings;
pub mod shutdown;
pub mod source;
pub mod state;
mod sweep;
pub mod template;
mod text;

pub use serve::{Agent, AgentError, serve};
pub use settings::{AgentSettings, CapacityCaps, RateSettings};
