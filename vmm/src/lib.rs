//! Runs microVMs: the [`Driver`] trait, and the three drivers that implement it.
//!
//! The agent opens one [`AnyDriver`] at start, chosen in [`choice`], and calls nothing else here to run guests. What not every
//! driver can do is a trait of its own that [`Driver`] gives access to ([`Capability`]). A driver that this machine lacks
//! is refused by name, and never replaced by a weaker one. Every driver passes the suite in `conformance`.

mod any_driver;
mod capability;
pub mod choice;
#[cfg(any(test, feature = "testing"))]
pub mod conformance;
pub mod crash;
mod driver;
mod encoding;
mod error;
pub mod fake;
pub mod firecracker;
mod kind;
pub mod probe;
pub mod programs;
pub mod qemu;
pub mod run_files;
mod settings;
mod snapshot;
pub mod snapshot_key;
mod vm;

pub use any_driver::{AnyDriver, DriverUnavailable};
pub use capability::{Balloon, Capability, Compression, Forks, Lacking, Migration};
pub use driver::Driver;
pub use encoding::{SnapshotOptions, SnapshotPolicy};
pub use error::DriverError;
pub use fake::FakeDriver;
pub use firecracker::{FirecrackerDriver, FirecrackerSettings};
pub use kind::DriverKind;
pub use qemu::{QemuDriver, QemuSettings};
pub use settings::{DriverChoice, VmmSettings};
pub use snapshot::{Part, SnapshotRef};
pub use vm::{Bounds, ConsolePiece, GuestStream, Nic, Purpose, Vm, VmExit, VmSpec, VmState, VmmJail};
