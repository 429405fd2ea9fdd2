//! The agent's side of the guest protocol.
//!
//! [`GuestLinks`] has one link per live instance, and one task per link, which keeps the driver's stream open. Steps report
//! when a VM runs, is paused or is gone; all other callers wait for readiness, run programs, transfer files or reach a port.
//! Requests are numbered and kept until they are answered, so a broken stream, a restored guest or bytes of an earlier
//! connection cost time but lose no answer. All that a guest sends is bounded: a hostile guest can harm only its own link.

mod call;
mod error;
mod exec;
#[cfg(test)]
pub(crate) mod fake_guest;
mod files;
mod idle;
mod link;
mod load;
mod pending;
mod relay;
mod secrets;
mod task;
#[cfg(test)]
mod tests;
mod view;

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use call::{Call, Event};
use futures::future::BoxFuture;
use link::{Link, Mode};
use mvm_proto::InstanceId;
use mvm_proto::guest::{
    CancelSleep, EndWork, FEATURE_HEALTH, FEATURE_RESTART, FEATURE_WORKLOAD, Ping, PrepareSleep, Readiness,
    Reborn, RestartWorkload, SetHealth, SetWorkload, Shutdown, host_frame,
};
use mvm_vmm::{Driver, DriverError, GuestStream};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::clock::Clock;

pub use error::LinkError;
pub use exec::{ExecEvent, ExecHandle, ExecRequest, ExecTerminal, ExecUser, GoOn};
pub use files::READ_PIECE_BYTES;
pub(crate) use load::LOOK_EVERY;
pub use view::GuestView;

/// A guest that is up answers at once; one that does not within this long is stuck.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// A guest's own word on a drain may come this much after its time is up.
const DRAIN_MARGIN: Duration = Duration::from_secs(2);

/// How long to wait for the word that a shutdown was understood.
const SHUTDOWN_HEARD_WITHIN: Duration = Duration::from_secs(2);

/// What the kernel's generator is seeded with: all that it takes at once, twice over.
const ENTROPY_BYTES: usize = 64;

/// Opens streams, whatever the driver.
pub(crate) trait Dial: Send + Sync {
    fn dial<'a>(&'a self, instance: &'a InstanceId) -> BoxFuture<'a, Result<GuestStream, DriverError>>;
}

impl<D: Driver> Dial for D {
    fn dial<'a>(&'a self, instance: &'a InstanceId) -> BoxFuture<'a, Result<GuestStream, DriverError>> {
        Box::pin(self.guest(instance))
    }
}

/// How a guest took the request to prepare for sleep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Drained {
    /// It may be paused.
    Done,
    /// It has something to do again; the request was taken back.
    Busy,
    /// It is not done, and why; it may be paused all the same.
    Not(String),
}

/// The links of this node. Cheap to clone.
#[derive(Clone)]
pub struct GuestLinks {
    inner: Arc<Inner>,
}

struct Inner {
    dialer: Arc<dyn Dial>,
    clock: Clock,
    links: Mutex<BTreeMap<InstanceId, Arc<Link>>>,
    changed: Arc<watch::Sender<u64>>,
}

impl fmt::Debug for GuestLinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestLinks").field("links", &self.lock().len()).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for link in self.links.get_mut().values() {
            link.set_mode(Mode::Closed);
        }
    }
}

