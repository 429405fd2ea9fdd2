//! What is done to the machine, from outside: files, links, firewall, control groups, jails, the helper and the units.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test may end at the first surprise, and says what it measured"
)]

mod cgroup;
mod files;
mod firewall;
#[cfg(feature = "network")]
mod links;
mod remote;
mod sandbox;
mod support;
mod units;
