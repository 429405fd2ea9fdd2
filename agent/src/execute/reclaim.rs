//! Returns a guest's unused memory to the host before it is paused, so that a warm instance costs only what it uses.

use std::time::Duration;

use mvm_proto::InstanceId;
use mvm_proto::text::chain;
use mvm_vmm::Driver;

use super::guest::Drain;
use super::{Executor, StepError};
use crate::instance::record::Record;

/// The file in which a guest's kernel reports its free memory.
const MEMORY: &str = "/proc/meminfo";
const MEMORY_BYTES: u64 = 4096;

/// What a guest keeps beyond what it uses, to go on with while it gets the rest again: this, or a share of all.
const SPARE_MIB: u64 = 8;
const SPARE_SHARE: u64 = 16;

/// Less is not worth what giving it back costs the guest.
const WORTH_MIB: u64 = 16;

/// A guest that takes longer is paused as it is.
const AT_MOST: Duration = Duration::from_secs(2);

/// For the questions before that: a guest or a host that answers them later is not waited for.
const ASKED_WITHIN: Duration = Duration::from_secs(1);

/// How much a guest of this size should keep; absent: so little would be gained that it keeps all. `costs`: what its VMM has
/// of the host's memory. What a fork never touched it shares with its template, and costs nothing.
fn keep_mib(size: u64, free: u64, costs: u64) -> Option<u64> {
    let used = size.saturating_sub(free);
    let keep = used + SPARE_MIB.max(size / SPARE_SHARE);
    let gained = size.saturating_sub(keep).min(costs.saturating_sub(used));
    (gained >= WORTH_MIB).then_some(keep)
}

/// `MemFree` of what a Linux kernel tells of its memory.
fn free_mib(text: &[u8]) -> Option<u64> {
    let text = String::from_utf8_lossy(text);
    let line = text.lines().find_map(|line| line.strip_prefix("MemFree:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / 1024)
}

impl Executor {
    /// Has a drained guest give back what it does not need. What keeps it from that keeps it from nothing else: it costs
    /// more, and is as warm. `unless_busy`: a guest that has work again goes on with all of its memory.
    pub(super) async fn reclaim(&self, record: &Record, unless_busy: bool) -> Result<Drain, StepError> {
        let id = &record.id;
        tokio::select! {
            biased;
            () = self.links.works_again(id), if unless_busy => {}
            given = tokio::time::timeout(AT_MOST + ASKED_WITHIN, self.give_back(record)) => {
                if given.is_err() {
                    tracing::warn!(%id, "did not report in time how much memory it can return");
                }
                return Ok(Drain::Over);
            }
        }
        self.events.publish(
            "InstanceBusy",
            record.full_name(),
            "got work while it returned memory; it keeps running",
        );
        self.links.take_back_sleep(id);
        self.driver.resume(id).await?;
        Ok(Drain::CalledOff)
    }

    async fn give_back(&self, record: &Record) {
        let id = &record.id;
        let Some((free, costs)) = self.figures(id).await else { return };
        let Some(keep) = keep_mib(record.resources.mem_mib, free, costs) else { return };
        let Ok(balloon) = self.driver.balloon() else { return };
        match balloon.reclaim(id, keep, AT_MOST).await {
            Ok(left) => tracing::debug!(%id, free, costs, keep, ?left, "asked for memory back"),
            Err(error) => {
                tracing::warn!(%id, error = %chain(&error), "could not reclaim a guest's memory");
            }
        }
    }

    async fn figures(&self, id: &InstanceId) -> Option<(u64, u64)> {
        let said = self.links.read_piece(id, MEMORY, 0, MEMORY_BYTES).await.ok()?;
        let found = self.isolation.memory_use(vec![id.clone()]).await.ok()?;
        Some((free_mib(&said)?, found.first()?.bytes >> 20))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_and_costs_something_is_given_back_but_for_a_spare() {
        // It wrote 48 MiB and removed them again.
        assert_eq!(keep_mib(128, 60, 105), Some(68 + 8));
        // A fresh fork: most of what is free was never its own.
        assert_eq!(keep_mib(128, 60, 46), None);
        // It uses what it has.
        assert_eq!(keep_mib(128, 20, 140), None);
        // A large one keeps a larger spare.
        assert_eq!(keep_mib(4096, 3000, 2000), Some(1096 + 256));
        assert_eq!(keep_mib(128, 500, 0), None);
    }

    #[test]
    fn a_kernels_word_on_its_memory_is_read() {
        let told = b"MemTotal:         103124 kB\nMemFree:           61440 kB\nMemAvailable:      1 kB\n";
        assert_eq!(free_mib(told), Some(60));
        assert_eq!(free_mib(b"MemFree: much"), None);
        assert_eq!(free_mib(b""), None);
    }
}
