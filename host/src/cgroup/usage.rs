//! What groups use and how often they met their limits, and what is new in that.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::file::counter;
use super::group::Group;
use super::io_max::IoFound;

/// One group's figures. Counters only grow while the group lives. What the kernel does not tell is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub memory_bytes: u64,
    pub pids: u64,
    pub cpu_usec: u64,
    /// Periods at whose end it had to wait, and for how long in all.
    pub throttled_periods: u64,
    pub throttled_usec: u64,
    /// Processes in it, or below, that were killed for want of memory.
    pub oom_kills: u64,
    /// How often this very group's memory limit left no way but to kill.
    pub memory_limit_hits: u64,
    /// Processes and threads that were not made.
    pub pids_limit_hits: u64,
    /// Whether a process is in it or below.
    pub populated: bool,
    pub frozen: bool,
    /// What it may do to disks.
    #[serde(default)]
    pub io: IoFound,
}

impl Usage {
    /// As the group's files tell it now.
    #[must_use]
    pub fn read(group: &Path) -> Self {
        let text = |name: &str| fs::read_to_string(group.join(name)).unwrap_or_default();
        let number = |name: &str| text(name).trim().parse().unwrap_or(0);
        let (cpu, events) = (text("cpu.stat"), text("cgroup.events"));
        // From Linux 6.11 on `pids.events` also counts what is below; this one is like the older.
        let pids = Some(text("pids.events.local")).filter(|text| !text.is_empty());
        let pids = pids.unwrap_or_else(|| text("pids.events"));
        let flag = |word: &str| counter(&events, word) == Some(1);
        Self {
            memory_bytes: number("memory.current"),
            pids: number("pids.current"),
            cpu_usec: counter(&cpu, "usage_usec").unwrap_or(0),
            throttled_periods: counter(&cpu, "nr_throttled").unwrap_or(0),
            throttled_usec: counter(&cpu, "throttled_usec").unwrap_or(0),
            oom_kills: counter(&text("memory.events"), "oom_kill").unwrap_or(0),
            memory_limit_hits: counter(&text("memory.events.local"), "oom").unwrap_or(0),
            pids_limit_hits: counter(&pids, "max").unwrap_or(0),
            populated: flag("populated"),
            frozen: flag("frozen"),
            io: IoFound::read(&text("io.max")),
        }
    }
}

/// A limit that was met since the last look.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitEvent {
    pub group: Group,
    pub limit: Limit,
}

/// Which limit, and how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Processes of this instance were killed for want of memory, its own or its tenant's. Some kernels count the
    /// first of them twice.
    OutOfMemory {
        killed: u64,
    },
    /// The tenant's instances together wanted more than its quota; which of them paid is told of that one.
    TenantMemory {
        times: u64,
    },
    Pids {
        times: u64,
    },
    /// It wanted more processor time than it may have. Common, and no fault by itself.
    Throttled {
        periods: u64,
        usec: u64,
    },
}

/// The groups that are there, with their figures.
pub type Usages = BTreeMap<Group, Usage>;

/// A list of pairs: a group is no key that JSON could have.
pub(super) mod as_pairs {
    use serde::{Deserialize as _, Deserializer, Serializer};

    use super::{Group, Usage, Usages};

    pub(in crate::cgroup) fn serialize<S: Serializer>(usages: &Usages, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(usages)
    }

    pub(in crate::cgroup) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Usages, D::Error> {
        Ok(Vec::<(Group, Usage)>::deserialize(from)?.into_iter().collect())
    }
}

/// What is new in `after`. A group that was not there before had met no limit; one whose counters fell was made anew.
#[must_use]
pub fn changes(before: &Usages, after: &Usages) -> Vec<LimitEvent> {
    let mut events = Vec::new();
    for (group, now) in after {
        let was = before.get(group).copied().unwrap_or_default();
        let was = if now.cpu_usec < was.cpu_usec { Usage::default() } else { was };
        let grown = |count: fn(&Usage) -> u64| match count(now).checked_sub(count(&was)) {
            Some(grown) => grown,
            None => count(now),
        };
        let mut tell = |times: u64, limit: Limit| {
            if times > 0 {
                events.push(LimitEvent { group: group.clone(), limit });
            }
        };
        match group {
            // A pool has no limits; the kernel counts in it what happens below.
            Group::Pool(..) => continue,
            Group::Instance(_) => {
                let killed = grown(|usage| usage.oom_kills);
                tell(killed, Limit::OutOfMemory { killed });
            }
            Group::Tenant(_) => {
                let times = grown(|usage| usage.memory_limit_hits);
                tell(times, Limit::TenantMemory { times });
            }
        }
        let times = grown(|usage| usage.pids_limit_hits);
        tell(times, Limit::Pids { times });
        let (periods, usec) = (grown(|usage| usage.throttled_periods), grown(|usage| usage.throttled_usec));
        tell(periods, Limit::Throttled { periods, usec });
    }
    events
}

