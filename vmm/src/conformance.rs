//! The laws that every driver keeps, called by the drivers' tests. Each law is one function, named by what it holds.
//!
//! | suite | for a driver |
//! |---|---|
//! | [`suite`] | of any kind |
//! | [`outlives_its_owner`] | whose VMs outlive it |
//! | [`guest_suite`] | whose guests answer |
//! | [`sudden_ends`] | whose VMs can be ended from outside |
//! | [`refusals`] | that reads files |
//! | [`encoding_suite`], [`encoded_guests`] | that compresses and encrypts, with guests that answer |
//! | [`migration_suite`] | that migrates |
//! | [`a_vmm_outside_its_group_is_ended`], [`an_end_is_told_before_the_vm_is_missed`] | that starts processes |

mod client;
mod encoding;
mod faulty_host;
mod guests;
mod migration;

use std::fmt::Debug;
use std::time::Duration;

use mvm_image::BootImage;
use mvm_proto::document::Resources;
use mvm_proto::{Digest, InstanceId, Timestamp};

use crate::{
    ConsolePiece, Driver, DriverError, Forks, Purpose, SnapshotOptions, SnapshotRef, Vm, VmSpec, VmState,
};

pub use client::Client;
pub use encoding::{encoded_guests, encoding_suite};
pub use faulty_host::{FaultyHost, a_vmm_outside_its_group_is_ended, an_end_is_told_before_the_vm_is_missed};
pub use guests::{guest_suite, refusals, sudden_ends};
pub use migration::migration_suite;

/// Which law does not hold, and what was seen instead.
#[derive(Debug, thiserror::Error)]
#[error("{law}: {found}")]
pub struct Broken {
    pub law: &'static str,
    pub found: String,
}

type Held = Result<(), Broken>;

/// The first random-looking id; each law has its own, so that a failure leaves the others alone.
const FIRST_ID: u32 = 0xc0f0_0000;

/// The number of a law that came after the others had theirs.
const STOPPED: u32 = 40;

/// What the laws are tried on.
#[derive(Debug, Clone)]
pub struct Subject {
    pub image: BootImage,
    pub resources: Resources,
}

impl Subject {
    /// For a driver that boots nothing.
    #[must_use]
    pub fn imagined() -> Self {
        Self::of(BootImage::imagined("builtin:busybox"))
    }

    /// The smallest machine that boots Debian's kernel with room to spare.
    #[must_use]
    pub fn of(image: BootImage) -> Self {
        Self { image, resources: Resources { vcpus: 1, mem_mib: 128, data_disk_mib: 0 } }
    }
}

fn spec(subject: &Subject, number: u32) -> VmSpec {
    VmSpec {
        instance: InstanceId::from_bits(FIRST_ID + number),
        revision: Digest::of(b"conformance"),
        resources: subject.resources,
        image: subject.image.clone(),
        bounds: super::Bounds::default(),
        purpose: super::Purpose::default(),
    }
}

fn done<T, E: Debug>(law: &'static str, result: Result<T, E>) -> Result<T, Broken> {
    result.map_err(|error| Broken { law, found: format!("{error:?}") })
}

#[allow(clippy::needless_pass_by_value, reason = "reads better where it is called")]
fn same<T: PartialEq + Debug>(law: &'static str, found: T, expected: T) -> Held {
    if found == expected {
        return Ok(());
    }
    Err(Broken { law, found: format!("{found:?} instead of {expected:?}") })
}

async fn state<D: Driver>(law: &'static str, driver: &D, spec: &VmSpec) -> Result<Option<VmState>, Broken> {
    Ok(done(law, driver.adopt(&spec.instance).await)?.map(|vm| vm.state))
}

/// All laws that a driver keeps while it lives.
pub async fn suite<D: Driver>(driver: &D, subject: &Subject) -> Held {
    let spec = |number| spec(subject, number);
    booting_twice_is_one_vm(driver, &spec(1)).await?;
    another_revision_is_never_taken_for_the_one_that_runs(driver, &spec(2)).await?;
    pausing_and_resuming_are_idempotent(driver, &spec(3)).await?;
    a_snapshot_needs_a_pause_and_leaves_the_vm_paused(driver, &spec(4)).await?;
    a_snapshot_that_was_stopped_leaves_a_vm_that_goes_on(driver, &spec(STOPPED)).await?;
    restoring_gives_a_paused_vm_and_keeps_the_snapshot(driver, &spec(5)).await?;
    a_discarded_snapshot_is_gone(driver, &spec(6)).await?;
    stopping_and_killing_what_is_gone_is_done(driver, &spec(7)).await?;
    what_has_no_vm_can_not_be_paused(driver, &spec(8)).await?;
    removing_leaves_nothing(driver, &spec(9)).await?;
    the_console_can_be_read_in_part(driver, &spec(10)).await?;
    processor_time_is_known_of_what_lives_and_only_grows(driver, &spec(14)).await?;
    if let Ok(forks) = driver.forks() {
        forks_are_vms_of_their_own(driver, forks, [spec(11), spec(12), spec(13)]).await?;
    }
    Ok(())
}

