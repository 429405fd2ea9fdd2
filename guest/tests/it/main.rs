//! The program inside microVMs from outside, as its agent meets it.

#![allow(clippy::unwrap_used)] // A test may end at the first surprise.

mod execs;
mod host;
mod hostile;
mod overrides;
mod recorded;
mod requests;
mod terminals;
mod workloads;
