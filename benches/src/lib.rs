//! Figures of mvm as ratios: each beside a named peer or a floor that was measured in the same run.
//!
//! `mvm-benches` runs [`rows`] one after the other, prints one table and writes one JSON file. Rows that need a server
//! bind it to one core and the load to another, alternate between ours and the peer's, and give the median of paired
//! ratios. Rows about processes start real `mvm` processes on loopback. Every loop is bounded in count or time.
//!
//! This is the one crate besides `transport` that uses quinn: it is the peer here, not the transport.

pub mod authority;
pub mod bare;
pub mod bare_qemu;
pub mod document;
pub mod effort;
pub mod fake_node;
mod firewall_lab;
pub mod machine;
pub mod nats;
pub mod operator;
pub mod report;
pub mod row;
pub mod rows;
pub mod statistics;
pub mod table;
