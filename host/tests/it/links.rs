//! Bridges and TAPs, made and mended in networks that the tests make themselves.

mod cycles;
mod drift;
mod flushed;
mod frames;
mod made;
mod removal;
mod scale;
mod tenants;
mod trial;

use tenants::{OWNER, net, port, tenant};
