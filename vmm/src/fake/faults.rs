//! Latency, failures and bad guests that tests set on the fake driver.

use std::time::Duration;

use mvm_proto::InstanceId;
use parking_lot::{Mutex, MutexGuard};

use super::super::DriverError;

/// How a call goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It answers with an error and does nothing.
    Fail,
    /// It does nothing and never answers.
    HangBefore,
    /// It does what it was asked and never answers: the caller may die before it learns.
    HangAfter,
}

/// How a guest behaves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Manner {
    #[default]
    Good,
    /// It answers nothing at all, as one that hangs in its boot.
    Silent,
    /// It greets and takes its identity, and never gets ready.
    NeverReady,
    /// Its workload fails.
    Fails,
    /// It refuses its identity.
    RefusesIdentity,
    /// It never says that it may be paused.
    IgnoresSleep,
    /// It hears that it should end, and does not.
    IgnoresShutdown,
    /// It speaks version 1 of the protocol.
    Old,
    /// It speaks version 2.
    WithoutSecrets,
    /// It speaks version 3, and names no feature.
    WithoutFeatures,
    /// It never says how much of its memory is free.
    HidesMemory,
    /// It does not wipe its secrets.
    KeepsSecrets,
}

/// Latency and failures of the fake driver's calls. By default there are none.
#[derive(Debug, Default)]
pub struct Faults {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    latency: Duration,
    age_of_looks: Duration,
    planned: Vec<Planned>,
    bad_image: Option<(String, Fault)>,
    manners: Vec<(Option<InstanceId>, Manner)>,
    hits: u64,
}

#[derive(Debug)]
struct Planned {
    action: String,
    instance: Option<InstanceId>,
    times: u32,
    fault: Fault,
}

impl Faults {
    /// What a test asks of an agent that is another process: the calls that `MVM_FAKE_HANGS_AFTER` names take effect and
    /// never answer. Release builds have no such thing.
    pub(super) fn asked() -> Self {
        let faults = Self::default();
        if cfg!(debug_assertions)
            && let Ok(action) = std::env::var("MVM_FAKE_HANGS_AFTER")
        {
            faults.plan(&action, None, u32::MAX, Fault::HangAfter);
        }
        faults
    }

    /// Every call takes this long.
    pub fn set_latency(&self, latency: Duration) {
        self.lock().latency = latency;
    }

    /// A list is this old when it is returned.
    pub fn set_age_of_looks(&self, age: Duration) {
        self.lock().age_of_looks = age;
    }

    pub(super) async fn grow_old(&self) {
        let age = self.lock().age_of_looks;
        if age > Duration::ZERO {
            tokio::time::sleep(age).await;
        }
    }

    /// The next `times` calls of `action` go wrong, for one instance or for all.
    pub fn plan(&self, action: &str, instance: Option<&InstanceId>, times: u32, fault: Fault) {
        let (action, instance) = (action.to_owned(), instance.cloned());
        self.lock().planned.push(Planned { action, instance, times, fault });
    }

    /// Every boot of this image goes wrong.
    pub fn set_bad_image(&self, flake_ref: &str, fault: Fault) {
        self.lock().bad_image = Some((flake_ref.to_owned(), fault));
    }

    /// How guests behave from now on, one or all of them.
    pub fn set_manner(&self, instance: Option<&InstanceId>, manner: Manner) {
        self.lock().manners.insert(0, (instance.cloned(), manner));
    }

    pub(super) fn manner(&self, instance: &InstanceId) -> Manner {
        let inner = self.lock();
        let meant = |(id, _): &&(Option<InstanceId>, Manner)| id.as_ref().is_none_or(|id| id == instance);
        inner.manners.iter().find(meant).map_or(Manner::Good, |(_, manner)| *manner)
    }

    /// How many calls went wrong so far.
    #[must_use]
    pub fn hits(&self) -> u64 {
        self.lock().hits
    }

    pub fn clear(&self) {
        *self.lock() = Inner::default();
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// What is to go wrong with this call.
    pub(super) fn of(
        &self,
        action: &'static str,
        instance: &InstanceId,
        image: Option<&str>,
    ) -> Option<Fault> {
        let mut inner = self.lock();
        let bad =
            inner.bad_image.as_ref().filter(|(bad, _)| Some(bad.as_str()) == image).map(|(_, fault)| *fault);
        let planned = inner.planned.iter_mut().find(|planned| {
            let meant = planned.instance.as_ref().is_none_or(|id| id == instance);
            planned.times > 0 && planned.action == action && meant
        });
        let fault = bad.or_else(|| {
            planned.map(|planned| {
                planned.times -= 1;
                planned.fault
            })
        });
        // A call that takes effect first is hit when it has.
        inner.hits += u64::from(matches!(fault, Some(Fault::Fail | Fault::HangBefore)));
        fault
    }

    pub(super) async fn before(
        &self,
        fault: Option<Fault>,
        action: &'static str,
        instance: &InstanceId,
    ) -> Result<(), DriverError> {
        let latency = self.lock().latency;
        if latency > Duration::ZERO {
            tokio::time::sleep(latency).await;
        }
        match fault {
            Some(Fault::HangBefore) => std::future::pending().await,
            Some(Fault::Fail) => {
                let reason = format!("was told to fail to {action}");
                Err(DriverError::Vmm { instance: instance.clone(), reason })
            }
            Some(Fault::HangAfter) | None => Ok(()),
        }
    }

    pub(super) async fn after(&self, fault: Option<Fault>) {
        if fault == Some(Fault::HangAfter) {
            self.lock().hits += 1;
            std::future::pending::<()>().await;
        }
    }
}
