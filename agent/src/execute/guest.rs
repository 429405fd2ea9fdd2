//! The guest's part of a step: identity, readiness, drain, shutdown.

use std::time::Duration;

use mvm_host::network::Mac;
use mvm_image::BootImage;
use mvm_image::ImageError;
use mvm_proto::document::WorkloadOverride;
use mvm_proto::guest::{FEATURE_HEALTH, FEATURE_WORKLOAD, Mount, Reborn, SetHealth, SetWorkload};
use mvm_proto::{Digest, InstanceId, Phase, WorkloadState};
use mvm_vmm::{Driver, VmExit};
use tokio::sync::broadcast;
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::timing::{Stage, Stopwatch};
use super::{Executor, StepError};
use crate::crash;
use crate::guest::{ANSWER_WITHIN, Drained, LinkError};
use crate::instance::DATA_DISK_PATH;
use crate::instance::record::Record;

/// A guest that was asked to end may take this much longer than the grace that its workload has.
const SHUTDOWN_MARGIN: Duration = Duration::from_secs(3);

/// The data disk's name on its bus, and where it goes.
pub(crate) const DATA_DISK_SERIAL: &str = "data";
/// What a drain came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drain {
    /// Go on and pause it.
    Over,
    /// It has work again: leave it running.
    CalledOff,
    /// A request wants it: the same, for the request.
    Wanted,
}

/// What a guest whose VM runs is given, and told.
pub(super) struct Life {
    pub(super) bundle: Option<Zeroizing<Vec<u8>>>,
    pub(super) start_workload: bool,
    /// It is known to be of a version that can be told who it is.
    pub(super) understands: bool,
    /// Passed when it knows who it is, and when it is ready.
    pub(super) points: [&'static str; 2],
}

/// How the guest is to check its program.
pub(super) fn health_of(record: &Record) -> SetHealth {
    SetHealth { health: record.health.as_deref().map(Into::into) }
}

/// What the guest is to run in place of what its image says.
pub(super) fn workload_of(workload: &WorkloadOverride) -> SetWorkload {
    SetWorkload { workload: Some(workload.into()) }
}

/// What an instance was booted from last.
fn image_of(record: &Record) -> Digest {
    let imagined = || BootImage::imagined(&record.flake_ref).digest;
    record.image.or(record.image_digest).unwrap_or_else(imagined)
}

impl Executor {
    /// The files that an instance is booted or restored with. Refused where no image key vouches for them any more.
    pub(crate) fn boot_image(&self, record: &Record) -> Result<BootImage, StepError> {
        Ok(self.images.boot_image(&image_of(record), &record.flake_ref)?)
    }

    /// Whether an instance that rests may run again: it is refused where no image key vouches for its image any more.
    pub(crate) fn check_image(&self, record: &Record) -> Result<(), ImageError> {
        self.images.check(&image_of(record))
    }

    fn identity(&self, record: &mut Record, start_workload: bool) -> Reborn {
        let now = self.clock.now();
        let net = record.net;
        let disk = Mount {
            serial: DATA_DISK_SERIAL.to_owned(),
            path: DATA_DISK_PATH.to_owned(),
            filesystem: "ext4".to_owned(),
            read_only: false,
        };
        let env = [
            ("MVM_INSTANCE", record.id.to_string()),
            ("MVM_TENANT", record.tenant.to_string()),
            ("MVM_POOL", record.pool.to_string()),
        ];
        Reborn {
            instance_id: record.id.to_string(),
            hostname: record.id.to_string(),
            address: net
                .map_or_else(String::new, |net| format!("{}/{}", record.address, net.subnet.prefix())),
            gateway: net.map_or_else(String::new, |net| net.subnet.gateway().to_string()),
            mac: net.map_or_else(String::new, |net| Mac::of(net.id, record.offset).to_string()),
            dns: self.isolation.resolvers(net),
            entropy: Vec::new(),
            unix_ms: u64::try_from(now.unix_ms()).unwrap_or(0),
            env: env.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            start_workload,
            mounts: if record.resources.data_disk_mib > 0 { vec![disk] } else { Vec::new() },
            generation: record.next_generation(now),
            health: Some(health_of(record)),
            workload: record.workload_override.as_deref().map(workload_of),
        }
    }

