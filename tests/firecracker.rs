//! Firecracker's driver against a stand-in that keeps the real one's rules, and against the real one where it runs.

#![allow(clippy::unwrap_used)] // A test may end at the first surprise.

#[path = "firecracker/driver.rs"]
mod driver;
#[path = "firecracker/faults.rs"]
mod faults;
#[path = "firecracker/jailed.rs"]
mod jailed;
#[path = "firecracker/raw.rs"]
mod raw;
#[path = "firecracker/real.rs"]
mod real;
#[path = "firecracker/rules.rs"]
mod rules;
#[path = "firecracker/site.rs"]
mod site;
#[path = "firecracker/written.rs"]
mod written;