/// What is done to a snapshot in the background, by a driver that does any.
async fn compressed<D: Driver>(
    driver: &D,
    instance: &InstanceId,
    options: &SnapshotOptions,
) -> Result<(), DriverError> {
    match driver.compression() {
        Ok(compression) => compression.compress_snapshot(instance, options).await,
        Err(_) => Ok(()),
    }
}

/// A template that was saved and ended.
async fn template<D: Driver>(law: &'static str, driver: &D, spec: &VmSpec) -> Result<SnapshotRef, Broken> {
    let spec = VmSpec { purpose: Purpose::Template, ..spec.clone() };
    done(law, driver.boot(&spec).await)?;
    done(law, driver.pause(&spec.instance).await)?;
    let saved = done(law, driver.snapshot(&spec.instance, &SnapshotOptions::plain()).await)?;
    done(law, driver.kill(&spec.instance).await)?;
    Ok(saved)
}

async fn forks_are_vms_of_their_own<D: Driver>(driver: &D, forks: &dyn Forks, specs: [VmSpec; 3]) -> Held {
    const LAW: &str = "forks are VMs of their own, and outlive their template";
    let [base, one, two] = specs;
    let saved = template(LAW, driver, &base).await?;
    for fork in [&one, &two, &one] {
        done(LAW, forks.fork(fork, &saved).await)?;
        same(LAW, state(LAW, driver, fork).await?, Some(VmState::Paused))?;
    }
    same(LAW, state(LAW, driver, &base).await?, None)?;
    let other = VmSpec { revision: Digest::of(b"another revision"), ..two.clone() };
    same(LAW, matches!(forks.fork(&other, &saved).await, Err(DriverError::OtherRevision { .. })), true)?;
    done(LAW, driver.remove(&base.instance).await)?;
    done(LAW, driver.remove(&two.instance).await)?;
    let late = forks.fork(&two, &saved).await;
    same(LAW, matches!(late, Err(DriverError::NoSnapshot { .. })), true)?;
    done(LAW, driver.remove(&two.instance).await)?;
    done(LAW, driver.resume(&one.instance).await)?;
    same(LAW, state(LAW, driver, &one).await?, Some(VmState::Running))?;
    // And what ran is saved and restored like any other.
    done(LAW, driver.pause(&one.instance).await)?;
    let own = done(LAW, driver.snapshot(&one.instance, &SnapshotOptions::plain()).await)?;
    done(LAW, driver.kill(&one.instance).await)?;
    done(LAW, compressed(driver, &one.instance, &SnapshotOptions::plain()).await)?;
    done(LAW, driver.restore(&one, &own, &SnapshotOptions::plain()).await)?;
    done(LAW, driver.resume(&one.instance).await)?;
    same(LAW, state(LAW, driver, &one).await?, Some(VmState::Running))?;
    done(LAW, driver.remove(&one.instance).await)
}

async fn booting_twice_is_one_vm<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "booting twice is one VM";
    done(LAW, driver.boot(spec).await)?;
    done(LAW, driver.boot(spec).await)?;
    let mine = done(LAW, driver.list().await)?.into_iter().filter(|vm| vm.instance == spec.instance);
    let (instance, revision) = (spec.instance.clone(), spec.revision);
    same(LAW, mine.collect::<Vec<_>>(), vec![Vm { instance, revision, state: VmState::Running }])?;
    done(LAW, driver.remove(&spec.instance).await)
}

async fn another_revision_is_never_taken_for_the_one_that_runs<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "another revision is never taken for the one that runs";
    done(LAW, driver.boot(spec).await)?;
    let other = VmSpec { revision: Digest::of(b"another revision"), ..spec.clone() };
    same(LAW, matches!(driver.boot(&other).await, Err(DriverError::OtherRevision { .. })), true)?;
    done(LAW, driver.remove(&spec.instance).await)
}

