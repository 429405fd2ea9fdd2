//! Of which pools something else has no place than before: told once, for metrics and events.

use mvm_planner::fleet::{PoolKey, Unplaced};

use super::World;

impl World {
    /// The pools of which that changed since this was asked last, each with what has no place now.
    pub(crate) fn take_unplaced_news(&mut self) -> Vec<(PoolKey, Option<Unplaced>)> {
        let news = self.placer.take_unplaced_news();
        self.stale_pools.extend(news.iter().filter(|key| self.pools.contains_key(*key)).cloned());
        let told = news.into_iter().map(|key| {
            let unplaced = self.placer.unplaced(&key).cloned();
            (key, unplaced)
        });
        told.collect()
    }
}
