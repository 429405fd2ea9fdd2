//! What a test makes go wrong.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use mvm_proto::InstanceId;

use super::super::DriverError;

/// Latency and failures of the fake driver's calls. By default there are none.
#[derive(Debug, Default)]
pub struct Faults {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    latency: Duration,
    failures: Vec<Failure>,
}

#[derive(Debug)]
struct Failure {
    action: &'static str,
    instance: Option<InstanceId>,
    times: u32,
    hangs: bool,
}

impl Faults {
    /// Every call takes this long.
    pub fn set_latency(&self, latency: Duration) {
        self.lock().latency = latency;
    }

    /// The next `times` calls of `action` fail, for one instance or for all.
    pub fn fail(&self, action: &'static str, instance: Option<&InstanceId>, times: u32) {
        self.add(action, instance, times, false);
    }

    /// The next `times` calls of `action` never answer.
    pub fn hang(&self, action: &'static str, instance: Option<&InstanceId>, times: u32) {
        self.add(action, instance, times, true);
    }

    pub fn clear(&self) {
        *self.lock() = Inner::default();
    }

    fn add(&self, action: &'static str, instance: Option<&InstanceId>, times: u32, hangs: bool) {
        self.lock().failures.push(Failure { action, instance: instance.cloned(), times, hangs });
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn pass(&self, action: &'static str, instance: &InstanceId) -> Result<(), DriverError> {
        let (latency, failure) = {
            let mut inner = self.lock();
            let latency = inner.latency;
            let hit = inner.failures.iter_mut().find(|failure| {
                let meant = failure.instance.as_ref().is_none_or(|id| id == instance);
                failure.times > 0 && failure.action == action && meant
            });
            let failure = hit.map(|failure| {
                failure.times -= 1;
                failure.hangs
            });
            (latency, failure)
        };
        if latency > Duration::ZERO {
            tokio::time::sleep(latency).await;
        }
        match failure {
            None => Ok(()),
            Some(true) => std::future::pending().await,
            Some(false) => {
                let reason = format!("was told to fail to {action}");
                Err(DriverError::Vmm { instance: instance.clone(), reason })
            }
        }
    }
}
