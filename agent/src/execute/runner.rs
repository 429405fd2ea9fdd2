//! Runs steps side by side: so many at once, one per instance, and never all of them for one pool.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use mvm_planner::{Action, Step};
use mvm_proto::{DesiredState, InstanceId, Phase, PoolId, TenantId, Timestamp, TraceContext};
use mvm_telemetry::{Attribute, Kind, Span, Tracer};
use tokio::task::JoinSet;

use super::{Executor, Order, StepError};
use crate::execute::gate::{Closed, Gate};
use crate::instance::PoolSpec;
use crate::instance::records::{Lease, Records, StateError};

type PoolKey = (TenantId, PoolId);

/// A step that ended, one way or the other.
#[derive(Debug)]
pub struct Done {
    pub step: Step,
    /// Absent: no instance could be made.
    pub instance: Option<InstanceId>,
    pub result: Result<Phase, StepError>,
}

#[derive(Debug)]
pub struct Runner {
    executor: Arc<Executor>,
    records: Arc<Records>,
    gate: Arc<Gate>,
    /// The requests that the plan of what waits knew of.
    admitted: u64,
    /// When that plan was made; absent: there was none.
    planned_at: Option<Timestamp>,
    slots: usize,
    running: JoinSet<Done>,
    per_pool: BTreeMap<PoolKey, usize>,
    /// Absent spec: the document does not name the step's pool.
    waiting: VecDeque<(Step, Option<PoolSpec>)>,
    /// Of what waits: where it belongs.
    trace: Option<TraceContext>,
    /// Steps that ended without having run.
    refused: VecDeque<Done>,
}

