//! One pass: observe, plan, hand the steps to the runner. And what comes of the steps: events, and pools that wait.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use mvm_planner::{Action, Blocked, Capacity, NodePlan, Observation, Step, plan_expired, plan_node};
use mvm_proto::document::Health;
use mvm_proto::status::Mark;
use mvm_proto::text::chain;
use mvm_proto::{DesiredState, InstanceId, Phase, PoolId, TenantId, Timestamp, TraceContext};
use mvm_transport::RateLimit;
use mvm_vmm::{AnyDriver, Driver, DriverError};
use tokio::sync::watch;

use super::needs::Needs;
use super::resolvers::Resolvers;
use super::revoked::Revoked;
use super::work::WorkWatch;
use crate::clock::Clock;
use crate::events::Events;
use crate::execute::gate::Gate;
use crate::execute::recover::{Recovered, Recovery, Resolved, recover_one};
use crate::execute::runner::{Done, Runner};
use crate::execute::{Executor, StepError, was_cancelled};
use crate::instance::record::Record;
use crate::instance::records::{Lease, Records};
use crate::instance::template::Template;
use crate::isolation::{CgroupCheck, NetworkCheck};
use crate::node::CurrentDocument;
use crate::node::observe::{Ends, observe};
use crate::node::sweep::Sweeper;
use crate::secrets::BundleSet;

/// How long a pool waits that could not even be given an id and an address.
const POOL_RETRY: Duration = Duration::from_secs(30);

/// A guest that did not take its health check is told again after this.
const HEALTH_TOLD_EVERY: Duration = Duration::from_secs(60);

/// How often one instance's program makes an event, and how many at once: no guest drives the events of others out.
const WORKLOAD_EVENTS_PER_SECOND: f64 = 1.0 / 60.0;
const WORKLOAD_EVENTS_BURST: f64 = 20.0;

/// How often what running instances have on disk is measured.
const MEASURE_EVERY: Duration = Duration::from_secs(60);

/// How often what running instances cost in memory is measured, besides after each step. A hundred that use all of
/// their 128 MiB take the kernel 0.3 s.
const MEASURE_MEMORY_EVERY: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) driver: Arc<AnyDriver>,
    pub(crate) records: Arc<Records>,
    pub(crate) executor: Arc<Executor>,
    pub(crate) runner: Runner,
    pub(crate) clock: Clock,
    pub(crate) capacity: Capacity,
    pub(crate) gate: Arc<Gate>,
    ends: Ends,
    pub(crate) needs: Needs,
    pub(crate) revoked: Revoked,
    pub(crate) resolvers: Resolvers,
    pub(crate) network_check: NetworkCheck,
    pub(crate) groups: CgroupCheck,
    work: WorkWatch,
    /// The bundles of secrets that the document in force names and that are not here.
    pub(crate) lacking_secrets: watch::Sender<BundleSet>,
    /// Those that are kept: of the document, and of what was started with others.
    kept_secrets: Option<BundleSet>,
    /// Whether memory is short on this machine.
    pub(crate) pressed: watch::Receiver<bool>,
    sweeper: Sweeper,
    /// What an earlier agent began; handed to the runner at the first pass.
    unfinished: Vec<InstanceId>,
    /// What an earlier agent left and could not be inspected yet. No other task acts on it meanwhile.
    unresolved: Vec<Lease>,
    waiting_pools: BTreeMap<(TenantId, PoolId), (Timestamp, String)>,
    /// When guests were last told how to check their program.
    health_told_at: BTreeMap<InstanceId, Timestamp>,
    workload_events: RateLimit<InstanceId>,
    measured_at: Option<Timestamp>,
    memory_measured_at: Option<Timestamp>,
    last: Option<Last>,
    /// The document that was made true.
    traced_until: Option<Mark>,
    pub(crate) plans: u64,
}

/// What an engine is told besides what it works with.
#[derive(Debug)]
pub(crate) struct EngineSettings {
    pub(crate) capacity: Capacity,
    pub(crate) slots: usize,
    pub(crate) sweep_after: Duration,
    /// How often what instances share is looked at.
    pub(crate) interval: Duration,
    pub(crate) recovered: Recovered,
    pub(crate) pressed: watch::Receiver<bool>,
}

