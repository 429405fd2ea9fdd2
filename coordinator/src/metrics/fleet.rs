//! What the fleet is like at the moment of a scrape. Sums over the connected nodes alone: what one node says makes no
//! series of its own, and a node's own `/metrics` has the rest.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use mvm_proto::Timestamp;
use mvm_proto::object::{FleetDemand, PoolCounts};
use mvm_proto::status::{Capacity, Condition, ConditionKind, Counts, NodeInfo, NodeStatus};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

const MIB: u64 = 1024 * 1024;

/// So many operators have a series of their own.
const MAX_OPERATORS: usize = 256;

/// Sums over the connected nodes, and what of this coordinator's ends when.
#[derive(Debug, Default)]
pub(crate) struct FleetState {
    /// How many nodes say that a condition does not hold.
    failing: BTreeMap<ConditionKind, u64>,
    desired: Sums,
    actual: Sums,
    failed: u64,
    down: u64,
    capacity: Resources,
    allocated: Resources,
    /// What has no place for want of nodes.
    unplaced: Sums,
    unplaced_room: Resources,
    empty_nodes: u64,
    /// Of each tenant with a subnet: addresses of instances that are placed, and those that its subnet has.
    addresses: Vec<(u64, u64)>,
    expiries: Vec<(&'static str, Timestamp)>,
    /// When the last certificate of each operator ends, by name.
    operators: Vec<(String, Timestamp)>,
}

#[derive(Debug, Default)]
struct Sums {
    running: u64,
    warm: u64,
    sleeping: u64,
}

#[derive(Debug, Default)]
struct Resources {
    vcpus: u64,
    mem_mib: u64,
    disk_mib: u64,
    instances: u64,
}

impl Sums {
    fn add(&mut self, counts: Counts) {
        self.running = self.running.saturating_add(counts.running.into());
        self.warm = self.warm.saturating_add(counts.warm.into());
        self.sleeping = self.sleeping.saturating_add(counts.sleeping.into());
    }

