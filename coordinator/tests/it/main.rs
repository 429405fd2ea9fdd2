//! A whole coordinator in this process, spoken to as nodes and operators speak to it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod crowding;
mod enrolment;
mod grpc;
mod init;
mod numbering;
mod push;
mod restart;
mod sessions;
mod support;
mod tokens;
mod trust;
