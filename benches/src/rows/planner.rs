//! What a plan costs: beside reading the same document and observation as JSON, and per instance as a node grows.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use mvm_planner::{Capacity, Observation, ObservedInstance, plan_node};
use mvm_proto::document::Pool;
use mvm_proto::{DesiredState, InstanceId, Phase, Timestamp};
use serde_json::{Value, json};

use crate::authority::now;
use crate::document::{BareDocument, ready_to_sign};
use crate::effort::Effort;
use crate::machine::{Core, pin_this_thread};
use crate::row::{Goal, Row, Subject, Unit};

/// Of each pool: running, warm, sleeping.
const COUNTS: (u32, u32, u32) = (10, 3, 4);
const PER_POOL: usize = 17;
const POOLS: usize = 1000;
/// A node's pools belong to several tenants.
const POOLS_PER_TENANT: usize = 100;
const PARSE_GOAL: Goal = Goal::RatioAtMost(0.3);
const GROWTH_GOAL: Goal = Goal::RatioAtMost(1.1);
/// Instances at the small and at the large end of growth.
const GROWTH: (usize, usize) = (100, 100_000);
/// Pairs of growth for each pair of another row: one takes milliseconds, and what else uses the processor's caches shows
/// in every single one.
const GROWTH_PAIRS: usize = 10;

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    pin_this_thread(Core::Load)?;
    let now = now();
    let node = Node::with_pools(POOLS, now)?;
    let rest = plan_node(&node.desired, &node.observed, now);
    ensure!(rest.steps.is_empty() && rest.deferred.is_empty(), "the bench's node is at rest");
    let mut busy = node.desired.clone();
    for tenant in &mut busy.tenants {
        tenant.pools.iter_mut().for_each(|pool| pool.desired_counts.running += 1);
    }
    let steps = plan_node(&busy, &node.observed, now).steps.len();
    ensure!(steps >= POOLS, "a changed document makes steps");
    let document = ready_to_sign(&"bench".parse()?, node.desired.clone(), now).to_payload();
    let observation = serde_json::to_vec(&node.observed)?;
    let parse = || -> Result<()> {
        black_box(serde_json::from_slice::<BareDocument>(black_box(&document))?);
        black_box(serde_json::from_slice::<Observation>(black_box(&observation))?);
        Ok(())
    };
    let size = format!("{:.1} MB of JSON", (document.len() + observation.len()) as f64 / 1e6);
    let mut rows = Vec::new();
    for (name, desired) in [("at rest", &node.desired), ("one more wanted in each pool", &busy)] {
        let pairs = (0..effort.pairs)
            .map(|_| {
                let plan = millis(|| {
                    black_box(plan_node(black_box(desired), black_box(&node.observed), now));
                    Ok(())
                })?;
                Ok((plan, millis(parse)?))
            })
            .collect::<Result<Vec<_>>>()?;
        let ours: Vec<f64> = pairs.iter().map(|(plan, _)| *plan).collect();
        let row = Row::of(
            Subject::Planner,
            format!("plan for {POOLS} pools x {PER_POOL} instances, {name}"),
            &ours,
            Unit::Milliseconds,
        );
        rows.push(row.beside("serde_json's reading of both", &pairs).goal(PARSE_GOAL).note(size.clone()));
    }
    rows.push(growth(effort, now)?);
    Ok(rows)
}

/// The cost of an instance on a full node beside its cost on a small one.
fn growth(effort: &Effort, now: Timestamp) -> Result<Row> {
    let (few, many) = GROWTH;
    let small = Node::with_pools(few.div_ceil(PER_POOL), now)?;
    let large = Node::with_pools(many.div_ceil(PER_POOL), now)?;
    let pairs = (0..GROWTH_PAIRS * effort.pairs)
        .map(|_| Ok((per_instance(&large, 1, now)?, per_instance(&small, 1000, now)?)))
        .collect::<Result<Vec<_>>>()?;
    let ours: Vec<f64> = pairs.iter().map(|(large, _)| *large).collect();
    let name = format!("plan per instance, {} instances", large.observed.instances.len());
    Ok(Row::of(Subject::Planner, name, &ours, Unit::Microseconds)
        .beside(format!("{} instances", small.observed.instances.len()), &pairs)
        .goal(GROWTH_GOAL))
}

