//! Bridges and TAPs, made and mended in networks that the tests make themselves.

mod cycles;
mod drift;
mod flushed;
mod frames;
mod made;
mod scale;
mod tenants;

use tenants::{OWNER, net, port, tenant};
