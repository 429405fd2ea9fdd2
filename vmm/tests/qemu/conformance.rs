//! The laws of all drivers, kept by this one.

use mvm_vmm::conformance;
use nix::sys::signal::Signal;

use super::{DataDir, driver, signal, subject_where_it_can_run};

#[tokio::test]
async fn qemu_passes_the_suite() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let dir = DataDir::new();
    conformance::suite(&driver(dir.path()), &subject).await.unwrap();
}

#[tokio::test]
async fn guests_on_qemu_answer_keep_their_memory_and_end_when_asked() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let dir = DataDir::new();
    conformance::guest_suite(&driver(dir.path()), &subject).await.unwrap();
}

#[tokio::test]
async fn vms_on_qemu_outlive_their_driver() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let dir = DataDir::new();
    conformance::outlives_its_owner(async || driver(dir.path()), &subject).await.unwrap();
}

#[tokio::test]
async fn what_sleeps_on_qemu_goes_on_below_another_data_directory() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let (from, to) = (DataDir::new(), DataDir::new());
    conformance::migration_suite(&driver(from.path()), &driver(to.path()), &subject).await.unwrap();
}

#[tokio::test]
async fn qemu_killed_from_outside_is_told_and_gone() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let dir = DataDir::new();
    let driver = driver(dir.path());
    let kill = async |instance: &_| signal(dir.path(), instance, Signal::SIGKILL).await;
    conformance::sudden_ends(&driver, &subject, kill).await.unwrap();
}

#[tokio::test]
async fn a_kernel_that_is_missing_or_none_is_refused() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let dir = DataDir::new();
    let text = dir.path().join("kernel");
    std::fs::write(&text, "not a kernel\n".repeat(100)).unwrap();
    conformance::refusals(&driver(dir.path()), &subject, &text).await.unwrap();
}

#[tokio::test]
async fn a_qemu_that_is_not_in_its_control_group_is_ended() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let dir = DataDir::new();
    let host = conformance::FaultyHost::new(dir.path());
    let driver = mvm_vmm::QemuDriver::with_host(host, dir.path(), super::settings());
    conformance::a_vmm_outside_its_group_is_ended(&driver, &subject).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_qemu_is_told_before_it_is_missed() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let dir = DataDir::new();
    let host = conformance::FaultyHost::late(dir.path());
    let driver = mvm_vmm::QemuDriver::with_host(host, dir.path(), super::settings());
    let kill = async |instance: &_| {
        signal(dir.path(), instance, Signal::SIGKILL).await;
        while !super::pids(dir.path(), instance).await.is_empty() {
            tokio::task::yield_now().await;
        }
    };
    conformance::an_end_is_told_before_the_vm_is_missed(&driver, &subject, kill).await.unwrap();
}
