//! Real processes together: coordinators, agents, microVMs, and peers that mean harm.

#![allow(clippy::unwrap_used)] // A test may end at the first surprise.

mod bad_input;
mod commands;
mod connections;
mod consoles;
mod coordinator_crashes;
mod crash_matrix;
mod day;
mod deletion;
mod dev;
mod drain;
mod encrypted_sleep;
mod firecracker;
mod fleet;
mod hostile_peers;
mod interop;
mod isolation;
mod microvms;
mod migration;
mod objects_cli;
mod operator_view;
mod privileges;
mod push;
mod rotation;
mod sessions;
mod sleep;
mod standalone;
mod terminal;
mod terminals;
mod traces;
mod trust;
mod tunnel;
mod warm;
mod workloads;