    fn by_state(&self) -> [(&'static str, u64); 3] {
        [("running", self.running), ("warm", self.warm), ("sleeping", self.sleeping)]
    }
}

impl Resources {
    fn add(&mut self, vcpus: u32, mem_mib: u64, disk_mib: u64, instances: u32) {
        self.vcpus = self.vcpus.saturating_add(vcpus.into());
        self.mem_mib = self.mem_mib.saturating_add(mem_mib);
        self.disk_mib = self.disk_mib.saturating_add(disk_mib);
        self.instances = self.instances.saturating_add(instances.into());
    }
}

impl FleetState {
    pub(crate) fn new(expiries: Vec<(&'static str, Timestamp)>, operators: Vec<(String, Timestamp)>) -> Self {
        Self { expiries, operators, ..Self::default() }
    }

    /// A connected node's word. Conditions that are not on our list are not counted: no node makes new series.
    pub(crate) fn add(&mut self, info: Option<&NodeInfo>, status: Option<&NodeStatus>) {
        let of_info = info.into_iter().flat_map(|info| &info.conditions);
        let of_status = status.into_iter().flat_map(|status| &status.conditions);
        for kind in of_info.chain(of_status).filter(|condition| condition.fails()).filter_map(Condition::kind)
        {
            *self.failing.entry(kind).or_default() += 1;
        }
        if let Some(Capacity { vcpus, mem_mib, disk_mib, max_instances }) =
            info.and_then(|info| info.capacity)
        {
            self.capacity.add(vcpus, mem_mib, disk_mib, max_instances);
        }
        let Some(status) = status else { return };
        let usage = status.usage.unwrap_or_default();
        self.allocated.add(usage.vcpus, usage.mem_mib, usage.disk_mib, usage.instances);
        for pool in &status.pools {
            let actual = pool.actual.unwrap_or_default();
            self.desired.add(pool.desired.unwrap_or_default());
            self.actual.add(actual);
            self.failed = self.failed.saturating_add(pool.failed.into());
            self.down = self.down.saturating_add(actual.down.into());
        }
    }

    /// What has no place for want of nodes, summed over all shapes.
    pub(crate) fn add_demand(&mut self, demand: &FleetDemand) {
        for shape in &demand.unplaced {
            let PoolCounts { running, warm, sleeping } = shape.counts;
            self.unplaced.add(Counts { running, warm, sleeping, down: 0 });
            let awake = u64::from(running) + u64::from(warm);
            let vcpus = shape.vcpus.saturating_mul(running);
            self.unplaced_room.add(vcpus, shape.mem_mib.saturating_mul(awake), 0, 0);
        }
        self.empty_nodes = u64::try_from(demand.empty_nodes.len()).unwrap_or(u64::MAX);
    }

    /// How many addresses tenants' instances have, of how many.
    pub(crate) fn add_addresses(&mut self, addresses: Vec<(u64, u64)>) {
        self.addresses = addresses;
    }

    /// Of all subnets together, and of the one with the least left.
    #[allow(clippy::cast_precision_loss, reason = "a fleet has far fewer than 2^53 addresses")]
    fn utilization(&self) -> [(&'static str, f64); 2] {
        let ratio = |used: u64, of: u64| if of == 0 { 0.0 } else { used as f64 / of as f64 };
        let (used, of) = self.addresses.iter().fold((0, 0), |(used, of), next| (used + next.0, of + next.1));
        let fullest = self.addresses.iter().map(|(used, of)| ratio(*used, *of)).fold(0.0, f64::max);
        [("all", ratio(used, of)), ("fullest", fullest)]
    }

    pub(super) fn registry(&self) -> Registry {
        let mut registry = Registry::with_prefix("mvm_coordinator");
        let failing = Family::<TypeLabel, Gauge>::default();
        for kind in ConditionKind::ALL {
            let nodes = self.failing.get(&kind).copied().unwrap_or_default();
            failing.get_or_create(&TypeLabel { r#type: kind.as_str() }).set(gauge(nodes));
        }
        registry.register("nodes_failing", "Connected nodes on which a condition does not hold", failing);
        let (desired, actual) =
            (Family::<StateLabel, Gauge>::default(), Family::<StateLabel, Gauge>::default());
        for (state, count) in self.desired.by_state() {
            desired.get_or_create(&StateLabel { state }).set(gauge(count));
        }
        let others = [("failed", self.failed), ("down", self.down)];
        for (state, count) in self.actual.by_state().into_iter().chain(others) {
            actual.get_or_create(&StateLabel { state }).set(gauge(count));
        }
        registry.register(
            "desired_instances",
            "Instances that the connected nodes' pools ask for, by state",
            desired,
        );
        let help = "Instances that the connected nodes have, by state; `down` are those of the running whose program does not \
                    work";
        registry.register("instances", help, actual);
        for (kind, what, of) in [
            ("capacity", "that instances may have together", &self.capacity),
            ("allocated", "promised to instances", &self.allocated),
        ] {
            let mut tell = |unit: &str, noun: &str, value: u64| {
                let one = Gauge::<i64>::default();
                one.set(gauge(value));
                registry.register(
                    format!("{kind}_{unit}"),
                    format!("{noun} {what}, on the connected nodes"),
                    one,
                );
            };
            tell("vcpus", "vCPUs", of.vcpus);
            tell("memory_bytes", "Memory", of.mem_mib.saturating_mul(MIB));
            tell("disk_bytes", "Disk", of.disk_mib.saturating_mul(MIB));
            tell("instances", "Places", of.instances);
        }
        let unplaced = Family::<StateLabel, Gauge>::default();
        for (state, count) in self.unplaced.by_state() {
            unplaced.get_or_create(&StateLabel { state }).set(gauge(count));
        }
        let help = "Instances that no node takes for want of nodes, by the state that they are to have";
        registry.register("unplaced_instances", help, unplaced);
        for (name, help, value) in [
            ("unplaced_vcpus", "vCPUs that those of them need that are to run", self.unplaced_room.vcpus),
            (
                "unplaced_memory_bytes",
                "Memory that those of them need that are to run or to be warm",
                self.unplaced_room.mem_mib.saturating_mul(MIB),
            ),
            (
                "empty_nodes",
                "Nodes that are there and have nothing: nothing placed, and nothing left of what was",
                self.empty_nodes,
            ),
        ] {
            let one = Gauge::<i64>::default();
            one.set(gauge(value));
            registry.register(name, help, one);
        }
        let utilization = Family::<OfLabel, Gauge<f64, AtomicU64>>::default();
        for (of, ratio) in self.utilization() {
            utilization.get_or_create(&OfLabel { of }).set(ratio);
        }
        let help = "Addresses of instances that are placed, of those that tenants' subnets have: of all subnets, and of the \
                    fullest one";
        registry.register("address_utilization_ratio", help, utilization);
        let expiries = Family::<OfLabel, Gauge>::default();
        for (of, at) in &self.expiries {
            expiries.get_or_create(&OfLabel { of }).set(at.unix_secs());
        }
        let help = "When a certificate or a signed statement expires, in seconds since 1970";
        registry.register("expiry_timestamp_seconds", help, expiries);
        let operators = Family::<OperatorLabel, Gauge>::default();
        for (operator, at) in self.operators.iter().take(MAX_OPERATORS) {
            operators.get_or_create(&OperatorLabel { operator: operator.clone() }).set(at.unix_secs());
        }
        let help = "When the last certificate of an operator that was not removed expires, in seconds since 1970; of the first 256 \
                    operators by name";
        registry.register("operator_expiry_timestamp_seconds", help, operators);
        registry
    }
}

fn gauge(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TypeLabel {
    r#type: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfLabel {
    of: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperatorLabel {
    operator: String,
}

#[cfg(test)]
mod tests {
    use mvm_proto::object::DemandShape;
    use mvm_proto::status::PoolStatus;
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn nodes_are_summed_and_can_make_no_series_of_their_own() {
        let now = Timestamp::from_unix_ms(0);
        let mut invented = Condition::new(ConditionKind::Converged, false, "Working", "", now);
        invented.r#type = "Invented".to_owned();
        let conditions = vec![Condition::new(ConditionKind::Converged, false, "Working", "", now), invented];
        let counts = |running| Some(Counts { running, ..Counts::default() });
        let pool = PoolStatus { desired: counts(3), actual: counts(2), ..PoolStatus::default() };
        let status = NodeStatus { conditions, pools: vec![pool], ..NodeStatus::default() };
        let operators = (0..=MAX_OPERATORS).map(|n| (format!("operator-{n:03}"), now)).collect();
        let mut fleet = FleetState::new(vec![("root_ca", Timestamp::from_unix_ms(5_000))], operators);
        fleet.add(None, Some(&status));
        fleet.add(None, Some(&status));
        let shape = |running, warm| DemandShape {
            vcpus: 2,
            mem_mib: 512,
            node_labels: BTreeMap::new(),
            counts: PoolCounts { running, warm, sleeping: 0 },
        };
        fleet.add_demand(&FleetDemand { unplaced: vec![shape(3, 1), shape(1, 0)], empty_nodes: Vec::new() });
        fleet.add_addresses(vec![(10, 100), (80, 100)]);
        let mut text = String::new();
        encode(&mut text, &fleet.registry()).unwrap();
        for line in [
            "mvm_coordinator_nodes_failing{type=\"Converged\"} 2",
            "mvm_coordinator_nodes_failing{type=\"DiskWritable\"} 0",
            "mvm_coordinator_desired_instances{state=\"running\"} 6",
            "mvm_coordinator_instances{state=\"running\"} 4",
            "mvm_coordinator_unplaced_instances{state=\"running\"} 4",
            "mvm_coordinator_unplaced_vcpus 8",
            "mvm_coordinator_unplaced_memory_bytes 2684354560",
            "mvm_coordinator_address_utilization_ratio{of=\"all\"} 0.45",
            "mvm_coordinator_address_utilization_ratio{of=\"fullest\"} 0.8",
            "mvm_coordinator_expiry_timestamp_seconds{of=\"root_ca\"} 5",
            "mvm_coordinator_operator_expiry_timestamp_seconds{operator=\"operator-255\"} 0",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        assert!(!text.contains("Invented") && !text.contains("operator-256"));
    }
}