async fn pausing_and_resuming_are_idempotent<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "pausing and resuming are idempotent";
    done(LAW, driver.boot(spec).await)?;
    for _ in 0..2 {
        done(LAW, driver.pause(&spec.instance).await)?;
        same(LAW, state(LAW, driver, spec).await?, Some(VmState::Paused))?;
    }
    for _ in 0..2 {
        done(LAW, driver.resume(&spec.instance).await)?;
        same(LAW, state(LAW, driver, spec).await?, Some(VmState::Running))?;
    }
    done(LAW, driver.remove(&spec.instance).await)
}

async fn a_snapshot_needs_a_pause_and_leaves_the_vm_paused<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "a snapshot needs a pause and leaves the VM paused";
    done(LAW, driver.boot(spec).await)?;
    let early = driver.snapshot(&spec.instance, &SnapshotOptions::plain()).await;
    same(LAW, matches!(early, Err(DriverError::WrongState { .. })), true)?;
    done(LAW, driver.pause(&spec.instance).await)?;
    let first = done(LAW, driver.snapshot(&spec.instance, &SnapshotOptions::plain()).await)?;
    let again = done(LAW, driver.snapshot(&spec.instance, &SnapshotOptions::plain()).await)?;
    same(LAW, first, again)?;
    same(LAW, state(LAW, driver, spec).await?, Some(VmState::Paused))?;
    done(LAW, driver.remove(&spec.instance).await)
}

async fn a_snapshot_that_was_stopped_leaves_a_vm_that_goes_on<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "a snapshot that was stopped leaves a VM that goes on";
    let (instance, plain) = (&spec.instance, SnapshotOptions::plain());
    done(LAW, driver.boot(spec).await)?;
    // Where nothing is being written there is nothing to stop.
    done(LAW, driver.stop_snapshot(instance).await)?;
    for wait_ms in [0, 5, 20] {
        done(LAW, driver.pause(instance).await)?;
        let stop = async {
            tokio::time::sleep(Duration::from_millis(wait_ms)).await;
            driver.stop_snapshot(instance).await
        };
        // It may have been quicker.
        let (_, stopped) = tokio::join!(driver.snapshot(instance, &plain), stop);
        done(LAW, stopped)?;
        done(LAW, driver.discard_snapshot(instance).await)?;
        same(LAW, state(LAW, driver, spec).await?, Some(VmState::Paused))?;
        done(LAW, driver.resume(instance).await)?;
        same(LAW, state(LAW, driver, spec).await?, Some(VmState::Running))?;
    }
    done(LAW, driver.pause(instance).await)?;
    done(LAW, driver.snapshot(instance, &plain).await)?;
    done(LAW, driver.remove(instance).await)
}

async fn restoring_gives_a_paused_vm_and_keeps_the_snapshot<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "restoring gives a paused VM and keeps the snapshot";
    done(LAW, driver.boot(spec).await)?;
    done(LAW, driver.pause(&spec.instance).await)?;
    let snapshot = done(LAW, driver.snapshot(&spec.instance, &SnapshotOptions::plain()).await)?;
    done(LAW, driver.kill(&spec.instance).await)?;
    same(LAW, state(LAW, driver, spec).await?, None)?;
    for _ in 0..2 {
        done(LAW, driver.restore(spec, &snapshot, &SnapshotOptions::plain()).await)?;
        same(LAW, state(LAW, driver, spec).await?, Some(VmState::Paused))?;
    }
    done(LAW, driver.kill(&spec.instance).await)?;
    done(LAW, driver.restore(spec, &snapshot, &SnapshotOptions::plain()).await)?;
    done(LAW, driver.resume(&spec.instance).await)?;
    same(LAW, state(LAW, driver, spec).await?, Some(VmState::Running))?;
    done(LAW, driver.remove(&spec.instance).await)
}

async fn a_discarded_snapshot_is_gone<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "a discarded snapshot is gone";
    done(LAW, driver.boot(spec).await)?;
    done(LAW, driver.pause(&spec.instance).await)?;
    let snapshot = done(LAW, driver.snapshot(&spec.instance, &SnapshotOptions::plain()).await)?;
    done(LAW, driver.kill(&spec.instance).await)?;
    for _ in 0..2 {
        done(LAW, driver.discard_snapshot(&spec.instance).await)?;
    }
    let restored = driver.restore(spec, &snapshot, &SnapshotOptions::plain()).await;
    same(LAW, matches!(restored, Err(DriverError::NoSnapshot { .. })), true)?;
    done(LAW, driver.remove(&spec.instance).await)
}