#[derive(Debug)]
struct Last {
    current_document: Arc<CurrentDocument>,
    /// Whether that had expired.
    expired: bool,
    observation: Observation,
    plan: NodePlan,
}

/// What a pass found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) died: Vec<(InstanceId, String)>,
    pub(crate) workloads: Vec<(InstanceId, &'static str, String)>,
    pub(crate) orphans: Vec<InstanceId>,
}

impl Engine {
    pub(crate) fn new(executor: Arc<Executor>, settings: EngineSettings) -> Self {
        let records = Arc::clone(&executor.records);
        let clock = executor.clock.clone();
        let gate = Arc::new(Gate::default());
        let runner =
            Runner::new(Arc::clone(&executor), Arc::clone(&records), Arc::clone(&gate), settings.slots);
        let unresolved = settings.recovered.unresolved.iter().filter_map(|id| {
            let phase = records.get(id)?.phase;
            records.lease(id, phase)
        });
        let unresolved = unresolved.collect();
        // What an earlier agent had no time for.
        records.for_each(|record, _| {
            if record.snapshot.is_some() {
                executor.compress_later(record);
            }
        });
        let (isolation, events) = (&executor.isolation, &executor.events);
        let (interval, grace) = (settings.interval, settings.sweep_after);
        let network_check = NetworkCheck::new(Arc::clone(isolation), interval, grace, events.clone());
        let groups = CgroupCheck::new(Arc::clone(isolation), interval, grace, events.clone());
        let sweeper = Sweeper::new(grace, events.clone());
        Self {
            driver: Arc::clone(&executor.driver),
            records,
            runner,
            capacity: settings.capacity,
            gate,
            ends: Ends::of(&executor.driver),
            needs: Needs::new(executor.images.clone(), Arc::clone(&executor.secrets)),
            revoked: Revoked::default(),
            resolvers: Resolvers::default(),
            work: WorkWatch::new(network_check.found.subscribe()),
            lacking_secrets: watch::Sender::default(),
            kept_secrets: None,
            network_check,
            groups,
            sweeper,
            pressed: settings.pressed,
            unfinished: settings.recovered.unfinished,
            unresolved,
            waiting_pools: BTreeMap::new(),
            health_told_at: BTreeMap::new(),
            workload_events: RateLimit::new(WORKLOAD_EVENTS_PER_SECOND, WORKLOAD_EVENTS_BURST),
            measured_at: None,
            memory_measured_at: None,
            last: None,
            traced_until: None,
            plans: 0,
            clock,
            executor,
        }
    }

    /// Looks, and plans if document, observation or time changed anything. Steps begin at once.
    pub(crate) async fn pass(
        &mut self,
        current_document: Option<&Arc<CurrentDocument>>,
    ) -> Result<Found, DriverError> {
        let now = self.clock.now();
        if let Some(current_document) = current_document {
            self.executor.sessions.follow(&current_document.desired);
        }
        self.resolve_again(now).await;
        self.runner.finish(std::mem::take(&mut self.unfinished));
        let links = &self.executor.links;
        self.work.look_at_processors(&self.driver, &self.records, links);
        let (driver, records) = (&*self.driver, &self.records);
        let seen =
            observe(driver, records, Some(links), self.capacity, &mut self.ends, || self.clock.now()).await?;
        let now = self.clock.now();
        self.end_leftovers(&seen.beside_snapshot);
        self.give_secrets_back();
        let orphans = self.orphans(seen.orphans).await?;
        self.sweeper.sweep(&self.driver, &self.records, &orphans);
        let mut observation = seen.observation;
        observation.memory_pressure = *self.pressed.borrow();
        self.waiting_pools.retain(|_, (until, _)| *until > now);
        let waiting = self.waiting_pools.iter().map(|((tenant, pool), (_, reason))| Blocked {
            tenant: tenant.clone(),
            pool: Some(pool.clone()),
            reason: reason.clone(),
        });
        observation.blocked = waiting.collect();
        let desired = current_document.map(|current_document| &current_document.desired);
        observation.blocked.extend(self.network_check.reconcile(desired, &self.records).await);
        self.work.look_at_ports(&self.executor.links);
        self.groups.reconcile(desired, &self.records).await;
        self.measure_disks(now);
        self.measure_memory(now);
        if let Some(current_document) = current_document {
            let health = self.follow_pools(current_document, now);
            observation.blocked.extend(self.needs.look(&current_document.desired));
            self.look_at_secrets(&current_document.desired);
            self.records.set_images(self.needs.folder_images());
            let given = self.executor.isolation.gives_resolvers();
            let resolvers = self.resolvers.look(&current_document.desired, given, now);
            for event in self.needs.events(now).into_iter().chain(resolvers) {
                self.executor.events.warn(&event.kind, &event.subject, event.message);
            }
            if self.decide(current_document, observation) && !current_document.is_expired(now) {
                self.drop_templates(current_document).await;
            }
            // After the plan: its steps come first.
            self.tell_health(health, now);
        }
        self.revoked.look(&self.records, &self.executor.images, &self.executor.events);
        if let Err(error) = self.executor.images.set_in_use(&self.records.images()) {
            tracing::warn!(error = %chain(&error), "could not record which images are in use");
        }
        let (events, told_at) = (&self.workload_events, std::time::Instant::now());
        let mut workloads = seen.workloads;
        workloads.retain(|(id, ..)| events.take(id.clone(), told_at).is_ok());
        Ok(Found { died: seen.died, workloads, orphans })
    }

