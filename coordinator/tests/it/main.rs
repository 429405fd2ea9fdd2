//! A whole coordinator in this process, spoken to as nodes and operators speak to it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod crashes;
mod crowding;
mod deletion;
mod enrolment;
mod events;
mod fanout;
mod faults;
mod fleet_view;
mod grpc;
mod hostile;
mod init;
mod keys;
mod limits;
mod lists;
mod numbering;
mod objects;
mod operators;
mod push;
mod rest;
mod restart;
mod rollouts;
mod roots;
mod rotation;
mod scale;
mod second_machine;
mod secrets;
mod sessions;
mod shares;
mod support;
mod tokens;
mod trust;
mod tunnels;
mod webhook;
