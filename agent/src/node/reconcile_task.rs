//! Keeps this node in agreement with its desired state.
//!
//! One task owns the loop. It wakes on a new document, a change of trust, a trigger, the end of a step or of a VM, an image that was
//! built, a guest that has something to say, or a timer; it observes the node, asks the planner, hands the steps to the runner, then publishes [`NodeStatus`]. It never decides: every choice is
//! made in `mvm_planner::node`. A missed event costs at most one interval, for every pass looks at everything.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use mvm_host::AnyHost;
use mvm_host::network::NetworkFound;
use mvm_image::Images;
use mvm_planner::Blocked;
use mvm_proto::status::{Capability, Event, InstanceStatus, NodeStatus, WakeTiming};
use mvm_proto::text::chain;
use mvm_proto::{InstanceId, NodeId, PoolId, Problem, TenantId, Timestamp};
use mvm_vmm::{AnyDriver, Driver};
use tokio::sync::{Notify, broadcast, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::audit::{AuditLog, AuditSettings};
use crate::clock::Clock;
use crate::execute::recover::{Hands, Recovered};
use crate::execute::{Executor, Wake, Writing};
use crate::guest::GuestLinks;
use crate::instance::record::Record;
use crate::instance::records::Records;
use crate::isolation::Isolation;
use crate::node::InForce;
use crate::node::actions::{Actor, Acts};
use crate::node::assemble::{
    NodeError, NodeSettings, adopt, check_rights, open, open_images, planner_capacity,
};
use crate::node::engine::{Engine, EngineSettings, Found, event_of};
use crate::node::info::capabilities;
use crate::node::moves::Moves;
use crate::node::status::{self, Facts};
use crate::node::wake::{Shown, Waker, Wakes, show, shown};
use crate::persist::{SessionSettings, Sessions};
use crate::secrets::Secrets;

/// While steps run, the next plan is made this soon after the last: one slow step does not hold up the others' next.
const REPLAN_AFTER: Duration = Duration::from_millis(100);

/// Guests that change their minds all the time are listened to this often.
const LISTEN_AFTER: Duration = Duration::from_secs(1);

/// When to look again after the driver could not say what lives.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// From a request that changed something to the pass that looks at what became of it: whoever asked may have more to ask,
/// which comes first, and many requests are one pass.
const AFTER_REQUEST: Duration = Duration::from_millis(10);

/// How long steps under way may take when the agent ends; they are resolved at the next start otherwise.
const FINISH_WITHIN: Duration = Duration::from_secs(6);

/// A follower that is this many events behind loses the oldest ones and is told so.
const EVENTS_KEPT: usize = 1024;

/// The same for whoever counts wakes.
const WAKES_KEPT: usize = 256;

/// How many passes and plans were made, and how long the last pass took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pass {
    pub count: u64,
    /// Passes in which something had changed, so that the planner was asked.
    pub plans: u64,
    pub took: Duration,
}

/// A node that is open but not yet running: give it to [`reconcile_task`].
#[derive(Debug)]
pub struct Node<D = AnyDriver> {
    engine: Engine<D>,
    interval: Duration,
    handle: NodeHandle,
}

impl Node {
    /// Opens records and driver, adopts the VMs that live, and resolves what an earlier agent left half-done.
    pub async fn open(settings: NodeSettings) -> Result<(Node, NodeHandle), NodeError> {
        check_rights(&settings.isolation, settings.host.as_ref())?;
        let (driver, records) =
            open(&settings.data_dir, settings.host.clone(), settings.driver, &settings.vmm).await?;
        let vouched = settings.vouched.clone();
        let images =
            open_images(settings.driver, &settings.data_dir, &settings.images_dir, &settings.vmm, vouched)?;
        Self::with_images(&settings, driver, records, images).await
    }
}

impl<D: Driver> Node<D> {
    /// What its instances boot from.
    pub(crate) fn images(&self) -> Images {
        self.engine.executor.images.clone()
    }

    /// What its driver can do, as `mvm node info` shows it.
    pub(crate) fn capabilities(&self) -> Vec<Capability> {
        capabilities(&*self.engine.driver)
    }

    /// The same with a driver and records that are already open.
    pub async fn with(
        settings: &NodeSettings,
        driver: Arc<D>,
        records: Arc<Records>,
    ) -> Result<(Node<D>, NodeHandle), NodeError> {
        let images = Images::imagined_by(settings.vouched.clone());
        Self::with_images(settings, driver, records, images).await
    }

    /// The same with images that are already open too.
    pub async fn with_images(
        settings: &NodeSettings,
        driver: Arc<D>,
        records: Arc<Records>,
        images: Images,
    ) -> Result<(Node<D>, NodeHandle), NodeError> {
        let recovered = adopt(&*driver, &records, Hands::On, settings.clock.now()).await;
        Ok(Self::build(settings, driver, records, images, recovered))
    }