impl Runner {
    pub(crate) fn new(executor: Arc<Executor>, records: Arc<Records>, gate: Arc<Gate>, slots: usize) -> Self {
        let admitted = gate.close().admitted();
        Self {
            executor,
            records,
            admitted,
            planned_at: None,
            gate,
            slots: slots.max(1),
            running: JoinSet::new(),
            per_pool: BTreeMap::new(),
            waiting: VecDeque::new(),
            trace: None,
            refused: VecDeque::new(),
        }
    }

    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.refused.is_empty()
    }

    /// Replaces what waits by a newer plan's steps, which belong to `trace`; what runs goes on. For a pass that closed the gate
    /// before it read the records that the plan is of.
    pub(crate) fn submit(
        &mut self,
        gate: &Closed<'_>,
        desired: &DesiredState,
        (steps, trace): (&[Step], Option<TraceContext>),
        now: Timestamp,
    ) {
        self.trace = trace;
        let pools: BTreeMap<_, _> = desired
            .pools()
            .map(|(tenant, pool)| ((&tenant.tenant_id, &pool.pool_id), (tenant, pool)))
            .collect();
        self.admitted = gate.admitted();
        self.planned_at = Some(now);
        self.waiting = take_turns(steps)
            .map(|step| {
                let named = pools.get(&(&step.tenant, &step.pool));
                (step.clone(), named.map(|(tenant, pool)| PoolSpec::of(tenant, pool)))
            })
            .collect();
        self.fill(gate, now);
    }

    /// Finishes what an earlier agent began, beside whatever the slots hold: these VMs already run.
    pub fn finish(&mut self, ids: Vec<InstanceId>) {
        for id in ids {
            let Some(record) = self.records.get(&id) else { continue };
            let Some(intent) = record.intent else { continue };
            let to = intent.action.leads_to(Some(record.phase));
            let Some(lease) = self.records.lease(&id, to) else { continue };
            let reason = format!("finished after the agent ended during {}", intent.action);
            let step = Step {
                tenant: record.tenant,
                pool: record.pool,
                instance: Some(id),
                action: intent.action,
                staging: record.staging,
                reason,
            };
            let executor = Arc::clone(&self.executor);
            self.running.spawn(async move {
                let result = executor.finish(&lease, &step.reason).await;
                let instance = Some(lease.id().clone());
                drop(lease);
                Done { step, instance, result }
            });
        }
    }

    /// The next step that ends; absent when none runs. Dropping the future loses nothing.
    pub async fn next(&mut self, now: impl Fn() -> Timestamp) -> Option<Done> {
        if let Some(done) = self.refused.pop_front() {
            return Some(done);
        }
        let joined = self.running.join_next().await?;
        let done = match joined {
            Ok(done) => done,
            // The step's lease went with it; the instance is observed again.
            Err(error) => {
                tracing::error!(%error, "a step panicked");
                self.per_pool.clear();
                self.fill_up(now());
                return self.refused.pop_front();
            }
        };
        let key = (done.step.tenant.clone(), done.step.pool.clone());
        if let Some(count) = self.per_pool.get_mut(&key) {
            *count = count.saturating_sub(1);
        }
        self.fill_up(now());
        Some(done)
    }

    /// Forgets what waits: for shutting down.
    pub fn drop_waiting(&mut self) {
        self.waiting.clear();
    }

    /// One slot is kept from a pool that has all others, so that a pool of hanging boots never stops the rest.
    fn pool_limit(&self) -> usize {
        if self.slots > 1 { self.slots - 1 } else { 1 }
    }

    fn fill_up(&mut self, now: Timestamp) {
        let gate = Arc::clone(&self.gate);
        self.fill(&gate.close(), now);
    }

    fn fill(&mut self, gate: &Closed<'_>, now: Timestamp) {
        if gate.admitted() != self.admitted {
            // A request took room that these may have counted on: the next plan says what still fits.
            self.waiting.clear();
        }
        let mut later = VecDeque::new();
        while self.running.len() < self.slots
            && let Some((step, spec)) = self.waiting.pop_front()
        {
            let key = (step.tenant.clone(), step.pool.clone());
            if self.per_pool.get(&key).copied().unwrap_or(0) >= self.pool_limit() {
                later.push_back((step, spec));
                continue;
            }
            match self.lease(&step, spec.as_ref(), now) {
                Ok(Some(lease)) => {
                    *self.per_pool.entry(key).or_default() += 1;
                    self.spawn(step, spec, lease);
                }
                // Someone else acts on it: the next plan sees what came of that.
                Ok(None) => {}
                Err(error) => self.refused.push_back(Done { step, instance: None, result: Err(error) }),
            }
        }
        later.append(&mut self.waiting);
        self.waiting = later;
    }

    fn lease(
        &self,
        step: &Step,
        spec: Option<&PoolSpec>,
        now: Timestamp,
    ) -> Result<Option<Lease>, StepError> {
        match (&step.instance, spec) {
            (Some(id), _) => {
                let record = self.records.get(id);
                let to = step.action.leads_to(record.as_ref().map(|record| record.phase));
                if !matches!(step.action, Action::Warm | Action::Sleep) {
                    return Ok(self.records.lease(id, to));
                }
                // By policy or count: a request is a better reason to run, whether it comes before the step's turn or
                // while it is under way.
                let used = record.and_then(|record| record.last_used_at);
                let since = used.is_some_and(|used| self.planned_at.is_some_and(|planned| used > planned));
                Ok(if since { None } else { self.records.lease_to_rest(id, to) })
            }
            (None, Some(spec)) => {
                match self.records.reserve(&step.tenant, &step.pool, spec, step.staging, now) {
                    Ok((_, lease)) => Ok(Some(lease)),
                    // As nothing else is begun then.
                    Err(StateError::Closing) => Ok(None),
                    Err(error) => Err(error.into()),
                }
            }
            (None, None) => Ok(None),
        }
    }

    fn spawn(&mut self, step: Step, spec: Option<PoolSpec>, lease: Lease) {
        let order = Order {
            action: step.action,
            staging: step.staging,
            reason: step.reason.clone(),
            spec,
            on_demand: false,
            asked_by: None,
            for_move: false,
        };
        let executor = Arc::clone(&self.executor);
        let span = self.trace.map(|trace| begin_span(&executor.tracer, trace, &step, &lease));
        self.running.spawn(async move {
            let result = executor.execute(&lease, &order).await;
            span.into_iter().for_each(|span| end_span(span, &result));
            let instance = Some(lease.id().clone());
            drop(lease);
            Done { step, instance, result }
        });
    }
}

/// A step that the document of a trace asks for. Named by what is done.
fn begin_span(tracer: &Tracer, trace: TraceContext, step: &Step, lease: &Lease) -> Span {
    let mut span = tracer.begin(Kind::Internal, format!("{} instance", step.action), Some(trace));
    span.set(Attribute::Action, step.action.as_str());
    span.set(Attribute::Tenant, step.tenant.as_str());
    span.set(Attribute::Pool, step.pool.as_str());
    span.set(Attribute::Instance, lease.id().as_str());
    span
}

fn end_span(mut span: Span, result: &Result<Phase, StepError>) {
    match result {
        Ok(phase) => span.set(Attribute::Phase, phase.as_str()),
        Err(_) => span.fail("step_failed"),
    }
}

/// The pools' first steps, then their second ones, and so on: a pool with many steps does not delay the others.
fn take_turns(steps: &[Step]) -> impl Iterator<Item = &Step> {
    let mut turns = BTreeMap::<(&TenantId, &PoolId), usize>::new();
    let mut ordered: Vec<(usize, &Step)> = steps
        .iter()
        .map(|step| {
            let turn = turns.entry((&step.tenant, &step.pool)).or_default();
            *turn += 1;
            (*turn, step)
        })
        .collect();
    ordered.sort_by_key(|(turn, _)| *turn);
    ordered.into_iter().map(|(_, step)| step)
}
