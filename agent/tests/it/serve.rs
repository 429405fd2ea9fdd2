//! The agent as others meet it: over real HTTP/3 with certificates, over its unix socket, and from a file.

mod api;
mod certs;
mod cluster;
mod coordinator;
mod file_source;
mod removal;
mod session;
mod shutdown;