    fn build(
        settings: &NodeSettings,
        driver: Arc<D>,
        records: Arc<Records>,
        images: Images,
        recovered: Recovered,
    ) -> (Node<D>, NodeHandle) {
        let clock = settings.clock.clone();
        let capacity = planner_capacity(&settings.capacity);
        let events = broadcast::Sender::new(EVENTS_KEPT);
        let wakes = broadcast::Sender::new(WAKES_KEPT);
        let host = settings.host.clone().unwrap_or_else(|| AnyHost::local(&settings.data_dir));
        let links = GuestLinks::new(Arc::clone(&driver), clock.clone());
        let isolation = Arc::new(Isolation::new(host, settings.driver, settings.isolation.clone()));
        let sessions = SessionSettings {
            node: settings.node_id.clone(),
            sessions_dir: settings.sessions_dir.clone(),
            secrets_dir: settings.secrets_dir.clone(),
            limits: settings.session_limits,
        };
        let sessions = Arc::new(Sessions::new(sessions, links.clone(), clock.clone(), events.clone()));
        let audit = AuditLog::open(&settings.data_dir, AuditSettings::default(), clock.clone());
        let executor = Arc::new(Executor {
            driver,
            records: Arc::clone(&records),
            clock: clock.clone(),
            links: links.clone(),
            images,
            isolation: Arc::clone(&isolation),
            background: Arc::new(tokio::sync::Semaphore::new(1)),
            sessions: Arc::clone(&sessions),
            boot_deadline: settings.boot_deadline,
            events: events.clone(),
            wakes: wakes.clone(),
            audit: audit.clone(),
            secrets: Arc::new(Secrets::new(&settings.secrets_dir)),
            writing: Writing::default(),
        });
        let pressed = watch::Sender::new(false);
        let engine = Engine::new(
            Arc::clone(&executor),
            EngineSettings {
                capacity,
                slots: settings.parallel_steps,
                sweep_after: settings.sweep_after,
                interval: settings.interval,
                recovered,
                pressed: pressed.subscribe(),
            },
        );
        let in_force = Shown::default();
        let blocked = watch::Sender::default();
        let waker = Waker {
            executor,
            records: Arc::clone(&records),
            capacity,
            gate: Arc::clone(&engine.gate),
            in_force: Arc::clone(&in_force),
            blocked: blocked.subscribe(),
            under_way: Arc::default(),
        };
        let actor = Actor {
            waker: waker.clone(),
            driver: Arc::clone(&engine.driver),
            clock: clock.clone(),
            node_id: settings.node_id.clone(),
        };
        let status = NodeStatus { node_id: settings.node_id.to_string(), ..NodeStatus::default() };
        let shared = Shared {
            node_id: settings.node_id.clone(),
            status: watch::Sender::new(status),
            events,
            wakes,
            passes: watch::Sender::new(Pass::default()),
            trigger: Notify::new(),
            records,
            in_force,
            capacity,
            blocked,
            waker: Box::new(waker),
            mover: Box::new(actor.clone()),
            actor: Box::new(actor),
            guests: links,
            network: engine.network_check.found.subscribe(),
            pressed,
            isolation,
            sessions,
            audit,
            clock,
        };
        let handle = NodeHandle { shared: Arc::new(shared) };
        (Node { engine, interval: settings.interval, handle: handle.clone() }, handle)
    }
}

/// What the rest of the agent sees of the node. Cheap to clone.
#[derive(Clone)]
pub struct NodeHandle {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) node_id: NodeId,
    status: watch::Sender<NodeStatus>,
    events: broadcast::Sender<Event>,
    wakes: broadcast::Sender<Wake>,
    passes: watch::Sender<Pass>,
    trigger: Notify,
    pub(crate) records: Arc<Records>,
    pub(crate) in_force: Shown,
    pub(crate) capacity: mvm_planner::Capacity,
    /// What the last pass found that can't be started now.
    pub(crate) blocked: watch::Sender<Vec<Blocked>>,
    waker: Box<dyn Wakes>,
    pub(crate) actor: Box<dyn Acts>,
    pub(crate) mover: Box<dyn Moves>,
    pub(crate) guests: GuestLinks,
    network: watch::Receiver<NetworkFound>,
    /// Whether memory is short on this machine.
    pub(crate) pressed: watch::Sender<bool>,
    pub(crate) isolation: Arc<Isolation>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) audit: AuditLog,
    pub(crate) clock: Clock,
}

impl Shared {
    /// How an instance is, with what is known of its session.
    pub(crate) fn status_of(&self, record: &Record) -> InstanceStatus {
        let mut status = record.status();
        self.sessions.show(record, &mut status);
        status
    }
}