async fn stopping_and_killing_what_is_gone_is_done<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "stopping and killing what is gone is done";
    done(LAW, driver.boot(spec).await)?;
    for _ in 0..2 {
        done(LAW, driver.stop(&spec.instance, Duration::from_secs(1)).await)?;
        same(LAW, state(LAW, driver, spec).await?, None)?;
        done(LAW, driver.kill(&spec.instance).await)?;
    }
    done(LAW, driver.boot(spec).await)?;
    done(LAW, driver.pause(&spec.instance).await)?;
    done(LAW, driver.stop(&spec.instance, Duration::from_secs(1)).await)?;
    same(LAW, state(LAW, driver, spec).await?, None)?;
    done(LAW, driver.remove(&spec.instance).await)
}

async fn what_has_no_vm_can_not_be_paused<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "what has no VM can't be paused, resumed or snapshotted";
    let none = |result: Result<(), DriverError>| matches!(result, Err(DriverError::NoVm { .. }));
    same(LAW, none(driver.pause(&spec.instance).await), true)?;
    same(LAW, none(driver.resume(&spec.instance).await), true)?;
    same(LAW, none(driver.snapshot(&spec.instance, &SnapshotOptions::plain()).await.map(|_| ())), true)
}

async fn removing_leaves_nothing<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "removing leaves nothing";
    done(LAW, driver.boot(spec).await)?;
    for _ in 0..2 {
        done(LAW, driver.remove(&spec.instance).await)?;
    }
    let left = done(LAW, driver.list().await)?.into_iter().any(|vm| vm.instance == spec.instance);
    same(LAW, left, false)?;
    same(LAW, done(LAW, driver.console(&spec.instance, 1024).await)?, Vec::new())
}

async fn the_console_can_be_read_in_part<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "the console can be read in part";
    done(LAW, driver.boot(spec).await)?;
    done(LAW, driver.pause(&spec.instance).await)?;
    let all = done(LAW, driver.console(&spec.instance, 1 << 20).await)?;
    let end = done(LAW, driver.console(&spec.instance, 3).await)?;
    same(LAW, end.len() == all.len().min(3) && all.ends_with(&end), true)?;
    let whole = all.len() as u64;
    let piece = done(LAW, driver.console_from(&spec.instance, 1.min(whole), 1 << 20).await)?;
    same(LAW, (piece.offset, piece.end), (1.min(whole), whole))?;
    same(LAW, piece.data, all.get(1..).unwrap_or_default().to_vec())?;
    let none = done(LAW, driver.console_from(&spec.instance, whole, 1).await)?;
    same(LAW, none, ConsolePiece { offset: whole, data: Vec::new(), end: whole })?;
    let since = done(LAW, driver.console_since(&spec.instance, Timestamp::from_unix_ms(0)).await)?;
    same(LAW, since, 0)?;
    done(LAW, driver.remove(&spec.instance).await)
}

async fn processor_time_is_known_of_what_lives_and_only_grows<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "processor time is known of what lives, and only grows";
    same(LAW, driver.cpu_time(&spec.instance), None)?;
    done(LAW, driver.boot(spec).await)?;
    let first = driver.cpu_time(&spec.instance);
    let second = driver.cpu_time(&spec.instance);
    same(LAW, first.is_some() && first <= second, true)?;
    done(LAW, driver.remove(&spec.instance).await)?;
    same(LAW, driver.cpu_time(&spec.instance), None)
}

/// VMs outlive their driver: `open` opens it anew, as a restarted agent does.
pub async fn outlives_its_owner<D: Driver>(open: impl AsyncFn() -> D, subject: &Subject) -> Held {
    const LAW: &str = "VMs outlive their driver and are adopted";
    let [running, paused, asleep] = [20, 21, 22].map(|number| spec(subject, number));
    let first = open().await;
    for spec in [&running, &paused, &asleep] {
        done(LAW, first.boot(spec).await)?;
    }
    done(LAW, first.pause(&paused.instance).await)?;
    done(LAW, first.pause(&asleep.instance).await)?;
    let snapshot = done(LAW, first.snapshot(&asleep.instance, &SnapshotOptions::plain()).await)?;
    done(LAW, first.kill(&asleep.instance).await)?;
    drop(first);

    let second = open().await;
    same(LAW, state(LAW, &second, &running).await?, Some(VmState::Running))?;
    same(LAW, state(LAW, &second, &paused).await?, Some(VmState::Paused))?;
    same(LAW, state(LAW, &second, &asleep).await?, None)?;
    done(LAW, second.boot(&running).await)?;
    done(LAW, second.restore(&asleep, &snapshot, &SnapshotOptions::plain()).await)?;
    same(LAW, done(LAW, second.list().await)?.len(), 3)?;
    for spec in [&running, &paused, &asleep] {
        done(LAW, second.remove(&spec.instance).await)?;
    }
    Ok(())
}
