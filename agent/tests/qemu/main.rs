//! The QEMU driver with real microVMs: the suite that all drivers pass, and what can go wrong around it.
//!
//! Needs QEMU and the test image in `target/images`. Without them every test here says that it did not run, and CI,
//! which sets `CI`, fails.

#![allow(clippy::unwrap_used)] // A test may end at the first surprise.

mod at_rest;
mod conformance;
mod damage;
mod direct_disk;
mod faults;

use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_agent::driver::conformance::Subject;
use mvm_agent::driver::qemu::Accelerator;
use mvm_agent::driver::{BootImage, QemuDriver, QemuSettings, VmSpec};
use mvm_agent::image::Store;
use mvm_agent::settings::VmmSettings;
use mvm_host::{EndSignal, Host as _, LocalHost, Operation};
use mvm_proto::{Digest, InstanceId};

/// What tests boot, or nothing where they can't run.
#[allow(clippy::print_stdout, reason = "a test that did not run must say so where its output is read")]
fn subject(test: &str) -> Option<Subject> {
    let found = image();
    if let Err(missing) = &found {
        println!("{test}: did not run: {missing}");
        assert!(std::env::var_os("CI").is_none(), "{test} must run in CI: {missing}");
    }
    found.ok().map(Subject::of)
}

fn image() -> Result<BootImage, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&path).any(|dir| dir.join("qemu-system-x86_64").is_file()) {
        return Err("needs qemu-system-x86_64 (scripts/setup)".to_owned());
    }
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/images");
    if !images.join("sha256").is_dir() {
        return Err("needs target/images (make image)".to_owned());
    }
    let store = Store::open(&images).map_err(|error| error.to_string())?;
    let images = store.list().map_err(|error| error.to_string())?;
    let newest = images.into_iter().max_by_key(|digest| store.made_at(digest));
    let newest = newest.ok_or("target/images is empty (make image)")?;
    store.boot_image(&newest).map_err(|error| error.to_string())
}

/// Emulation: what this machine's KVM can do is the probe's business.
fn settings() -> QemuSettings {
    QemuSettings::new(&VmmSettings::default()).on(Accelerator::Tcg)
}

fn driver(data_dir: &Path) -> QemuDriver {
    QemuDriver::open(data_dir, settings())
}

fn spec(subject: &Subject, number: u32) -> VmSpec {
    VmSpec {
        instance: InstanceId::from_bits(0xfa00_0000 + number),
        revision: Digest::of(b"faults"),
        resources: subject.resources,
        image: subject.image.clone(),
        bounds: mvm_agent::driver::Bounds::default(),
        purpose: mvm_agent::driver::Purpose::default(),
    }
}

/// The pids of an instance's VMMs.
async fn pids(data_dir: &Path, instance: &InstanceId) -> Vec<i32> {
    let vmms = LocalHost::new(data_dir).vmms().await.unwrap();
    let mine = vmms.iter().filter(|vmm| vmm.instance == *instance);
    mine.map(|vmm| i32::try_from(vmm.process.pid).unwrap()).collect()
}

async fn signal(data_dir: &Path, instance: &InstanceId, signal: nix::sys::signal::Signal) {
    for pid in pids(data_dir, instance).await {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
    }
}

/// A data directory that takes its VMMs with it, however the test ends.
struct DataDir(tempfile::TempDir);

impl DataDir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for DataDir {
    fn drop(&mut self) {
        end_all(self.path().to_owned());
    }
}

/// Ends every VMM of a data directory, from wherever it is called.
fn end_all(data_dir: PathBuf) {
    let end = async move {
        let host = LocalHost::new(&data_dir);
        for vmm in host.vmms().await.unwrap_or_default() {
            let end = Operation::EndProcess { process: vmm.process.clone(), signal: EndSignal::Kill };
            let _ = host.perform(&end).await;
            let _ = tokio::time::timeout(Duration::from_secs(10), host.wait_end(&vmm)).await;
        }
    };
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build();
    let _ = std::thread::spawn(move || runtime().map(|runtime| runtime.block_on(end))).join();
}