#[cfg(test)]
mod tests {
    use mvm_proto::InstanceId;

    use super::super::group::InstanceGroup;
    use super::*;

    fn instance() -> Group {
        let (tenant, pool) = ("acme".parse().unwrap(), "web".parse().unwrap());
        Group::Instance(InstanceGroup { tenant, pool, instance: InstanceId::from_bits(1) })
    }

    fn one(group: Group, usage: Usage) -> Usages {
        Usages::from([(group, usage)])
    }

    #[test]
    fn what_was_told_is_not_told_again() {
        let before = one(instance(), Usage { oom_kills: 1, pids_limit_hits: 2, ..Usage::default() });
        assert_eq!(changes(&before, &before), []);
        let after = one(
            instance(),
            Usage {
                oom_kills: 3,
                pids_limit_hits: 2,
                throttled_periods: 4,
                throttled_usec: 50,
                ..Usage::default()
            },
        );
        let event = |limit| LimitEvent { group: instance(), limit };
        assert_eq!(
            changes(&before, &after),
            [event(Limit::OutOfMemory { killed: 2 }), event(Limit::Throttled { periods: 4, usec: 50 })]
        );
    }

    #[test]
    fn a_group_that_is_new_or_made_anew_counts_from_nothing() {
        let hit = Usage { pids_limit_hits: 1, cpu_usec: 10, ..Usage::default() };
        let event = || [LimitEvent { group: instance(), limit: Limit::Pids { times: 1 } }];
        assert_eq!(changes(&Usages::new(), &one(instance(), hit)), event());
        let older = one(instance(), Usage { pids_limit_hits: 1, cpu_usec: 999, ..Usage::default() });
        assert_eq!(changes(&older, &one(instance(), hit)), event());
        assert_eq!(changes(&older, &Usages::new()), []);
    }

    #[test]
    fn a_kill_is_told_of_the_instance_and_the_quota_of_its_tenant() {
        let (tenant, pool) = (instance().tenant().clone(), "web".parse().unwrap());
        let hit = Usage { oom_kills: 2, memory_limit_hits: 1, ..Usage::default() };
        let after = Usages::from([
            (Group::Tenant(tenant.clone()), hit),
            (Group::Pool(tenant.clone(), pool), hit),
            (instance(), Usage { oom_kills: 2, ..Usage::default() }),
        ]);
        assert_eq!(
            changes(&Usages::new(), &after),
            [
                LimitEvent { group: Group::Tenant(tenant), limit: Limit::TenantMemory { times: 1 } },
                LimitEvent { group: instance(), limit: Limit::OutOfMemory { killed: 2 } },
            ]
        );
    }

    #[test]
    fn figures_are_read_from_the_groups_files_and_absent_ones_are_nothing() {
        let group = tempfile::tempdir().unwrap();
        assert_eq!(Usage::read(group.path()), Usage::default());
        let files = [
            ("memory.current", "4096\n"),
            ("pids.current", "3\n"),
            ("cpu.stat", "usage_usec 500\nuser_usec 1\nnr_periods 9\nnr_throttled 4\nthrottled_usec 77\n"),
            ("memory.events", "max 8\noom 7\noom_kill 2\n"),
            ("memory.events.local", "max 8\noom 1\noom_kill 0\n"),
            ("pids.events", "max 6\n"),
            ("cgroup.events", "populated 1\nfrozen 1\n"),
        ];
        for (name, text) in files {
            fs::write(group.path().join(name), text).unwrap();
        }
        let usage = Usage {
            memory_bytes: 4096,
            pids: 3,
            cpu_usec: 500,
            throttled_periods: 4,
            throttled_usec: 77,
            oom_kills: 2,
            memory_limit_hits: 1,
            pids_limit_hits: 6,
            populated: true,
            frozen: true,
            io: IoFound::Unlimited,
        };
        assert_eq!(Usage::read(group.path()), usage);
        fs::write(group.path().join("pids.events.local"), "max 5\n").unwrap();
        assert_eq!(Usage::read(group.path()), Usage { pids_limit_hits: 5, ..usage });
    }
}