    /// Gives a guest whose VM runs its secrets, tells it who it is, and waits until it is ready.
    pub(super) async fn bring_to_life(
        &self,
        record: &mut Record,
        life: Life,
        mut exits: broadcast::Receiver<VmExit>,
        watch: &mut Stopwatch,
    ) -> Result<(), StepError> {
        let Life { bundle, start_workload, understands, points } = life;
        let id = record.id.clone();
        let deadline = Instant::now() + self.boot_deadline;
        let restart = record.restart;
        let healthy_by = deadline + Self::health_within(record);
        self.links.open(&id);
        let holds_back = start_workload && self.sessions.holds_back(record);
        let life = async {
            // Nothing has to come before: then it is the first thing that the guest hears.
            let told = match bundle {
                None if understands => {
                    let identity = self.identity(record, start_workload && !holds_back);
                    Some(self.links.reborn_early(&id, identity, self.boot_deadline)?)
                }
                _ => None,
            };
            let view = self.links.greeted(&id, deadline).await?;
            watch.lap(Stage::Greeted);
            // It would run another program than its pool says.
            if record.workload_override.is_some() && !view.can_change_workload {
                let lacks = LinkError::Lacks(FEATURE_WORKLOAD);
                self.events.publish("GuestOutdated", record.full_name(), lacks.to_string());
                return Err(lacks.into());
            }
            if view.version == 2 {
                let message = "the guest speaks version 2 of the guest protocol, which can't carry secrets";
                self.events.publish("GuestOutdated", record.full_name(), message);
            }
            self.give_secrets(record, bundle).await?;
            if view.version >= 2 {
                let left = deadline.saturating_duration_since(Instant::now()).max(ANSWER_WITHIN);
                match told {
                    Some(told) => told.await?,
                    None => {
                        let identity = self.identity(record, start_workload && !holds_back);
                        self.links.reborn(&id, identity, left).await?;
                    }
                }
                if start_workload {
                    self.sessions.bring_back(record, &self.records).await?;
                }
                if holds_back {
                    let identity = self.identity(record, true);
                    self.links.reborn(&id, identity, left).await?;
                }
            } else {
                let message =
                    "the guest speaks version 1 of the guest protocol and keeps the identity of its image";
                self.events.publish("GuestOutdated", record.full_name(), message);
            }
            crash::point(points[0]);
            watch.lap(Stage::Reborn);
            self.isolation.open(record).await?;
            watch.lap(Stage::Opened);
            let view = self.links.decided(&id, healthy_by.max(Instant::now() + ANSWER_WITHIN)).await?;
            // One that came up with a program that failed did not start. Where the program is over as its pool would have
            // it, or was before its guest slept, the guest is up all the same.
            let starts_again =
                |state: WorkloadState| state == WorkloadState::Unhealthy || state.is_restarted(restart);
            if start_workload && view.workload().is_some_and(starts_again) {
                return Err(LinkError::WorkloadFailed(view.message).into());
            }
            if record.health.is_some() && !view.can_check_health {
                self.events.publish(
                    "GuestOutdated",
                    record.full_name(),
                    LinkError::Lacks(FEATURE_HEALTH).to_string(),
                );
            }
            crash::point(points[1]);
            watch.lap(Stage::Ready);
            Ok(())
        };
        tokio::select! {
            lived = life => lived,
            detail = self.ended(&mut exits, &id) => Err(StepError::Died(detail)),
        }
    }

    /// Tells a guest that was only paused what time it is, without waiting for it.
    pub(super) fn refresh(&self, record: &mut Record) {
        let identity = self.identity(record, false);
        self.links.open(&record.id);
        if let Err(error) = self.links.refresh(&record.id, identity) {
            tracing::warn!(id = %record.id, %error, "could not refresh a resumed guest");
        }
    }

    /// Lets a running guest finish its work. What keeps it from that is told, and does not keep it running.
    /// On its way to warm it gives back memory, too; what is kept of its session is as it was after all that.
    pub(super) async fn drain(
        &self,
        record: &Record,
        timeout: Duration,
        rest: Phase,
    ) -> Result<Drain, StepError> {
        let now = self.clock.now();
        // The counts' and a person's word is final; the policy's was that the guest has nothing to do.
        let by_policy = record.on_demand && record.override_until.is_none_or(|until| until <= now);
        let deadline = Instant::now() + timeout;
        self.links.open(&record.id);
        match self.links.prepare_sleep(&record.id, timeout, by_policy).await {
            Ok(Drained::Done) => {}
            Ok(Drained::Busy) => {
                self.events.publish(
                    "InstanceBusy",
                    record.full_name(),
                    "got work while it was being drained; it keeps running",
                );
                return Ok(Drain::CalledOff);
            }
            Ok(Drained::Not(why)) => {
                self.events.publish(
                    "DrainTimedOut",
                    record.full_name(),
                    format!("was paused before it was drained: {why}"),
                );
            }
            Err(error @ LinkError::NoEntropy(_)) => return Err(error.into()),
            Err(error) => {
                self.events.publish(
                    "NotDrained",
                    record.full_name(),
                    format!("was paused before it was drained: {error}"),
                );
            }
        }
        // Giving memory back takes nothing of the time for the session.
        let left = deadline.saturating_duration_since(Instant::now());
        if rest == Phase::Warm {
            crash::point("warm.drained");
            if self.reclaim(record, by_policy).await? == Drain::CalledOff {
                return Ok(Drain::CalledOff);
            }
            crash::point("warm.reclaimed");
        }
        self.sessions.keep_before_pause(record, &self.records, left).await;
        Ok(Drain::Over)
    }

    /// Asks a running guest to end and waits for that. Says how much of its grace is left for the driver to give.
    pub(super) async fn shut_down(&self, record: &Record, grace: Duration) -> Duration {
        self.sessions.keep_before_stop(record, &self.records, grace).await;
        let mut exits = self.driver.exits();
        if self.links.shutdown(&record.id, grace).await.is_err() {
            return grace;
        }
        crash::point("stop.asked");
        let ended = self.ended(&mut exits, &record.id);
        // It may have ended before anyone listened.
        if self.driver.adopt(&record.id).await.is_ok_and(|vm| vm.is_some())
            && tokio::time::timeout(grace + SHUTDOWN_MARGIN, ended).await.is_err()
        {
            self.events.publish(
                "GuestKilled",
                record.full_name(),
                format!("did not shut down within {grace:?}"),
            );
        }
        Duration::ZERO
    }

    /// How the VM of `id` ended, once it has. What is told may be late, and of a process that it had before: so it
    /// is looked for.
    pub(super) async fn ended(&self, exits: &mut broadcast::Receiver<VmExit>, id: &InstanceId) -> String {
        loop {
            let detail = match exits.recv().await {
                Ok(exit) if exit.instance == *id => exit.detail,
                Ok(_) => continue,
                // It may be among those that were missed.
                Err(broadcast::error::RecvError::Lagged(_)) => "its VM ended".to_owned(),
                Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
            };
            if self.driver.adopt(id).await.is_ok_and(|vm| vm.is_none()) {
                return detail;
            }
        }
    }
}