    /// Plans, if there is anything to plan for, and begins with it. The records are read here: requests may have been let
    /// in while everything else was looked at.
    fn decide(&mut self, current_document: &Arc<CurrentDocument>, mut observation: Observation) -> bool {
        let gate = Arc::clone(&self.gate);
        let gate = gate.close();
        let now = self.clock.now();
        observation.instances = self.records.observed();
        let expired = current_document.is_expired(now);
        if self.is_planned(current_document, expired, &observation, now) {
            return false;
        }
        let plans = if expired { plan_expired } else { plan_node };
        let plan = plans(&current_document.desired, &observation, now);
        self.plans += 1;
        let trace = self.trace_of(current_document);
        self.runner.submit(&gate, &current_document.desired, (&plan.steps, trace), now);
        self.last = Some(Last { current_document: Arc::clone(current_document), expired, observation, plan });
        true
    }

    /// Steps belong to the document's trace until it was made true for the first time. What is done later has other reasons.
    fn trace_of(&mut self, current_document: &Arc<CurrentDocument>) -> Option<TraceContext> {
        let last = self.last.as_ref().map(|last| &last.current_document);
        if self.is_converged() && last.is_some_and(|last| Arc::ptr_eq(last, current_document)) {
            self.traced_until = current_document.mark.clone();
        }
        current_document.trace.filter(|_| self.traced_until != current_document.mark)
    }

    /// Templates of pools that are neither wanted nor there go. One that can't goes at the next change.
    async fn drop_templates(&self, current_document: &CurrentDocument) {
        for Template { tenant, pool, .. } in self.records.templates() {
            let named =
                current_document.desired.pools().any(|(t, p)| (&t.tenant_id, &p.pool_id) == (&tenant, &pool));
            if named || self.records.count(&tenant, &pool) > 0 {
                continue;
            }
            if let Err(error) = self.executor.drop_template(&tenant, &pool).await {
                tracing::warn!(%tenant, %pool, error = %chain(&error), "could not remove a template");
            }
        }
    }

