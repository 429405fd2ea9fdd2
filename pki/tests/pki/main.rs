//! The crate from outside: real handshakes in memory, real files, whole chains of roots.

// Helpers outside `#[test]` functions are tests too.
#![allow(clippy::unwrap_used)]

mod authority;
mod handshakes;
mod pin;
mod rollover;
mod secrets;
mod support;
mod trust;
