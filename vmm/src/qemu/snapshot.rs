//! What lies in an instance's `snapshot` directory, and when it may be used.
//!
//! `state` is what QEMU wrote: the devices, and the memory too unless that is in a file of its own, as a template's is. It is
//! in clear or encrypted; once it was compressed it is `packed` instead, with a note of its own.
//! The manifest beside it says what these files fit: revision, QEMU, machine, host, and the data disk as it was. The
//! directory gets its name once all of it is on disk, so that a snapshot is whole or absent.
//!
//! What was saved is not read again to be used. The manifest has a stamp of each file, which changes with every write;
//! the checksums, made in the background, have the digest of each. A file with another stamp is used only if it still has
//! that digest.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::OnceLock;

use mvm_host::{Host, ProcessIdentity};
use mvm_proto::{Digest, InstanceId};
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use super::args::{Accelerator, DATA_DISK};
use super::tsc;
use crate::encoding::Encoding;
use crate::run_files;

pub(super) const SNAPSHOT: &str = "snapshot";
pub(super) const UNFINISHED: &str = "snapshot.tmp";
pub(super) const STATE: &str = "state";
/// Of a template: its memory, which is not in `state` then.
pub(super) const MEMORY: &str = "memory";
pub(super) const MANIFEST: &str = "manifest.json";
pub(super) const CHECKSUMS: &str = "seal.json";
/// In an unfinished snapshot: the process whose memory is being written.
pub(super) const OWNER: &str = "owner.json";

/// In an unfinished snapshot that is encrypted: how, once all of it is.
pub(super) const ENCODING: &str = "form.json";

/// Of the manifest and the files that it speaks of. One of a number that is not here is not restored: 2 had no form,
/// and all of it was in clear.
pub(super) const FORMAT: u32 = 3;
const OLDEST_FORMAT: u32 = 2;

/// Measured rates differ by less from one time to the next; a guest's clock would go wrong by more.
const TSC_TOLERANCE: f64 = 0.001;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) format: u32,
    pub(super) revision: Digest,
    pub(super) image: Digest,
    pub(super) qemu: String,
    pub(super) accelerator: Accelerator,
    /// Part of the machine that a restore must make again, and not in the document.
    #[serde(default)]
    pub(super) balloon: bool,
    /// The guest gave memory back, and is to have it again when it runs.
    #[serde(default)]
    pub(super) short: bool,
    /// Of all that the guest sees of the machine.
    pub(super) hardware: Digest,
    pub(super) made_on: MadeOn,
    pub(super) state: FileStamp,
    /// How `state` was written.
    #[serde(default, rename = "form")]
    pub(super) encoding: Encoding,
    /// Absent: the memory is in `state`.
    pub(super) memory: Option<FileStamp>,
    /// The data disk as it was. Memory that meets a disk that moved on destroys it silently.
    pub(super) disk: Option<FileStamp>,
    /// The VMM that was saved: as long as it has not run since, this is its snapshot.
    pub(super) process: ProcessIdentity,
}

/// What of the host a saved guest depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MadeOn {
    pub(super) kernel: String,
    pub(super) cpu: String,
    /// Emulated guests count time by it.
    pub(super) tsc_khz: Option<u64>,
}

impl MadeOn {
    pub(super) async fn here() -> Self {
        // Neither changes while a machine is up, and there may be hundreds of processors to read about.
        static HERE: OnceLock<(String, String)> = OnceLock::new();
        let (kernel, cpu) = HERE.get_or_init(|| {
            let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
            let cpuinfo = read("/proc/cpuinfo");
            let cpu = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
            let cpu = cpu.map_or_else(String::new, |(_, name)| name.trim().to_owned());
            (read("/proc/sys/kernel/osrelease").trim().to_owned(), cpu)
        });
        Self { kernel: kernel.clone(), cpu: cpu.clone(), tsc_khz: tsc::khz().await }
    }

    /// Why a guest saved there can't go on here, if it can't.
    fn misfit(&self, here: &Self, accelerator: &Accelerator) -> Option<String> {
        match accelerator {
            // The processor is the host's own, and its state the host kernel's.
            Accelerator::Kvm { .. } if self.cpu != here.cpu => {
                Some(format!("it was made on the processor {}, and here is {}", self.cpu, here.cpu))
            }
            Accelerator::Kvm { .. } if self.kernel != here.kernel => {
                Some(format!("it was made on the kernel {}, and here is {}", self.kernel, here.kernel))
            }
            Accelerator::Kvm { .. } => None,
            Accelerator::Tcg => match (self.tsc_khz, here.tsc_khz) {
                (Some(there), Some(here)) if there.abs_diff(here) as f64 > there as f64 * TSC_TOLERANCE => {
                    Some(format!("it counts time by {there} kHz, and here are {here}"))
                }
                _ => None,
            },
        }
    }
}

/// A file as it was left: every later write to it shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileStamp {
    pub(super) bytes: u64,
    inode: u64,
    modified_s: i64,
    modified_ns: i64,
}

impl FileStamp {
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self {
            bytes: meta.len(),
            inode: meta.ino(),
            modified_s: meta.mtime(),
            modified_ns: meta.mtime_nsec(),
        })
    }

    /// Of an instance's data disk, if there is one, with what was written to it made durable.
    pub(super) async fn of_disk(host: &impl Host, instance: &InstanceId) -> io::Result<Option<Self>> {
        let Some(file) = run_files::open(host, instance, DATA_DISK).await? else { return Ok(None) };
        let taken = tokio::task::spawn_blocking(move || {
            file.sync_all()?;
            Self::of(&file).map(Some)
        });
        taken.await.map_err(io::Error::other)?
    }
}

