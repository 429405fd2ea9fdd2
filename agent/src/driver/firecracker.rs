//! Firecracker.
mod http;
pub mod metrics;
pub mod request;
mod socket;
pub mod version;
pub mod vsock;
