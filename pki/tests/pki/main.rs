//! The crate from outside: real handshakes in memory, real files, whole chains of roots.

mod authority;
mod handshakes;
mod rollover;
mod secrets;
mod support;
mod trust;
