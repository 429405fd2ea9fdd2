//! What the driver adds to pausing and resuming a real guest, beside the bare QMP commands on one like it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use mvm_image::BootImage;
use mvm_image::Store;
use mvm_proto::document::Resources;
use mvm_proto::{Digest, InstanceId};
use mvm_vmm::VmmSettings;
use mvm_vmm::qemu::Accelerator;
use mvm_vmm::{Driver as _, QemuDriver, QemuSettings, VmSpec};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

use super::runtime;
use crate::effort::Effort;
use crate::row::{Goal, Row, Subject, Unit};

/// Milliseconds that the driver may add to one command.
const OVERHEAD_GOAL: Goal = Goal::FigureBelow(0.5);
/// Pauses and resumes in each half of a pair.
const ROUNDS: u32 = 20;
const RESOURCES: Resources = Resources { vcpus: 1, mem_mib: 128, data_disk_mib: 0 };

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    let image = image()?;
    let dir = tempfile::tempdir()?;
    let (ours, bare) = (Guest::boot(dir.path(), "a", &image)?, Guest::boot(dir.path(), "b", &image)?);
    let pairs = runtime()?.block_on(async {
        let driver = ours.driver();
        let mut wire = Wire::open(&bare.socket()).await?;
        let mut pairs = Vec::new();
        for _ in 0..effort.pairs {
            let begun = Instant::now();
            for _ in 0..ROUNDS {
                driver.pause(&ours.instance).await?;
                driver.resume(&ours.instance).await?;
            }
            let through_driver = each(begun);
            let begun = Instant::now();
            for _ in 0..ROUNDS {
                wire.execute("stop").await?;
                wire.execute("cont").await?;
            }
            pairs.push((through_driver, each(begun)));
        }
        anyhow::Ok(pairs)
    })?;
    let through_driver: Vec<f64> = pairs.iter().map(|(ours, _)| *ours).collect();
    let overhead: Vec<f64> = pairs.iter().map(|(ours, bare)| ours - bare).collect();
    Ok(vec![
        Row::of(Subject::Pause, "pause or resume through the driver", &through_driver, Unit::Milliseconds)
            .beside("bare QMP stop or cont", &pairs),
        Row::of(Subject::Pause, "what the driver adds to it", &overhead, Unit::Milliseconds)
            .goal(OVERHEAD_GOAL)
            .note(format!("{ROUNDS} of each in every half of a pair, QEMU on emulation")),
    ])
}

/// Milliseconds per command.
fn each(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1000.0 / f64::from(2 * ROUNDS)
}

/// The newest of the images that `make image` made.
fn image() -> Result<BootImage> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/images");
    let store = Store::open(&dir)?;
    let newest = store.list()?.into_iter().max_by_key(|digest| store.made_at(digest));
    Ok(store.boot_image(&newest.context("target/images is empty: run `make image`")?)?)
}

/// A microVM that lives until it is dropped.
struct Guest {
    data_dir: PathBuf,
    instance: InstanceId,
}

impl Guest {
    /// Boots in a runtime of its own: when that ends nobody holds the guest's QMP socket any more.
    fn boot(dir: &Path, name: &str, image: &BootImage) -> Result<Self> {
        let guest = Self { data_dir: dir.join(name), instance: InstanceId::from_bits(0xbe00_0001) };
        std::fs::create_dir(&guest.data_dir)?;
        let spec = VmSpec {
            instance: guest.instance.clone(),
            revision: Digest::of(b"bench"),
            resources: RESOURCES,
            image: image.clone(),
            bounds: mvm_vmm::Bounds::default(),
            purpose: mvm_vmm::Purpose::default(),
        };
        runtime()?.block_on(guest.driver().boot(&spec))?;
        Ok(guest)
    }

    fn driver(&self) -> QemuDriver {
        QemuDriver::open(&self.data_dir, QemuSettings::new(&VmmSettings::default()).on(Accelerator::Tcg))
    }

    fn socket(&self) -> PathBuf {
        self.data_dir.join("vms").join(self.instance.as_str()).join("qmp.sock")
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Ok(runtime) = runtime() {
            // The temporary folder goes in any case; a guest that is gone is what is wanted.
            let _ = runtime.block_on(async { self.driver().kill(&self.instance).await });
        }
    }
}

/// QMP and nothing else.
struct Wire {
    stream: BufReader<UnixStream>,
    line: String,
}

impl Wire {
    async fn open(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).await.context("could not reach the guest's QMP socket")?;
        let mut wire = Self { stream: BufReader::new(stream), line: String::new() };
        wire.read().await?;
        wire.execute("qmp_capabilities").await?;
        Ok(wire)
    }

    async fn read(&mut self) -> Result<()> {
        self.line.clear();
        let read = tokio::time::timeout(Duration::from_secs(10), self.stream.read_line(&mut self.line));
        if read.await.context("QEMU is silent")?? == 0 {
            bail!("QEMU closed its QMP socket");
        }
        Ok(())
    }

    async fn execute(&mut self, command: &str) -> Result<()> {
        let text = format!("{{\"execute\":\"{command}\"}}\n");
        self.stream.get_mut().write_all(text.as_bytes()).await?;
        loop {
            self.read().await?;
            if self.line.starts_with("{\"return\"") {
                return Ok(());
            }
            if self.line.starts_with("{\"error\"") {
                bail!("{command}: {}", self.line.trim());
            }
        }
    }
}
