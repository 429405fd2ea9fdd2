//! The embedded store from outside: its contract, its end at any moment, damaged files and full disks.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests too")]

mod crash;
mod damage;
mod full_disk;
mod reopening;
mod sled_conformance;
