//! The planner from outside: its laws on random fleets, and what it does, one case each.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails there")]

mod blocks;
mod claimed;
mod contract;
mod crowded;
mod diff;
mod draining;
mod expired;
mod faults;
mod guards;
mod laws;
mod observations;
mod on_the_way;
mod placement;
mod pressure;
mod pressure_laws;
mod quotas;
mod returning;
mod rolling;
mod rollouts;
mod scale;
mod shares;
mod sleep;
mod steps;
mod workloads;
mod world;