/// What the files of a snapshot hash to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Checksums {
    /// The manifest that it belongs to.
    pub(super) snapshot: Digest,
    pub(super) state: Digest,
    pub(super) memory: Option<Digest>,
}

/// What a snapshot must fit.
#[derive(Debug)]
pub(super) struct Fit<'a> {
    pub(super) image: Digest,
    pub(super) qemu: &'a str,
    pub(super) hardware: Digest,
    pub(super) host: MadeOn,
}

/// A manifest, and what names the snapshot that it is of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) manifest: Manifest,
    pub(super) digest: Digest,
}

impl Found {
    pub(super) fn of(manifest: Manifest, text: &[u8]) -> Self {
        Self { manifest, digest: Digest::of(text) }
    }

    /// An instance's finished snapshot. Of one that can't be read there is nothing but the reason.
    pub(super) async fn read(
        host: &impl Host,
        instance: &InstanceId,
    ) -> io::Result<Option<Result<Self, String>>> {
        let Some(text) = run_files::read(host, instance, &format!("{SNAPSHOT}/{MANIFEST}")).await? else {
            return Ok(None);
        };
        Ok(Some(Self::parse(&text)))
    }

    /// A manifest as it was written.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Numbered {
            #[serde(default)]
            format: u32,
        }
        let parsed = serde_json::from_slice::<Numbered>(text).map_err(|error| error.to_string());
        let manifest = parsed.and_then(|numbered| match numbered.format {
            OLDEST_FORMAT..=FORMAT => serde_json::from_slice(text).map_err(|error| error.to_string()),
            other => {
                Err(format!("it is of format {other}, and this agent knows {OLDEST_FORMAT} to {FORMAT}"))
            }
        });
        manifest.map(|manifest| Self::of(manifest, text))
    }
}

impl Manifest {
    /// Why this snapshot can't be restored on what is here, if it can't.
    pub(super) fn misfit(&self, here: &Fit<'_>) -> Option<String> {
        if self.image != here.image {
            return Some(format!("it is of image {}, not {}", self.image, here.image));
        }
        if self.qemu != here.qemu {
            return Some(format!("it was made by QEMU {}, and here is {}", self.qemu, here.qemu));
        }
        if self.hardware != here.hardware {
            return Some("it is of a machine with other devices or resources".to_owned());
        }
        self.made_on.misfit(&here.host, &self.accelerator)
    }
}

/// Hashes a file of any size, as long as `wanted` says so.
pub(super) fn digest_of(mut file: impl io::Read, wanted: impl Fn() -> bool) -> io::Result<Digest> {
    let mut hash = sha2::Sha256::new();
    let mut buffer = vec![0; 1024 * 1024];
    loop {
        if !wanted() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(Digest::from_bytes(hash.finalize().into()));
        }
        hash.update(&buffer[..read]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_fits_the_image_the_program_and_the_machine_that_it_was_made_with() {
        let host = MadeOn { kernel: "6.1".into(), cpu: "One".into(), tsc_khz: None };
        let stamp = FileStamp { bytes: 1, inode: 2, modified_s: 3, modified_ns: 4 };
        let manifest = Manifest {
            format: FORMAT,
            revision: Digest::of(b"revision"),
            image: Digest::of(b"image"),
            qemu: "7.2".to_owned(),
            accelerator: Accelerator::Tcg,
            balloon: false,
            short: false,
            hardware: Digest::of(b"hardware"),
            made_on: host.clone(),
            state: stamp,
            encoding: Encoding::default(),
            memory: None,
            disk: None,
            process: ProcessIdentity { pid: 1, start_time: 2, boot_id: "3".to_owned() },
        };
        let (image, hardware) = (manifest.image, manifest.hardware);
        let here = |image, qemu, hardware| Fit { image, qemu, hardware, host: host.clone() };
        assert_eq!(manifest.misfit(&here(image, "7.2", hardware)), None);
        for (other, says) in [
            (here(hardware, "7.2", hardware), "of image"),
            (here(image, "8.0", hardware), "made by QEMU 7.2"),
            (here(image, "7.2", image), "other devices"),
        ] {
            assert!(manifest.misfit(&other).unwrap().contains(says));
        }
    }

    #[test]
    fn a_guest_goes_on_where_its_processor_and_its_time_are_the_same() {
        let made = MadeOn { kernel: "6.1".into(), cpu: "One".into(), tsc_khz: Some(2_400_000) };
        let kvm = Accelerator::Kvm { cpu: "host".to_owned() };
        for same in [&kvm, &Accelerator::Tcg] {
            assert_eq!(made.misfit(&made, same), None);
        }
        let near = MadeOn { tsc_khz: Some(2_400_900), ..made.clone() };
        let far = MadeOn { tsc_khz: Some(2_900_000), ..made.clone() };
        let other = MadeOn { cpu: "Two".into(), ..made.clone() };
        assert_eq!(made.misfit(&near, &Accelerator::Tcg), None);
        assert!(made.misfit(&far, &Accelerator::Tcg).is_some());
        assert_eq!(made.misfit(&other, &Accelerator::Tcg), None, "emulated processors are alike");
        assert!(made.misfit(&other, &kvm).is_some());
    }
}
