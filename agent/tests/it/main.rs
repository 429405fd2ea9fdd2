//! The agent from outside: its node, its services, its networks and its audit logs.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that can't go on fails there")]

mod audit;
mod network;
mod node;
mod serve;
