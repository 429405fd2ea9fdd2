//! Laws about guests: they answer, their memory survives, they end when asked, and their end is told.

use std::time::Duration;

use mvm_proto::InstanceId;
use tokio::sync::broadcast;
use tokio::time::{Instant, timeout};

use super::client::Client;
use super::{Broken, Held, Subject, done, same, spec, state};
use crate::{Driver, DriverError, SnapshotOptions, VmExit, VmSpec, VmState};

/// An end is told at once; this is for a machine that is busy.
const TOLD_WITHIN: Duration = Duration::from_secs(20);

/// Long enough that a guest which ends by itself is told from one that is killed at the end of the wait.
const GRACE: Duration = Duration::from_secs(30);

/// All laws about guests, with two boots.
pub async fn guest_suite<D: Driver>(driver: &D, subject: &Subject) -> Held {
    memory_survives_pause_snapshot_and_restore(driver, &spec(subject, 40)).await?;
    a_guest_that_ends_is_told_and_gone(driver, &spec(subject, 41)).await
}

pub(super) async fn greet<D: Driver>(law: &'static str, driver: &D, spec: &VmSpec) -> Result<Client, Broken> {
    let stream = done(law, driver.guest(&spec.instance).await)?;
    done(law, Client::greet(stream).await)
}

/// The same conversation while its stream lasts, else a new one: Firecracker resets every stream with a snapshot.
async fn again<D: Driver>(
    law: &'static str,
    driver: &D,
    spec: &VmSpec,
    mut guest: Client,
) -> Result<Client, Broken> {
    match guest.run(&["true"]).await {
        Ok(_) => Ok(guest),
        Err(_) => greet(law, driver, spec).await,
    }
}

async fn memory_survives_pause_snapshot_and_restore<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "a guest's memory survives pause, snapshot and restore";
    const FILE: &str = "/tmp/conformance";
    let instance = &spec.instance;
    done(LAW, driver.boot(spec).await)?;
    let mut guest = greet(LAW, driver, spec).await?;
    same(LAW, done(LAW, guest.run(&["echo", "hello"]).await)?.as_str(), "hello\n")?;
    done(LAW, guest.write(FILE, "kept").await)?;
    speaks(LAW, driver, spec, &mut guest).await?;

    done(LAW, driver.pause(instance).await)?;
    done(LAW, driver.resume(instance).await)?;
    let mut guest = again(LAW, driver, spec, guest).await?;
    same(LAW, done(LAW, guest.read(FILE).await)?.as_str(), "kept")?;

    // A VM that was saved can go on, and be saved again as another one.
    done(LAW, driver.pause(instance).await)?;
    let first = done(LAW, driver.snapshot(instance, &SnapshotOptions::plain()).await)?;
    done(LAW, driver.resume(instance).await)?;
    let mut guest = again(LAW, driver, spec, guest).await?;
    done(LAW, guest.write(FILE, "kept again").await)?;
    drop(guest);
    done(LAW, driver.pause(instance).await)?;
    let second = done(LAW, driver.snapshot(instance, &SnapshotOptions::plain()).await)?;
    same(LAW, first.digest == second.digest, false)?;
    done(LAW, driver.kill(instance).await)?;

    done(LAW, driver.restore(spec, &second, &SnapshotOptions::plain()).await)?;
    same(LAW, state(LAW, driver, spec).await?, Some(VmState::Paused))?;
    done(LAW, driver.resume(instance).await)?;
    let mut guest = greet(LAW, driver, spec).await?;
    same(LAW, done(LAW, guest.read(FILE).await)?.as_str(), "kept again")?;
    same(LAW, done(LAW, guest.run(&["echo", "again"]).await)?.as_str(), "again\n")?;
    done(LAW, driver.remove(instance).await)
}

/// What a guest writes to its console can be read.
async fn speaks<D: Driver>(law: &'static str, driver: &D, spec: &VmSpec, guest: &mut Client) -> Held {
    // A guest without a shell has said something by itself.
    // The output of the program that runs it is the console, whatever the guest is.
    let asked = guest.run(&["sh", "-c", "echo spoken >> /proc/$PPID/fd/1"]).await.is_ok();
    let heard = |text: &[u8]| match asked {
        true => text.windows(6).any(|word| word == b"spoken"),
        false => !text.is_empty(),
    };
    let mut look = tokio::time::interval(Duration::from_millis(20));
    let spoken = async {
        loop {
            look.tick().await;
            if heard(&driver.console(&spec.instance, 1 << 20).await?) {
                return Ok::<_, DriverError>(());
            }
        }
    };
    done(law, done(law, timeout(TOLD_WITHIN, spoken).await)?)
}

async fn a_guest_that_ends_is_told_and_gone<D: Driver>(driver: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "a guest that ends is told, and stopping it waits for that";
    let mut exits = driver.exits();
    done(LAW, driver.boot(spec).await)?;
    let mut guest = greet(LAW, driver, spec).await?;
    done(LAW, guest.shut_down().await)?;
    let began = Instant::now();
    done(LAW, driver.stop(&spec.instance, GRACE).await)?;
    same(LAW, began.elapsed() < GRACE, true)?;
    same(LAW, state(LAW, driver, spec).await?, None)?;
    told(LAW, &mut exits, &spec.instance).await?;
    done(LAW, driver.remove(&spec.instance).await)
}

async fn told(
    law: &'static str,
    exits: &mut broadcast::Receiver<VmExit>,
    instance: &InstanceId,
) -> Result<VmExit, Broken> {
    let told = async {
        loop {
            match exits.recv().await {
                Ok(exit) if exit.instance == *instance => return Ok(exit),
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(error) => return Err(error),
            }
        }
    };
    done(law, done(law, timeout(TOLD_WITHIN, told).await)?)
}

/// VMs that end from outside: `end` ends one as a crash would.
pub async fn sudden_ends<D: Driver>(driver: &D, subject: &Subject, end: impl AsyncFn(&InstanceId)) -> Held {
    const LAW: &str = "a VM that ends by itself is told, gone, and can be booted again";
    for (number, paused) in [(30, false), (31, true)] {
        let spec = spec(subject, number);
        let mut exits = driver.exits();
        done(LAW, driver.boot(&spec).await)?;
        if paused {
            done(LAW, driver.pause(&spec.instance).await)?;
        }
        end(&spec.instance).await;
        let exit = told(LAW, &mut exits, &spec.instance).await?;
        same(LAW, exit.detail.is_empty(), false)?;
        same(LAW, state(LAW, driver, &spec).await?, None)?;
        done(LAW, driver.boot(&spec).await)?;
        same(LAW, state(LAW, driver, &spec).await?, Some(VmState::Running))?;
        done(LAW, driver.remove(&spec.instance).await)?;
    }
    Ok(())
}

/// What can't be booted: a kernel that is missing, and one that is none. Both say why, and leave no VM.
pub async fn refusals<D: Driver>(driver: &D, subject: &Subject, not_a_kernel: &std::path::Path) -> Held {
    const LAW: &str = "what can't be booted is refused, and leaves no VM";
    for (number, kernel) in [(35, not_a_kernel.with_extension("missing")), (36, not_a_kernel.to_owned())] {
        let mut spec = spec(subject, number);
        spec.image.kernel = kernel;
        same(LAW, driver.boot(&spec).await.is_err(), true)?;
        same(LAW, state(LAW, driver, &spec).await?, None)?;
        done(LAW, driver.remove(&spec.instance).await)?;
    }
    Ok(())
}