impl GuestLinks {
    #[must_use]
    pub fn new<D: Driver>(driver: Arc<D>, clock: Clock) -> Self {
        let changed = Arc::new(watch::Sender::new(0));
        Self { inner: Arc::new(Inner { dialer: driver, clock, links: Mutex::default(), changed }) }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<InstanceId, Arc<Link>>> {
        self.inner.links.lock()
    }

    fn link(&self, instance: &InstanceId) -> Result<Arc<Link>, LinkError> {
        self.lock().get(instance).cloned().ok_or_else(|| LinkError::NoLink(instance.clone()))
    }

    /// The instance's VM runs. Says whether the link is new.
    pub fn open(&self, instance: &InstanceId) -> bool {
        let mut links = self.lock();
        if let Some(link) = links.get(instance) {
            link.set_mode(Mode::Running);
            return false;
        }
        let (clock, changed) = (self.inner.clock.clone(), Arc::clone(&self.inner.changed));
        let link = Arc::new(Link::new(instance.clone(), clock, changed));
        links.insert(instance.clone(), Arc::clone(&link));
        tokio::spawn(task::link_task(link, Arc::clone(&self.inner.dialer)));
        true
    }

    /// The instance's VM is paused: its link stays, and nothing is expected of it.
    pub fn pause(&self, instance: &InstanceId) {
        if let Ok(link) = self.link(instance) {
            link.set_mode(Mode::Paused);
        }
    }

    /// The instance's VM is gone; so is whatever was asked of it.
    pub fn forget(&self, instance: &InstanceId) {
        let link = self.lock().remove(instance);
        if let Some(link) = link {
            link.set_mode(Mode::Closed);
        }
    }

    /// What is known of a guest; absent: there is no link to it.
    #[must_use]
    pub fn view(&self, instance: &InstanceId) -> Option<GuestView> {
        Some(self.lock().get(instance)?.view())
    }

    /// Above which share of its processors a guest works, as its pool's policy says.
    pub fn set_cpu_idle_percent(&self, instance: &InstanceId, percent: u32) {
        if let Ok(link) = self.link(instance)
            && link.view().cpu_idle_percent != percent
        {
            link.modify_view(|view| {
                view.cpu_idle_percent = percent;
                view.settle(self.inner.clock.now());
            });
        }
    }

    /// Processor time that the instance's VMM has taken since it was started, as seen at `at`.
    pub(crate) fn hear_vmm_cpu(&self, instance: &InstanceId, taken: Duration, vcpus: u32, at: Instant) {
        if let Ok(link) = self.link(instance) {
            link.modify_view(|view| view.hear_vmm_cpu(taken, vcpus, at, self.inner.clock.now()));
        }
    }

    /// Bytes that the instance has sent and received since its port was made, as seen at `at`.
    pub(crate) fn hear_bytes(&self, instance: &InstanceId, total: u64, at: Instant) {
        if let Ok(link) = self.link(instance)
            && link.mode() == Mode::Running
        {
            link.modify_view(|view| view.hear_bytes(total, at, self.inner.clock.now()));
        }
    }

    /// Wakes the reconcile loop, so that it decides again.
    pub(crate) fn look_again(&self) {
        self.inner.changed.send_modify(|count| *count += 1);
    }

    /// Changes whenever a guest gets ready, idle or busy, or comes or goes.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.inner.changed.subscribe()
    }

    /// Waits for a view of which `holds` is true.
    async fn until(
        &self,
        link: &Link,
        deadline: Instant,
        holds: impl Fn(&GuestView) -> bool,
    ) -> Result<GuestView, LinkError> {
        let begun = Instant::now();
        let mut follow = link.follow();
        let found = follow.wait_for(|view| link.mode() == Mode::Closed || holds(view));
        let found = tokio::time::timeout_at(deadline, found).await;
        match found {
            Ok(Ok(_)) if link.mode() == Mode::Closed => Err(LinkError::NoLink(link.instance.clone())),
            Ok(Ok(view)) => Ok(view.clone()),
            Ok(Err(_)) => Err(LinkError::NoLink(link.instance.clone())),
            Err(_) => Err(LinkError::Silent(begun.elapsed())),
        }
    }

    /// Waits until the guest greeted back.
    pub async fn greeted(&self, instance: &InstanceId, deadline: Instant) -> Result<GuestView, LinkError> {
        let link = self.link(instance)?;
        let found = self.until(&link, deadline, |view| view.connected).await;
        match found {
            Err(LinkError::Silent(_)) if !link.view().message.is_empty() => {
                Err(LinkError::WorkloadFailed(link.view().message))
            }
            other => other,
        }
    }

    /// Waits until the guest says that its workload is ready, or that it is not going to be.
    pub async fn decided(&self, instance: &InstanceId, deadline: Instant) -> Result<GuestView, LinkError> {
        self.decided_after(instance, 0, deadline).await
    }

    /// The same of a run of the workload later than this one.
    async fn decided_after(
        &self,
        instance: &InstanceId,
        run: u32,
        deadline: Instant,
    ) -> Result<GuestView, LinkError> {
        let link = self.link(instance)?;
        let begun = Instant::now();
        let decided = |view: &GuestView| view.is_decided() && (run == 0 || view.run > run);
        match self.until(&link, deadline, decided).await {
            Err(LinkError::Silent(_)) => {
                let (waited, readiness) = (begun.elapsed(), link.view().readiness);
                Err(LinkError::NotReady { waited, readiness })
            }
            other => other,
        }
    }

    /// Waits until the guest says that it is ready.
    pub async fn ready(&self, instance: &InstanceId, deadline: Instant) -> Result<GuestView, LinkError> {
        let view = self.decided(instance, deadline).await?;
        if view.readiness == Readiness::Failed {
            let said = if view.message.is_empty() { "it did not say why".to_owned() } else { view.message };
            return Err(LinkError::WorkloadFailed(said));
        }
        Ok(view)
    }

