//! The transport on real loopback sockets: what it carries, and every limit hit once.

mod bad_peers;
mod connections;
mod http;
mod malformed;
mod refusals;
mod resets;
mod sessions;
mod support;
mod tunnels;
