//! Calls a coordinator: what the command line and other programs share.
//!
//! [`open`] makes a connection with an operator's certificate. On it, [`control`] is the client of nodes, tokens and
//! documents, and [`Objects`] the one of declared objects: typed, page by page, with watches that survive lost
//! connections. [`Exec`] runs a program in a guest and follows it, [`Logs`] what an instance
//! writes to its console, [`archive`] takes sleeping instances out and in. [`files`] reads objects from YAML and JSON files, strictly.
//!
//! `examples/declare.rs` beside this crate declares a pool and waits until it runs.

pub mod archive;
mod channel;
mod connect;
mod error;
mod exec;
pub mod files;
mod logs;
mod nodes;
mod objects;
mod streams;
mod watch;
pub mod yaml;

pub use channel::Channel;
pub use connect::{ClientError, ControlClient, connect, control, open};
pub use error::{CallError, GONE, problem_of};
pub use exec::{Exec, ExecEvent, ExecInput};
pub use logs::{Logs, LogsEvent};
pub use nodes::list_all_nodes;
pub use objects::{Applied, ApplyOptions, DeleteOptions, Deleted, Listing, Name, Objects, Query};
pub use streams::{RESUME_WITHIN, StreamError};
pub use watch::{Change, Watch};
