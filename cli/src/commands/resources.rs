//! Capacity, allocation and overcommit of nodes, pools and tenants, as tables show them.
//!
//! *Capacity* is what a node offers to instances: more vCPUs than it has processors, and less memory than the machine has.
//! *Allocated* are the resources of the instances that exist, by their phases; *requested* those of the instances that the
//! documents ask for. *Overcommit* is how far either exceeds the hardware or the capacity.

use mvm_proto::status::{Capacity, NodeInfo, NodeStatus, Usage};

use crate::output::mib;

/// The rows of a node; without a status only its hardware and capacity.
pub(crate) fn of_node(info: &NodeInfo, status: Option<&NodeStatus>) -> Vec<(&'static str, String)> {
    let capacity = info.capacity.unwrap_or_default();
    let mut rows = Vec::new();
    if info.processors > 0 {
        rows.push(("machine", format!("{} processors, {} memory", info.processors, mib(info.memory_mib))));
    }
    let Capacity { vcpus, mem_mib, disk_mib, max_instances } = capacity;
    let per = match info.processors {
        0 => String::new(),
        processors => format!(" ({} per processor)", per_processor(vcpus, processors)),
    };
    rows.push((
        "capacity",
        format!(
            "{vcpus} vCPUs{per}, {} memory, {} disk, {max_instances} instances",
            mib(mem_mib),
            mib(disk_mib)
        ),
    ));
    let Some(status) = status else { return rows };
    let used = status.usage.unwrap_or_default();
    rows.push(("allocated", format!("{}, {} instances", amount(&used), used.instances)));
    let requested = status.pools.iter().filter_map(|pool| pool.requested).fold(Usage::default(), plus);
    rows.push(("requested", format!("{}, {} instances", amount(&requested), requested.instances)));
    rows.push(("overcommit", overcommit(&used, &requested, info)));
    rows
}

pub(crate) fn amount(usage: &Usage) -> String {
    format!("{} vCPUs, {} memory, {} disk", usage.vcpus, mib(usage.mem_mib), mib(usage.disk_mib))
}

/// How many vCPUs share a processor.
pub(crate) fn per_processor(vcpus: u32, processors: u32) -> String {
    match processors {
        0 => "-".to_owned(),
        _ => format!("{:.1}", f64::from(vcpus) / f64::from(processors)),
    }
}

fn overcommit(used: &Usage, requested: &Usage, info: &NodeInfo) -> String {
    let capacity = info.capacity.unwrap_or_default();
    let mut parts = Vec::new();
    if info.processors > 0 {
        let now = per_processor(used.vcpus, info.processors);
        parts.push(format!(
            "{now} of {} vCPUs per processor allocated",
            per_processor(capacity.vcpus, info.processors)
        ));
    }
    let beyond = [
        ("vCPUs", u64::from(requested.vcpus), u64::from(capacity.vcpus)),
        ("memory", requested.mem_mib, capacity.mem_mib),
        ("disk", requested.disk_mib, capacity.disk_mib),
        ("instances", u64::from(requested.instances), u64::from(capacity.max_instances)),
    ];
    let beyond: Vec<String> = beyond
        .into_iter()
        .filter(|(_, requested, there)| requested > there)
        .map(|(what, requested, there)| {
            format!("{} % of {what}", requested.saturating_mul(100) / there.max(1))
        })
        .collect();
    match beyond.is_empty() {
        true => parts.push("requests are within the capacity".to_owned()),
        false => parts.push(format!("requests exceed the capacity: {}", beyond.join(", "))),
    }
    parts.join("; ")
}

/// The share of a node's vCPUs and memory.
pub(crate) fn share(usage: &Usage, capacity: &Capacity) -> String {
    let percent = |part: u64, whole: u64| match whole {
        0 => "-".to_owned(),
        whole => format!("{} %", part.saturating_mul(100) / whole),
    };
    format!(
        "{} vCPUs, {} memory",
        percent(usage.vcpus.into(), capacity.vcpus.into()),
        percent(usage.mem_mib, capacity.mem_mib)
    )
}

/// A peer may claim any amounts.
pub(crate) fn plus(sum: Usage, one: Usage) -> Usage {
    Usage {
        vcpus: sum.vcpus.saturating_add(one.vcpus),
        mem_mib: sum.mem_mib.saturating_add(one.mem_mib),
        disk_mib: sum.disk_mib.saturating_add(one.disk_mib),
        instances: sum.instances.saturating_add(one.instances),
        ..sum
    }
}

#[cfg(test)]
mod tests {
    use mvm_proto::status::PoolStatus;

    use super::*;

    #[test]
    fn a_node_tells_what_it_has_what_is_given_out_and_what_is_wanted_beyond_that() {
        let capacity = Capacity { vcpus: 8, mem_mib: 7_680, disk_mib: 10_240, max_instances: 1000 };
        let info =
            NodeInfo { capacity: Some(capacity), processors: 2, memory_mib: 8_192, ..NodeInfo::default() };
        let usage = |vcpus, mem_mib| Usage { vcpus, mem_mib, instances: vcpus, ..Usage::default() };
        let pool = PoolStatus { requested: Some(usage(6, 6_144)), ..PoolStatus::default() };
        let status = NodeStatus {
            usage: Some(usage(5, 5_120)),
            pools: vec![pool.clone(), pool],
            ..NodeStatus::default()
        };
        let rows = of_node(&info, Some(&status));
        let rows: Vec<_> = rows.iter().map(|(name, text)| format!("{name}: {text}")).collect();
        assert_eq!(
            rows,
            [
                "machine: 2 processors, 8.0 GiB memory",
                "capacity: 8 vCPUs (4.0 per processor), 7.5 GiB memory, 10.0 GiB disk, 1000 instances",
                "allocated: 5 vCPUs, 5.0 GiB memory, 0.0 MiB disk, 5 instances",
                "requested: 12 vCPUs, 12.0 GiB memory, 0.0 MiB disk, 12 instances",
                "overcommit: 2.5 of 4.0 vCPUs per processor allocated; requests exceed the capacity: 150 % of vCPUs, \
                 160 % of memory",
            ]
        );
    }
}