    /// The link once it stands and speaks at least version `needs`.
    async fn connected(
        &self,
        instance: &InstanceId,
        what: &'static str,
        needs: u32,
    ) -> Result<Arc<Link>, LinkError> {
        let link = self.link(instance)?;
        let view = self.until(&link, Instant::now() + ANSWER_WITHIN, |view| view.connected).await?;
        if view.version < needs {
            return Err(LinkError::Unsupported { what, needs, version: view.version });
        }
        Ok(link)
    }

    /// Begins a request once the link stands and speaks at least version `needs`.
    async fn begin(
        &self,
        instance: &InstanceId,
        what: &'static str,
        needs: u32,
        body: host_frame::Body,
    ) -> Result<Call, LinkError> {
        self.connected(instance, what, needs).await?.begin(body)
    }

    /// Asks something that is answered by a plain yes.
    async fn ask(
        &self,
        instance: &InstanceId,
        what: &'static str,
        within: Duration,
        body: host_frame::Body,
    ) -> Result<(), LinkError> {
        let needs = match body {
            host_frame::Body::Secrets(_) | host_frame::Body::WipeSecrets(_) => 3,
            _ => 2,
        };
        self.ask_since(needs, instance, what, within, body).await
    }

    /// The same of what came with version `needs`.
    async fn ask_since(
        &self,
        needs: u32,
        instance: &InstanceId,
        what: &'static str,
        within: Duration,
        body: host_frame::Body,
    ) -> Result<(), LinkError> {
        let asked = async { self.begin(instance, what, needs, body).await?.done().await };
        tokio::time::timeout(within, asked).await.unwrap_or(Err(LinkError::Silent(within)))
    }

    pub async fn ping(&self, instance: &InstanceId, within: Duration) -> Result<(), LinkError> {
        self.ask(instance, "a ping", within, host_frame::Body::Ping(Ping {})).await
    }

    /// Tells the guest who it is; its entropy is filled in here.
    pub async fn reborn(
        &self,
        instance: &InstanceId,
        mut reborn: Reborn,
        within: Duration,
    ) -> Result<(), LinkError> {
        reborn.entropy = entropy()?;
        self.ask(instance, "a new identity", within, host_frame::Body::Reborn(reborn)).await
    }

    /// The same for a guest that is known to understand it: said at once, with the hello if it has not greeted yet.
    pub(crate) fn reborn_early(
        &self,
        instance: &InstanceId,
        mut reborn: Reborn,
        within: Duration,
    ) -> Result<impl Future<Output = Result<(), LinkError>> + use<>, LinkError> {
        reborn.entropy = entropy()?;
        let call = self.link(instance)?.begin(host_frame::Body::Reborn(reborn))?;
        let done = tokio::time::timeout(within, call.done());
        Ok(async move { done.await.unwrap_or(Err(LinkError::Silent(within))) })
    }

    /// The same without waiting: for a guest that already knows and only slept lightly. It is told before anything
    /// that is asked from here on.
    pub fn refresh(&self, instance: &InstanceId, mut reborn: Reborn) -> Result<(), LinkError> {
        let link = self.link(instance)?;
        if link.version() == Some(1) {
            return Ok(());
        }
        reborn.entropy = entropy()?;
        let call = link.begin(host_frame::Body::Reborn(reborn))?;
        tokio::spawn(async move {
            if let Ok(Err(error)) = tokio::time::timeout(ANSWER_WITHIN, call.done()).await {
                tracing::debug!(%error, "could not refresh the identity of a resumed guest");
            }
        });
        Ok(())
    }

