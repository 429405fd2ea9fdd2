//! The agent as others meet it: over real HTTP/3 with certificates, over its unix socket, and from a file.

#![allow(clippy::unwrap_used)] // A test that can't go on fails where it stands.

mod api;
mod certs;
mod cluster;
mod coordinator;
mod file_source;
mod session;
mod shutdown;