/// Microseconds, over `times` plans.
fn per_instance(node: &Node, times: usize, now: Timestamp) -> Result<f64> {
    let took = millis(|| {
        for _ in 0..times {
            black_box(plan_node(black_box(&node.desired), black_box(&node.observed), now));
        }
        Ok(())
    })?;
    Ok(1000.0 * took / (times * node.observed.instances.len()) as f64)
}

fn millis(act: impl FnOnce() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    act()?;
    Ok(begun.elapsed().as_secs_f64() * 1000.0)
}

/// A document and a node that is what it says.
struct Node {
    desired: DesiredState,
    observed: Observation,
}

impl Node {
    /// Larger than a document may be on the wire: only the planner sees it.
    fn with_pools(pools: usize, now: Timestamp) -> Result<Self> {
        let mut desired =
            DesiredState::parse(one_pool().to_string().as_bytes()).context("the bench's document")?;
        let tenant = desired.tenants.pop().context("the document has a tenant")?;
        for first in (0..pools).step_by(POOLS_PER_TENANT) {
            let mut next = tenant.clone();
            next.tenant_id = format!("tenant-{first}").parse()?;
            let pool = next.pools.pop().context("the tenant has a pool")?;
            for number in first..pools.min(first + POOLS_PER_TENANT) {
                next.pools.push(Pool { pool_id: format!("pool-{number}").parse()?, ..pool.clone() });
            }
            desired.tenants.push(next);
        }
        let capacity = Capacity {
            vcpus: u32::MAX,
            mem_mib: u64::MAX / 2,
            disk_mib: u64::MAX / 2,
            max_instances: u32::MAX,
        };
        let observed =
            Observation { capacity, instances: instances(&desired, now)?, ..Observation::default() };
        Ok(Self { desired, observed })
    }
}

fn one_pool() -> Value {
    let (running, warm, sleeping) = COUNTS;
    let many = 1_000_000;
    json!({
        "schema_version": 1, "node_id": "node-a",
        "tenants": [{
            "tenant_id": "tenant",
            "network": { "tenant_net_id": 1, "ipv4_subnet": "10.16.0.0/16" },
            "quotas": {
                "max_vcpus": many, "max_mem_mib": 1_000_000_000_u64, "max_running": many, "max_warm": many,
                "max_pools": POOLS_PER_TENANT, "max_instances_per_pool": 1000, "max_disk_gib": 1_000_000_u64,
            },
            "pools": [{
                "pool_id": "pool", "flake_ref": "builtin:busybox", "profile": "minimal",
                "instance_resources": { "vcpus": 2, "mem_mib": 512, "data_disk_mib": 1024 },
                "desired_counts": { "running": running, "warm": warm, "sleeping": sleeping },
            }],
        }],
    })
}

fn instances(desired: &DesiredState, now: Timestamp) -> Result<Vec<ObservedInstance>> {
    let mut instances = Vec::new();
    let (running, warm, sleeping) = COUNTS;
    let an_hour_ago = now - Duration::from_secs(3600);
    for (tenant, pool) in desired.pools() {
        for (phase, count) in [(Phase::Running, running), (Phase::Warm, warm), (Phase::Sleeping, sleeping)] {
            for _ in 0..count {
                let id = InstanceId::from_bits(u32::try_from(instances.len())?);
                let instance = ObservedInstance::of(tenant, pool, id, phase, an_hour_ago);
                instances.push(ObservedInstance { last_used_at: Some(an_hour_ago), ..instance });
            }
        }
    }
    Ok(instances)
}