    /// Looks again at what could not be looked at when this agent started.
    async fn resolve_again(&mut self, now: Timestamp) {
        for lease in std::mem::take(&mut self.unresolved) {
            let Some(record) = self.records.get(lease.id()) else { continue };
            match recover_one(&self.driver, &self.records, Recovery::Act, now, record).await {
                Ok(Resolved::Unfinished) => self.unfinished.push(lease.id().clone()),
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(id = %lease.id(), error = %chain(&error), "could not inspect an instance");
                    self.unresolved.push(lease);
                }
            }
        }
    }

    /// For shutting down: the next agent looks at it.
    pub(crate) fn let_go(&mut self) {
        self.unresolved.clear();
    }

    /// Ends VMs beside a snapshot that holds all of their memory: their end was asked for and did not come.
    fn end_leftovers(&self, leftovers: &[InstanceId]) {
        for id in leftovers {
            let Some(lease) = self.records.lease(id, Phase::Sleeping) else { continue };
            // A request may have woken it since.
            if !self.records.get(id).is_some_and(|record| record.is_asleep() && record.intent.is_none()) {
                continue;
            }
            let driver = Arc::clone(&self.driver);
            tokio::spawn(async move {
                if let Err(error) = driver.kill(lease.id()).await {
                    let id = lease.id();
                    tracing::warn!(%id, error = %chain(&error), "could not end the VM of a sleeping instance");
                }
            });
        }
    }

    /// To instances that were about to sleep, and run again instead.
    fn give_secrets_back(&self) {
        let mut without = Vec::new();
        self.records.for_each(|record, _| {
            if record.phase == Phase::Running && record.secrets_wiped {
                without.push(record.id.clone());
            }
        });
        for id in without {
            let Some(lease) = self.records.lease(&id, Phase::Running) else { continue };
            let executor = Arc::clone(&self.executor);
            tokio::spawn(async move { executor.give_secrets_back(&lease).await });
        }
    }

    /// Tells which bundles are lacking, and removes those that nothing is given any more.
    fn look_at_secrets(&mut self, desired: &DesiredState) {
        self.lacking_secrets.send_if_modified(|known| {
            let changed = known != self.needs.lacking();
            if changed {
                known.clone_from(self.needs.lacking());
            }
            changed
        });
        let named =
            desired.pools().filter_map(|(tenant, pool)| Some((&tenant.tenant_id, pool.secrets_hash?)));
        let mut kept: BundleSet = named.map(|(tenant, digest)| (tenant.clone(), digest)).collect();
        self.records.for_each(|record, _| {
            kept.extend(record.secrets.map(|digest| (record.tenant.clone(), digest)));
        });
        if self.kept_secrets.as_ref() == Some(&kept) {
            return;
        }
        match self.executor.secrets.retain(&kept) {
            Ok(()) => self.kept_secrets = Some(kept),
            Err(error) => {
                tracing::warn!(error = %chain(&error), "could not remove secrets that are not needed");
            }
        }
    }

    /// Beside the pass: it walks directories.
    fn measure_disks(&mut self, now: Timestamp) {
        if self.measured_at.is_some_and(|at| now.since(at) < MEASURE_EVERY) {
            return;
        }
        self.measured_at = Some(now);
        let executor = Arc::clone(&self.executor);
        tokio::spawn(async move { executor.measure_running().await });
    }

    fn measure_memory(&mut self, now: Timestamp) {
        if self.memory_measured_at.is_some_and(|at| now.since(at) < MEASURE_MEMORY_EVERY) {
            return;
        }
        self.memory_measured_at = Some(now);
        let executor = Arc::clone(&self.executor);
        tokio::spawn(async move { executor.measure_memory().await });
    }

    /// VMs and leftovers that no record owns.
    async fn orphans(&self, vms: Vec<InstanceId>) -> Result<Vec<InstanceId>, DriverError> {
        let mut found: BTreeSet<InstanceId> = vms.into_iter().collect();
        found.extend(self.driver.instances().await?);
        // Looked up now, not when the VMs were listed: a step may have begun with one since.
        found.retain(|id| self.records.get(id).is_none() && !self.records.is_template(id));
        Ok(found.into_iter().collect())
    }

    /// Holds running instances to what their pools say by now. Which guests are to be told of another health check is
    /// returned; not again soon one that did not answer.
    fn follow_pools(
        &self,
        current_document: &CurrentDocument,
        now: Timestamp,
    ) -> Vec<(InstanceId, Option<Box<Health>>)> {
        let pools = current_document.desired.pools();
        let pools: BTreeMap<_, _> =
            pools.map(|(tenant, pool)| ((&tenant.tenant_id, &pool.pool_id), pool)).collect();
        let (links, told_at) = (&self.executor.links, &self.health_told_at);
        let (mut restart, mut health) = (Vec::new(), Vec::new());
        self.records.for_each(|record, _| {
            let Some(pool) = pools.get(&(&record.tenant, &record.pool)) else { return };
            if record.phase != Phase::Running {
                return;
            }
            links.set_cpu_idle_percent(&record.id, pool.sleep_policy.cpu_idle_percent);
            if record.restart != pool.restart {
                restart.push((record.id.clone(), pool.restart));
            }
            let is_due = || told_at.get(&record.id).is_none_or(|at| now.since(*at) >= HEALTH_TOLD_EVERY);
            let answers = || links.view(&record.id).is_some_and(|view| view.connected);
            if record.health != pool.health && is_due() && answers() {
                health.push((record.id.clone(), pool.health.clone()));
            }
        });
        for (id, restart) in restart {
            self.records.set_restart(&id, restart);
        }
        health
    }

    /// Tells guests how to check their program, where no step acts on them.
    fn tell_health(&mut self, health: Vec<(InstanceId, Option<Box<Health>>)>, now: Timestamp) {
        self.health_told_at.retain(|_, at| now.since(*at) < HEALTH_TOLD_EVERY);
        for (id, health) in health {
            let Some(lease) = self.records.lease(&id, Phase::Running) else { continue };
            let Some(record) = self.records.get(&id) else { continue };
            self.health_told_at.insert(id, now);
            let executor = Arc::clone(&self.executor);
            tokio::spawn(async move { executor.follow_health(&lease, Record { health, ..record }).await });
        }
    }

    /// Whether the last plan still says everything.
    fn is_planned(
        &self,
        current_document: &Arc<CurrentDocument>,
        expired: bool,
        observation: &Observation,
        now: Timestamp,
    ) -> bool {
        self.last.as_ref().is_some_and(|last| {
            Arc::ptr_eq(&last.current_document, current_document)
                && last.expired == expired
                && last.plan.next_deadline.is_none_or(|at| now < at)
                && last.observation == *observation
                // A step that was planned and neither runs nor ran would never be planned again.
                && (last.plan.steps.is_empty() || !self.runner.is_idle())
        })
    }

    pub(crate) fn plan(&self) -> Option<&NodePlan> {
        self.last.as_ref().map(|last| &last.plan)
    }

    /// What could not be started when the last plan was made.
    pub(crate) fn blocked(&self) -> &[Blocked] {
        self.last.as_ref().map_or(&[], |last| &last.observation.blocked)
    }

    /// The node is what the document says, and nothing is under way.
    pub(crate) fn is_converged(&self) -> bool {
        let done = |plan: &NodePlan| plan.steps.is_empty() && plan.deferred.is_empty();
        self.plan().is_some_and(done) && self.runner.is_idle()
    }

    /// When time alone asks for another pass.
    pub(crate) fn next_deadline(&self) -> Option<Timestamp> {
        let pools = self.waiting_pools.values().map(|(until, _)| *until);
        let sweep = self.sweeper.next_due().map(|left| self.clock.now() + left);
        pools.chain(self.plan().and_then(|plan| plan.next_deadline)).chain(sweep).min()
    }

    /// The next step that ends, as an event. Absent: nothing runs.
    pub(crate) async fn next_done(&mut self) -> Option<Done> {
        let clock = self.clock.clone();
        let done = self.runner.next(|| clock.now()).await?;
        if let (None, Err(error)) = (&done.instance, &done.result) {
            let key = (done.step.tenant.clone(), done.step.pool.clone());
            self.waiting_pools.insert(key, (self.clock.now() + POOL_RETRY, chain(error)));
        }
        Some(done)
    }
}