impl std::fmt::Debug for NodeHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeHandle").field("node_id", &self.shared.node_id).finish_non_exhaustive()
    }
}

impl NodeHandle {
    #[must_use]
    pub fn status(&self) -> watch::Receiver<NodeStatus> {
        self.shared.status.subscribe()
    }

    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.shared.events.subscribe()
    }

    /// Every wake that ended well, whoever asked for it.
    #[must_use]
    pub fn wakes(&self) -> broadcast::Receiver<Wake> {
        self.shared.wakes.subscribe()
    }

    /// What the last look at the tenants' networks found.
    #[must_use]
    pub fn network(&self) -> watch::Receiver<NetworkFound> {
        self.shared.network.clone()
    }

    #[must_use]
    pub fn passes(&self) -> watch::Receiver<Pass> {
        self.shared.passes.subscribe()
    }

    /// Says something to everyone who follows this node's events.
    pub fn publish(&self, kind: &str, subject: &str, message: &str) {
        let at = self.shared.clock.now().to_string();
        let (kind, subject, message) = (kind.to_owned(), subject.to_owned(), message.to_owned());
        // No receiver is no error.
        let _ = self.shared.events.send(Event { at, kind, subject, message });
    }

    /// All instances, or one tenant's.
    #[must_use]
    pub fn instances(&self, tenant: Option<&TenantId>) -> Vec<InstanceStatus> {
        let mut found = Vec::new();
        self.shared.records.for_each(|record, _| {
            if tenant.is_none_or(|tenant| record.tenant == *tenant) {
                found.push(self.shared.status_of(record));
            }
        });
        found
    }

    /// Tenants with instances here or named by the document in force.
    #[must_use]
    pub fn tenants(&self) -> Vec<TenantId> {
        let mut tenants: BTreeSet<TenantId> = self.shared.records.tenants();
        if let Some(in_force) = shown(&self.shared.in_force) {
            tenants.extend(in_force.desired.tenants.iter().map(|tenant| tenant.tenant_id.clone()));
        }
        tenants.into_iter().collect()
    }

    /// Brings a sleeping or warm instance to running for a request; one that runs is left as it is. Says where the time
    /// went.
    pub async fn wake(
        &self,
        tenant: &TenantId,
        pool: &PoolId,
        instance: &InstanceId,
    ) -> Result<WakeTiming, Problem> {
        let woken = self.shared.waker.wake(tenant.clone(), pool.clone(), instance.clone()).await;
        if !woken.as_ref().is_ok_and(|timing| timing.joined) {
            if woken.is_ok() {
                self.publish("InstanceWoken", &format!("{tenant}/{pool}/{instance}"), "woken on demand");
            }
            self.trigger_after(instance.clone());
        }
        woken
    }

    /// Asks for a pass once what is being done to this instance is over: whoever asked may have been answered before.
    pub(crate) fn trigger_after(&self, instance: InstanceId) {
        let handle = self.clone();
        tokio::spawn(async move {
            handle.shared.records.wait_released(&instance).await;
            handle.trigger();
        });
    }

    /// Asks for a pass now.
    pub fn trigger(&self) {
        self.shared.trigger.notify_one();
    }
}

