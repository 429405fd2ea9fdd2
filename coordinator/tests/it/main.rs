//! A whole coordinator in this process, spoken to as nodes and operators speak to it.

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
