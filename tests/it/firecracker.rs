//! Firecracker's driver against a stand-in that keeps the real one's rules, and against the real one where it runs.

mod driver;
mod faults;
mod jailed;
mod raw;
mod real;
mod rules;
mod site;
mod written;