/// Runs until `shutdown`. Steps that are under way are finished; instances are left as they are.
pub async fn reconcile_task<D: Driver>(
    mut node: Node<D>,
    mut desired: watch::Receiver<Option<Arc<InForce>>>,
    shutdown: CancellationToken,
) {
    let handle = node.handle.clone();
    let shared = &handle.shared;
    let mut exits = node.engine.driver.exits();
    let mut images = node.engine.executor.images.changed();
    let mut vouched = node.engine.executor.images.vouched();
    let mut guests = shared.guests.changed();
    loop {
        let in_force = desired.borrow_and_update().clone();
        show(&shared.in_force, in_force.clone());
        let begun = Instant::now();
        let found = node.engine.pass(in_force.as_ref()).await;
        let next = match &found {
            Ok(_) => next_pass(&node, in_force.as_deref()),
            Err(_) => shared.clock.now() + LOOK_AGAIN.min(node.interval),
        };
        tell(&node, in_force.as_deref(), found, next);
        let (plans, took) = (node.engine.plans, begun.elapsed());
        shared.passes.send_modify(|pass| *pass = Pass { count: pass.count + 1, plans, took });

        let timer = tokio::time::sleep_until(begun + next.since(shared.clock.now()).min(node.interval));
        tokio::pin!(timer);
        let wait = async {
            let mut source_gone = false;
            let mut builds = true;
            let mut vouches = true;
            loop {
                tokio::select! {
                    biased;
                    () = shutdown.cancelled() => return false,
                    changed = desired.changed(), if !source_gone => match changed {
                        Ok(()) => return true,
                        // Whoever gave documents is gone; the last one stays in force.
                        Err(_) => source_gone = true,
                    },
                    () = shared.trigger.notified() => {
                        tokio::time::sleep(AFTER_REQUEST).await;
                        return true;
                    }
                    exit = exits.recv() => match exit {
                        // Whoever acts on it ended it, or sees that it ended.
                        Ok(exit) if shared.records.is_leased(&exit.instance) => {}
                        // How it ended the pass hears itself, whatever it was woken by.
                        Ok(_) => return true,
                        Err(broadcast::error::RecvError::Lagged(_)) => return true,
                        // The driver never goes before this task.
                        Err(broadcast::error::RecvError::Closed) => return true,
                    },
                    changed = images.changed(), if builds => match changed {
                        Ok(()) => return true,
                        Err(_) => builds = false,
                    },
                    changed = vouched.changed(), if vouches => match changed {
                        Ok(()) => return true,
                        // Whoever follows the cluster's trust is gone; what was vouched for last holds.
                        Err(_) => vouches = false,
                    },
                    Ok(()) = guests.changed() => {
                        let soon = begun + LISTEN_AFTER;
                        if timer.deadline() > soon {
                            timer.as_mut().reset(soon);
                        }
                    }
                    Some(done) = node.engine.next_done() => {
                        let _ = shared.events.send(event_of(&done, shared.clock.now()));
                        if node.engine.runner.is_idle() || begun.elapsed() >= REPLAN_AFTER {
                            return true;
                        }
                        // The others may take long; what this one made possible does not wait for them.
                        let soon = begun + REPLAN_AFTER;
                        if timer.deadline() > soon {
                            timer.as_mut().reset(soon);
                        }
                    }
                    () = &mut timer => return true,
                }
            }
        };
        if !wait.await {
            break;
        }
    }
    node.engine.runner.drop_waiting();
    node.engine.let_go();
    let finish = async {
        while let Some(done) = node.engine.next_done().await {
            let _ = shared.events.send(event_of(&done, shared.clock.now()));
        }
        // Wakes and actions by hand are not the runner's, and are finished all the same.
        shared.records.wait_idle().await;
    };
    if tokio::time::timeout(FINISH_WITHIN, finish).await.is_err() {
        tracing::warn!("steps were still running; the next start recovers them");
    }
    if let Err(error) = node.engine.executor.audit.flush().await {
        tracing::warn!(error = %chain(&error), "some actions are missing from the audit log");
    }
    shared.records.close().await;
}

/// When the next pass is due if nothing happens before.
fn next_pass<D: Driver>(node: &Node<D>, in_force: Option<&InForce>) -> Timestamp {
    let now = node.engine.clock.now();
    let expiry = in_force.and_then(|in_force| in_force.expires_at).filter(|at| *at > now);
    [node.engine.next_deadline(), expiry, Some(now + node.interval)]
        .into_iter()
        .flatten()
        .min()
        .unwrap_or(now)
}

/// Publishes what a pass found.
fn tell<D: Driver>(
    node: &Node<D>,
    in_force: Option<&InForce>,
    found: Result<Found, mvm_vmm::DriverError>,
    next_reconcile_at: Timestamp,
) {
    let engine = &node.engine;
    let (found, driver_error) = match found {
        Ok(found) => (found, None),
        Err(error) => {
            tracing::error!(error = %chain(&error), "could not observe the node");
            (Found::default(), Some(chain(&error)))
        }
    };
    node.handle.shared.blocked.send_replace(engine.blocked().to_vec());
    let records = engine.records.all();
    let died = found.died.iter().map(|(id, reason)| (id, "InstanceFailed", reason));
    let workloads = found.workloads.iter().map(|(id, kind, message)| (id, *kind, message));
    for (id, kind, message) in died.chain(workloads) {
        let record = records.iter().find(|record| record.id == *id);
        let subject = record.map_or_else(|| id.to_string(), |r| format!("{}/{}/{id}", r.tenant, r.pool));
        node.handle.publish(kind, &subject, message);
    }
    let facts = Facts {
        now: engine.clock.now(),
        in_force,
        records: &records,
        plan: engine.plan(),
        converged: engine.is_converged() && driver_error.is_none(),
        write_error: engine.records.write_error(),
        driver_error,
        strangers: &found.strangers,
        needs: engine.needs.conditions(engine.clock.now()),
        images: engine.revoked.condition(engine.clock.now()),
        sessions: engine.executor.sessions.condition(),
        bounds: [
            engine.network_check.condition(engine.clock.now()),
            engine.groups.condition(engine.clock.now()),
        ],
        next_reconcile_at,
    };
    node.handle.shared.status.send_modify(|status| status::update(status, &facts));
}
