//! How many instances pools run that say `scale`: what is measured of them, and what was decided of it. The decisions are
//! [`mvm_planner::fleet::scale`]'s; the store has the last count, so that a new process goes on from it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mvm_planner::fleet::PoolKey;
use mvm_planner::fleet::scale::{Load, ScalePolicy, ScaleReason, Scaled, scale};
use mvm_proto::Timestamp;
use mvm_proto::object::{PoolScaleStatus, PoolSpec, ScaleMetric};

use super::{PoolEntry, World, demand};

/// How often it is decided: each time a pool may grow twofold.
pub(crate) const SCALE_EVERY: Duration = Duration::from_secs(5);

/// The pools that are scaled.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scales {
    pools: BTreeMap<PoolKey, Scale>,
    /// What the store had when this process started, of pools that are not declared yet.
    stored: BTreeMap<PoolKey, u32>,
    /// Pools of which the store has another count, or one too many.
    unsaved: BTreeSet<PoolKey>,
    scaled_at: Option<Timestamp>,
}

#[derive(Debug, Clone)]
struct Scale {
    scaled: Scaled,
    /// The last measurement that a caller sent.
    told: Option<Load>,
    /// What it was decided from last.
    load: Option<Load>,
    reason: ScaleReason,
}

impl Scales {
    /// What the store has.
    pub(crate) fn restore(&mut self, stored: BTreeMap<PoolKey, u32>) {
        self.stored = stored;
    }

    /// The counts that the store has to be told; none: it is to forget.
    pub(crate) fn take_unsaved(&mut self) -> Vec<(PoolKey, Option<u32>)> {
        let unsaved = std::mem::take(&mut self.unsaved).into_iter();
        unsaved.map(|key| (key.clone(), self.pools.get(&key).map(|scale| scale.scaled.running))).collect()
    }

    /// The store may not have them.
    pub(crate) fn put_back(&mut self, unsaved: &[(PoolKey, Option<u32>)]) {
        self.unsaved.extend(unsaved.iter().map(|(key, _)| key.clone()));
    }

    /// All pools are declared: what the store has of others is to go.
    pub(super) fn forget_undeclared(&mut self) {
        self.unsaved.extend(std::mem::take(&mut self.stored).into_keys());
    }

    /// Whether there is anything to decide from time to time.
    pub(crate) fn is_empty(&self) -> bool {
        self.pools.is_empty()
    }

    /// A pool is there no more, or its count is its spec's again.
    pub(super) fn forget(&mut self, key: &PoolKey) {
        let was_stored = self.stored.remove(key).is_some();
        if self.pools.remove(key).is_some() || was_stored {
            self.unsaved.insert(key.clone());
        }
    }

    pub(crate) fn status(&self, key: &PoolKey) -> Option<PoolScaleStatus> {
        let scale = self.pools.get(key)?;
        #[allow(clippy::cast_precision_loss, reason = "a load is a measurement")]
        let units = |load: Load| load.milli as f64 / 1000.0;
        Some(PoolScaleStatus {
            running: scale.scaled.running,
            load: scale.load.map(units),
            measured_at: scale.load.map(|load| load.at),
            reason: scale.reason.as_str().to_owned(),
        })
    }
}

impl World {
    /// The pool's spec with the running count that was decided, where that is decided here.
    pub(super) fn with_scale(&mut self, key: &PoolKey, mut spec: PoolSpec) -> PoolSpec {
        let started_at = self.started_at;
        let Some(wanted) = spec.scale else {
            self.scales.forget(key);
            return spec;
        };
        let stored = self.scales.stored.remove(key);
        let scale = self.scales.pools.entry(key.clone()).or_insert_with(|| Scale {
            // What was wanted lately is not stored, so nothing shrinks before that would be known again.
            scaled: stored
                .map_or_else(|| Scaled::starting(wanted.min), |running| Scaled::resumed(running, started_at)),
            told: None,
            load: None,
            reason: ScaleReason::NoMeasurement,
        });
        let running = scale.scaled.running.clamp(wanted.min, wanted.max);
        if scale.scaled.running != running {
            scale.scaled.running = running;
            self.scales.unsaved.insert(key.clone());
        }
        spec.counts.running = running;
        spec
    }

    /// What a caller measured of a pool's load; whether the pool takes that.
    pub(crate) fn measured(&mut self, key: &PoolKey, load: Load) -> bool {
        let takes = self
            .pools
            .get(key)
            .and_then(|pool| pool.spec.scale)
            .is_some_and(|wanted| wanted.metric.is_told());
        match self.scales.pools.get_mut(key) {
            Some(scale) if takes => {
                scale.told = Some(load);
                true
            }
            _ => false,
        }
    }

    /// Decides anew how many instances run of pools that are scaled. Not more often than [`SCALE_EVERY`].
    pub(crate) fn scale(&mut self, now: Timestamp) {
        if self.scales.is_empty() || self.scales.scaled_at.is_some_and(|at| now.since(at) < SCALE_EVERY) {
            return;
        }
        self.scales.scaled_at = Some(now);
        let mut changed = Vec::new();
        let keys: Vec<PoolKey> = self.scales.pools.keys().cloned().collect();
        for key in keys {
            let Some(entry) = self.pools.get(&key) else { continue };
            let Some(wanted) = entry.spec.scale else { continue };
            if entry.object.metadata.deleting_since.is_some() {
                continue;
            }
            let used = match wanted.metric {
                ScaleMetric::Cpu => self.used_processors(&key, now),
                ScaleMetric::QueueDepth | ScaleMetric::Requests => None,
            };
            let target_milli = u64::from(wanted.target) * 1000;
            let policy = ScalePolicy { min: wanted.min, max: wanted.max, target_milli };
            let Some(one) = self.scales.pools.get_mut(&key) else { continue };
            let load = if wanted.metric.is_told() { one.told } else { used };
            let (next, reason) = scale(&policy, &one.scaled, load, now);
            if (one.reason, one.load) != (reason, load) {
                self.stale_pools.insert(key.clone());
            }
            let is_other = next.running != one.scaled.running;
            (one.scaled, one.reason, one.load) = (next, reason, load);
            if is_other {
                changed.push((key, one.scaled.running));
            }
        }
        for (key, running) in changed {
            let Some(PoolEntry { spec, .. }) = self.pools.get_mut(&key) else { continue };
            spec.counts.running = running;
            let demanded = demand(spec);
            self.placer.set_pool(&key, Some(demanded));
            self.repool(&key);
            self.scales.unsaved.insert(key);
        }
    }

    /// How many processors a pool's instances use, in thousandths of a percent of one instance's; none where a node that
    /// runs some does not tell. A node is believed no more than the instances that it is to run can use.
    fn used_processors(&self, key: &PoolKey, now: Timestamp) -> Option<Load> {
        let mut milli = 0u64;
        for (node, news) in self.news_of(key).filter(|(_, news)| news.actual.running > 0) {
            let placed = self.stored.get(key).and_then(|placed| placed.get(node)).map_or(0, |to| to.running);
            let most = u64::from(placed.saturating_mul(100));
            milli = milli.saturating_add(u64::from(news.cpu_percent?).min(most) * 1000);
        }
        Some(Load { milli, at: now })
    }
}
