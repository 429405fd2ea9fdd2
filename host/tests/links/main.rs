//! Bridges and TAPs, made and mended in networks that the tests make themselves.
#![cfg(feature = "network")]
#![allow(clippy::unwrap_used)] // A test may end at the first surprise.

mod drift;
mod flushed;
mod frames;
mod made;
#[path = "../support/netns.rs"]
mod netns;
mod scale;
mod tenants;

use tenants::{OWNER, net, port, tenant};
