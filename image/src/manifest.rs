//! The manifest of an image: its files with their sizes and digests. The image's name is the digest of the manifest.

use mvm_proto::Digest;
use serde::{Deserialize, Serialize};

/// The form of the manifest; part of what is hashed.
const VERSION: u32 = 1;

/// The files that an image can have. Their names are the same in a folder to import and in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// What the image adds to the kernel's command line.
    Cmdline,
    Initrd,
    Kernel,
    /// A read-only root disk.
    Rootfs,
}

impl Part {
    pub const ALL: [Part; 4] = [Part::Cmdline, Part::Initrd, Part::Kernel, Part::Rootfs];

    #[must_use]
    pub fn file_name(self) -> &'static str {
        match self {
            Part::Cmdline => "cmdline",
            Part::Initrd => "initrd",
            Part::Kernel => "kernel",
            Part::Rootfs => "rootfs",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    pub name: Part,
    pub size: u64,
    pub sha256: Digest,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    version: u32,
    pub files: Vec<FileEntry>,
}

impl Manifest {
    /// The manifest of these files, whatever order they come in.
    #[must_use]
    pub fn new(mut files: Vec<FileEntry>) -> Self {
        files.sort_by_key(|file| file.name);
        Self { version: VERSION, files }
    }

    /// The one way to write it, so that equal manifests have equal digests.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        // A value of plain fields always becomes JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }

    #[must_use]
    pub fn digest(&self) -> Digest {
        Digest::of(&self.bytes())
    }

    /// Reads what [`Manifest::bytes`] wrote; anything else, and any other image's manifest, is refused.
    pub(super) fn read(bytes: &[u8], digest: &Digest) -> Result<Self, String> {
        if Digest::of(bytes) != *digest {
            return Err("its manifest is not the one it is named by".to_owned());
        }
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|error| format!("its manifest: {error}"))?;
        if manifest.version != VERSION {
            return Err(format!("its manifest has version {}, and {VERSION} is known", manifest.version));
        }
        Ok(manifest)
    }

    #[must_use]
    pub fn size(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }

    #[must_use]
    pub fn has(&self, part: Part) -> bool {
        self.files.iter().any(|file| file.name == part)
    }
}
