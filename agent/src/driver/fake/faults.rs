//! What a test makes go wrong.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mvm_proto::InstanceId;

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

/// Latency and failures of the fake driver's calls. By default there are none.
#[derive(Debug, Default)]
pub struct Faults {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    latency: Duration,
    planned: Vec<Planned>,
    bad_image: Option<(String, Fault)>,
    hits: u64,
}

#[derive(Debug)]
struct Planned {
    action: &'static str,
    instance: Option<InstanceId>,
    times: u32,
    fault: Fault,
}

impl Faults {
    /// Every call takes this long.
    pub fn set_latency(&self, latency: Duration) {
        self.lock().latency = latency;
    }

    /// The next `times` calls of `action` go wrong, for one instance or for all.
    pub fn plan(&self, action: &'static str, instance: Option<&InstanceId>, times: u32, fault: Fault) {
        self.lock().planned.push(Planned { action, instance: instance.cloned(), times, fault });
    }

    /// Every boot of this image goes wrong.
    pub fn set_bad_image(&self, flake_ref: &str, fault: Fault) {
        self.lock().bad_image = Some((flake_ref.to_owned(), fault));
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
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
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