/// Tells those who follow this node of a step that ended.
pub(crate) fn tell_done(events: &Events, done: &Done) {
    let step = &done.step;
    let (kind, message) = match &done.result {
        Ok(phase) if was_cancelled(step.action, *phase) => {
            ("RestCalledOff", format!("keeps running instead of {}: {}", step.action, step.reason))
        }
        Ok(_) => (kind_of(step.action), step.reason.clone()),
        Err(error) => ("InstanceFailed", failure(step, error)),
    };
    events.publish(kind, subject_of(done), message);
}

pub(crate) fn failure(step: &Step, error: &StepError) -> String {
    format!("could not {}: {}", step.action, chain(error))
}

pub(crate) fn subject_of(done: &Done) -> String {
    let Step { tenant, pool, .. } = &done.step;
    done.instance.as_ref().map_or_else(|| format!("{tenant}/{pool}"), |id| format!("{tenant}/{pool}/{id}"))
}

fn kind_of(action: Action) -> &'static str {
    match action {
        Action::Create => "InstanceCreated",
        Action::Start => "InstanceStarted",
        Action::Wake => "InstanceWoken",
        Action::Resume => "InstanceResumed",
        Action::Warm => "InstanceWarmed",
        Action::Sleep => "InstanceSlept",
        Action::Stop => "InstanceStopped",
        Action::Destroy => "InstanceDestroyed",
        Action::Replace => "InstanceReplaced",
        Action::Restart => "WorkloadRestarted",
    }
}
