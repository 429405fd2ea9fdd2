//! The files that a VM boots from.

use std::path::PathBuf;

use mvm_proto::Digest;
use serde::{Deserialize, Serialize};

/// What a guest boots from: files that are whole, verified when they were made or imported, and read-only since.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootImage {
    /// Names the content of all of it.
    pub digest: Digest,
    /// An uncompressed ELF kernel with a PVH entry.
    pub kernel: PathBuf,
    pub initrd: Option<PathBuf>,
    /// A read-only root disk, the guest's `/dev/vda`.
    pub rootfs: Option<PathBuf>,
    /// What the image itself adds to the kernel's command line.
    pub cmdline: String,
}

impl BootImage {
    /// For the fake driver, which boots nothing: names without files.
    #[must_use]
    pub fn imagined(flake_ref: &str) -> Self {
        Self {
            digest: Digest::of(flake_ref.as_bytes()),
            kernel: PathBuf::from(flake_ref),
            initrd: None,
            rootfs: None,
            cmdline: String::new(),
        }
    }
}