    /// Asks the guest to finish its work and flush. `unless_busy`: takes it back when the guest has work again.
    pub async fn prepare_sleep(
        &self,
        instance: &InstanceId,
        timeout: Duration,
        unless_busy: bool,
    ) -> Result<Drained, LinkError> {
        let timeout_seconds = u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX);
        let body = host_frame::Body::PrepareSleep(PrepareSleep { timeout_seconds });
        let link = self.link(instance)?;
        let within = timeout + DRAIN_MARGIN;
        let drained = tokio::select! {
            answer = self.ask(instance, "a drain", within, body) => answer,
            busy = self.until(&link, Instant::now() + within, GuestView::is_busy), if unless_busy => {
                if busy.is_ok() {
                    self.cancel_sleep(instance).await?;
                    return Ok(Drained::Busy);
                }
                Err(LinkError::Silent(within))
            }
        };
        match drained {
            Ok(()) => Ok(Drained::Done),
            Err(LinkError::Silent(_)) => Ok(Drained::Not(format!("it was not done within {timeout:?}"))),
            Err(LinkError::Refused { code, message }) => Ok(Drained::Not(format!("{message} ({code})"))),
            Err(error) => Err(error),
        }
    }

    pub async fn cancel_sleep(&self, instance: &InstanceId) -> Result<(), LinkError> {
        let body = host_frame::Body::CancelSleep(CancelSleep {});
        self.ask(instance, "taking back a drain", ANSWER_WITHIN, body).await
    }

    /// Waits until a guest that was drained has work again: for ever, if it gets none.
    pub(crate) async fn works_again(&self, instance: &InstanceId) {
        if let Ok(link) = self.link(instance)
            && link.follow().wait_for(GuestView::has_work).await.is_ok()
        {
            return;
        }
        std::future::pending::<()>().await;
    }

    /// Takes back, without waiting, what an earlier agent may have asked before it ended.
    pub(crate) fn take_back_sleep(&self, instance: &InstanceId) {
        let (links, instance) = (self.clone(), instance.clone());
        tokio::spawn(async move {
            // A guest that is not up, or too old to be drained, has nothing to take back.
            let _ = links.cancel_sleep(&instance).await;
        });
    }

    /// Ends the guest's work and leaves it up, so that what the work wrote can be read.
    pub async fn end_work(&self, instance: &InstanceId, grace: Duration) -> Result<(), LinkError> {
        let grace_seconds = u32::try_from(grace.as_secs()).unwrap_or(u32::MAX);
        let body = host_frame::Body::EndWork(EndWork { grace_seconds });
        self.ask_since(3, instance, "an end of work", grace + DRAIN_MARGIN, body).await
    }

    /// Has the guest start its workload again, and waits until that is ready, or has failed.
    pub async fn restart_workload(
        &self,
        instance: &InstanceId,
        grace: Duration,
        deadline: Instant,
    ) -> Result<GuestView, LinkError> {
        let link = self.link(instance)?;
        let view = self.until(&link, Instant::now() + ANSWER_WITHIN, |view| view.connected).await?;
        if !view.can_restart {
            return Err(LinkError::Lacks(FEATURE_RESTART));
        }
        let grace_seconds = u32::try_from(grace.as_secs()).unwrap_or(u32::MAX);
        let body = host_frame::Body::RestartWorkload(RestartWorkload { run: view.run, grace_seconds });
        self.ask_since(3, instance, "a restart", grace + ANSWER_WITHIN, body).await?;
        self.decided_after(instance, view.run, deadline).await
    }

    /// Has the guest check its workload like this from now on.
    pub async fn set_health(&self, instance: &InstanceId, health: SetHealth) -> Result<(), LinkError> {
        let link = self.link(instance)?;
        let view = self.until(&link, Instant::now() + ANSWER_WITHIN, |view| view.connected).await?;
        if !view.can_check_health {
            return Err(LinkError::Lacks(FEATURE_HEALTH));
        }
        self.ask_since(3, instance, "a health check", ANSWER_WITHIN, host_frame::Body::SetHealth(health))
            .await
    }

    /// Has the guest run this in place of what its image says, once its workload is started.
    pub async fn set_workload(&self, instance: &InstanceId, workload: SetWorkload) -> Result<(), LinkError> {
        let link = self.link(instance)?;
        let view = self.until(&link, Instant::now() + ANSWER_WITHIN, |view| view.connected).await?;
        if !view.can_change_workload {
            return Err(LinkError::Lacks(FEATURE_WORKLOAD));
        }
        let body = host_frame::Body::SetWorkload(workload);
        self.ask_since(3, instance, "another workload", ANSWER_WITHIN, body).await
    }

    /// Asks the guest to shut down and waits for the word that it understood, or for the end of the stream.
    pub async fn shutdown(&self, instance: &InstanceId, grace: Duration) -> Result<(), LinkError> {
        let grace_seconds = u32::try_from(grace.as_secs()).unwrap_or(u32::MAX);
        let link = self.link(instance)?;
        if link.version().is_none() {
            return Err(LinkError::Broken);
        }
        let call = link.begin(host_frame::Body::Shutdown(Shutdown { grace_seconds }))?;
        match tokio::time::timeout(SHUTDOWN_HEARD_WITHIN, call.next()).await {
            Ok(Event::Broken(error @ LinkError::Refused { .. })) => Err(error),
            // A guest that ends at once, or one of version 1, says nothing.
            Ok(_) | Err(_) => Ok(()),
        }
    }
}

fn entropy() -> Result<Vec<u8>, LinkError> {
    let mut bytes = vec![0; ENTROPY_BYTES];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| LinkError::NoEntropy(error.to_string()))?;
    Ok(bytes)
}
