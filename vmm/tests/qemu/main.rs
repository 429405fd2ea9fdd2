//! The QEMU driver with real microVMs: the suite that all drivers pass, and what can go wrong around it.
//!
//! Needs QEMU and the test image in `target/images`.

#![allow(clippy::unwrap_used)] // A test may end at the first surprise.

mod conformance;
mod damage;
mod direct_disk;
mod encoding;
mod faults;

use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_host::{EndSignal, Host as _, LocalHost, Operation};
use mvm_image::Store;
use mvm_needs::{Need, can_run};
use mvm_proto::{Digest, InstanceId};
use mvm_vmm::conformance::Subject;
use mvm_vmm::qemu::Accelerator;
use mvm_vmm::{QemuDriver, QemuSettings, VmSpec, VmmSettings};

/// What tests boot, or nothing where they can't run.
fn subject_where_it_can_run() -> Option<Subject> {
    if !can_run(&[Need::MicroVms]) {
        return None;
    }
    let store = Store::open(&mvm_needs::test_images()).unwrap();
    let newest = store.list().unwrap().into_iter().max_by_key(|digest| store.made_at(digest));
    Some(Subject::of(store.boot_image(&newest.unwrap()).unwrap()))
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
        bounds: mvm_vmm::Bounds::default(),
        purpose: mvm_vmm::Purpose::default(),
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
