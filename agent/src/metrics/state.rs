//! What the node is like at the moment of a scrape: conditions, pools, what it may take and takes, what ends when.

use mvm_proto::Timestamp;
use mvm_proto::status::{Condition, Counts, NodeInfo, NodeStatus, PoolStatus, Usage};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

const MIB: u64 = 1024 * 1024;

/// How many pools have series of their own, at most nine each: the first by name. A node of more has other worries.
const MAX_POOLS: usize = 1000;

/// Everything that is told of a node's state.
#[derive(Debug, Clone, Default)]
pub struct NodeState {
    pub info: NodeInfo,
    pub status: NodeStatus,
    /// What the machine itself has: what more than it is promised is overcommitted.
    pub machine_processors: u32,
    pub machine_memory_mib: u64,
    /// When what ends, by what it is.
    pub expiries: Vec<(&'static str, Timestamp)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TypeLabel {
    r#type: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfLabel {
    of: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolLabels {
    tenant: String,
    pool: String,
    state: &'static str,
}

type PerPool = Family<PoolLabels, Gauge>;

/// A registry that is made for one scrape: pools that are gone have no series in the next one.
pub(super) fn registry(state: &NodeState) -> Registry {
    let mut registry = Registry::default();
    conditions(&mut registry, state.info.conditions.iter().chain(&state.status.conditions));
    pools(&mut registry, &state.status.pools);
    resources(&mut registry, state);
    let expiries = Family::<OfLabel, Gauge>::default();
    for (of, at) in &state.expiries {
        expiries.get_or_create(&OfLabel { of }).set(at.unix_secs());
    }
    let help =
        "When a certificate, a signed statement or the document in force expires, in seconds since 1970";
    registry.register("mvm_agent_expiry_timestamp_seconds", help, expiries);
    registry
}

fn conditions<'a>(registry: &mut Registry, conditions: impl Iterator<Item = &'a Condition>) {
    let family = Family::<TypeLabel, Gauge>::default();
    for (kind, condition) in conditions.filter_map(|condition| Some((condition.kind()?, condition))) {
        family.get_or_create(&TypeLabel { r#type: kind.as_str() }).set(i64::from(condition.holds()));
    }
    registry.register("mvm_agent_condition", "1 where a condition of mvm node get is True, else 0", family);
}

fn pools(registry: &mut Registry, pools: &[PoolStatus]) {
    let (desired, actual) = (PerPool::default(), PerPool::default());
    let mut by_name: Vec<&PoolStatus> = pools.iter().collect();
    by_name.sort_by_key(|pool| (&pool.tenant_id, &pool.pool_id));
    for pool in by_name.into_iter().take(MAX_POOLS) {
        let set = |family: &PerPool, state, count: u32| {
            let (tenant, pool) = (pool.tenant_id.clone(), pool.pool_id.clone());
            family.get_or_create(&PoolLabels { tenant, pool, state }).set(i64::from(count));
        };
        let (wanted, found) = (pool.desired.unwrap_or_default(), pool.actual.unwrap_or_default());
        for (state, count) in by_state(&wanted) {
            set(&desired, state, count);
        }
        for (state, count) in by_state(&found) {
            set(&actual, state, count);
        }
        set(&actual, "stopped", pool.stopped);
        set(&actual, "failed", pool.failed);
        set(&actual, "down", found.down);
    }
    registry.register(
        "mvm_agent_pool_desired_instances",
        "Instances that a pool asks for, by state",
        desired,
    );
    let help =
        "Instances that a pool has, by state; `down` are those of the running whose program does not work";
    registry.register("mvm_agent_pool_instances", help, actual);
    let all = Gauge::<i64>::default();
    all.set(i64::try_from(pools.len()).unwrap_or(i64::MAX));
    registry.register(
        "mvm_agent_pools",
        "Pools of this node; the first 1000 by name have series of their own",
        all,
    );
}

fn by_state(counts: &Counts) -> [(&'static str, u32); 3] {
    [("running", counts.running), ("warm", counts.warm), ("sleeping", counts.sleeping)]
}

fn resources(registry: &mut Registry, state: &NodeState) {
    let capacity = state.info.capacity.unwrap_or_default();
    let Usage { vcpus, mem_mib, disk_mib, instances, disk_used_mib, running_memory_mib, warm_memory_mib } =
        state.status.usage.unwrap_or_default();
    let mut tell = |name: &str, help: &str, value: u64| {
        let gauge = Gauge::<i64>::default();
        gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        registry.register(name, help, gauge);
    };
    let bytes = |mib: u64| mib.saturating_mul(MIB);
    let promised = "promised to instances";
    tell("mvm_agent_capacity_vcpus", "vCPUs that instances may have together", capacity.vcpus.into());
    tell(
        "mvm_agent_capacity_memory_bytes",
        "Memory that instances may have together",
        bytes(capacity.mem_mib),
    );
    tell("mvm_agent_capacity_disk_bytes", "Disk that instances may have together", bytes(capacity.disk_mib));
    tell("mvm_agent_capacity_instances", "Most instances of this node", capacity.max_instances.into());
    tell("mvm_agent_allocated_vcpus", &format!("vCPUs {promised} that run"), vcpus.into());
    let help = format!("Memory {promised} that run or are warm");
    tell("mvm_agent_allocated_memory_bytes", &help, bytes(mem_mib));
    let help = format!("Disk {promised}, with the memory of those that sleep");
    tell("mvm_agent_allocated_disk_bytes", &help, bytes(disk_mib));
    tell("mvm_agent_allocated_instances", "Instances that exist, whatever their phase", instances.into());
    let help = "Memory that the VMMs of running and warm instances really take, as last measured";
    tell("mvm_agent_used_memory_bytes", help, bytes(running_memory_mib.saturating_add(warm_memory_mib)));
    let help = "Disk that instances really take, as last measured";
    tell("mvm_agent_used_disk_bytes", help, bytes(disk_used_mib));
    let help = "Processors of this machine: more allocated vCPUs than that are overcommitted";
    tell("mvm_agent_machine_processors", help, state.machine_processors.into());
    tell("mvm_agent_machine_memory_bytes", "Memory of this machine", bytes(state.machine_memory_mib));
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    fn text(state: &NodeState) -> String {
        let mut text = String::new();
        encode(&mut text, &registry(state)).unwrap();
        text
    }

    #[test]
    fn what_a_pool_asks_for_and_has_is_told_by_state_and_of_so_many_pools_only() {
        let pool = |n: usize| PoolStatus {
            tenant_id: "acme".to_owned(),
            pool_id: format!("p{n:05}"),
            desired: Some(Counts { running: 3, ..Counts::default() }),
            actual: Some(Counts { running: 2, down: 1, ..Counts::default() }),
            failed: 1,
            ..PoolStatus::default()
        };
        let pools = (0..=MAX_POOLS).map(pool).collect();
        let told = text(&NodeState {
            status: NodeStatus { pools, ..NodeStatus::default() },
            ..NodeState::default()
        });
        for line in [
            "mvm_agent_pool_desired_instances{tenant=\"acme\",pool=\"p00000\",state=\"running\"} 3",
            "mvm_agent_pool_instances{tenant=\"acme\",pool=\"p00000\",state=\"running\"} 2",
            "mvm_agent_pool_instances{tenant=\"acme\",pool=\"p00000\",state=\"down\"} 1",
            "mvm_agent_pool_instances{tenant=\"acme\",pool=\"p00999\",state=\"failed\"} 1",
            "mvm_agent_pools 1001",
        ] {
            assert!(told.contains(line), "{line} is missing");
        }
        assert!(!told.contains("p01000"), "the last pool has no series of its own");
    }

    #[test]
    fn a_pool_that_is_gone_has_no_series_in_the_next_scrape() {
        let pools = vec![PoolStatus { tenant_id: "acme".to_owned(), ..PoolStatus::default() }];
        let mut state =
            NodeState { status: NodeStatus { pools, ..NodeStatus::default() }, ..NodeState::default() };
        assert!(text(&state).contains("tenant=\"acme\""));
        state.status.pools.clear();
        assert!(!text(&state).contains("tenant=\"acme\""));
    }
}
