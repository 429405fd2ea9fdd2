//! The firewall on a real kernel: who reaches whom, what is counted when not, and what happens when someone meddles.
//!
//! Everything happens in network namespaces that each test makes for itself.

mod connections;
mod drift;
mod frames;
mod lab;
mod matrix;
mod rebuilding;
mod space;
mod strangers;
