//! How much of a node's own words is kept: lists and texts are cut to what a node can honestly have, and the row of the
//! node says that they were.
//!
//! Agents cut what they send, coordinators what they receive: an agent may be old, or hostile. Pure.

use prost::Message as _;

use super::{Condition, ConditionKind, InstanceStatus, NodeInfo, NodeStatus, set_condition};
use crate::Timestamp;

/// Pools of one node. A document of the largest size names fewer.
pub const MAX_POOLS: usize = 4000;
/// Conditions, and other short lists of a node.
pub const MAX_CONDITIONS: usize = 64;
/// Deferred steps that a pool's status names.
pub const MAX_DEFERRED: usize = 16;
/// Bytes of a text for people.
pub const MAX_TEXT_BYTES: usize = 1024;
/// Bytes of a text for people of each pool, where not all has room.
const SHORT_TEXT_BYTES: usize = 32;
/// Bytes of an id, a digest, a version, a time.
pub const MAX_WORD_BYTES: usize = 256;
/// Bytes of a whole status: [`MAX_POOLS`] pools with the longest names fit, without deferred steps, what their instances
/// may use and how many are of the newest revision.
pub const MAX_STATUS_BYTES: usize = 1024 * 1024;

/// Cuts a status to what is kept of it.
pub fn fit_status(status: &mut NodeStatus, now: Timestamp) {
    let mut cuts = Cuts::default();
    let NodeStatus {
        node_id, observed_at, accepted, converged, conditions, pools, addresses, usage: _, ..
    } = status;
    cuts.words([node_id, observed_at, &mut status.next_reconcile_at, &mut status.last_reconcile_at]);
    cuts.words(accepted.iter_mut().chain(converged).map(|mark| &mut mark.digest));
    cuts.conditions(conditions);
    cuts.list("pools", pools, MAX_POOLS);
    for pool in pools.iter_mut() {
        cuts.words([&mut pool.tenant_id, &mut pool.pool_id, &mut pool.revision]);
        cuts.list("deferred steps of a pool", &mut pool.deferred, MAX_DEFERRED);
        cuts.texts(&mut pool.deferred);
        cuts.texts([&mut pool.failing]);
    }
    cuts.list("removed tenants", &mut status.removals, MAX_POOLS);
    cuts.words(status.removals.iter_mut().flat_map(|removal| [&mut removal.tenant_id, &mut removal.uid]));
    cuts.texts(status.removals.iter_mut().map(|removal| &mut removal.waits_for));
    // A tenant of which no addresses are told has whatever it may have.
    addresses.retain(|told| told.tenant_id.len() <= MAX_WORD_BYTES);
    cuts.list("tenants with addresses", addresses, MAX_POOLS);
    if status.encoded_len() > MAX_STATUS_BYTES && !status.addresses.is_empty() {
        status.addresses = Vec::new();
        cuts.note("which addresses instances have".to_owned());
    }
    if status.encoded_len() > MAX_STATUS_BYTES {
        for removal in status.removals.iter_mut().filter(|removal| !removal.waits_for.is_empty()) {
            removal.waits_for = String::new();
            cuts.note("why removed tenants are not gone yet".to_owned());
        }
        for pool in status.pools.iter_mut().filter(|pool| !pool.deferred.is_empty()) {
            pool.deferred = Vec::new();
            cuts.note("all deferred steps".to_owned());
        }
        for pool in &mut status.pools {
            if shorten(&mut pool.failing, SHORT_TEXT_BYTES) {
                cuts.note("why instances of pools fail".to_owned());
            }
        }
    }
    if status.encoded_len() > MAX_STATUS_BYTES {
        for pool in &mut status.pools {
            (pool.allocated, pool.requested, pool.current) = (None, None, None);
        }
        cuts.note("what the instances of pools may use, and how many are of the newest revision".to_owned());
    }
    let mut bytes = status.encoded_len();
    let all = status.pools.len();
    while bytes > MAX_STATUS_BYTES
        && let Some(pool) = status.pools.pop()
    {
        // The tag and the length that a pool has in the list take at least these two bytes more.
        bytes = bytes.saturating_sub(pool.encoded_len() + 2);
    }
    if status.pools.len() < all {
        status.pools.shrink_to_fit();
        cuts.note(format!("{} of {all} pools", all - status.pools.len()));
    }
    cuts.tell(ConditionKind::StatusComplete, &mut status.conditions, now);
}

/// Cuts a description to what is kept of it.
pub fn fit_info(info: &mut NodeInfo, now: Timestamp) {
    let mut cuts = Cuts::default();
    cuts.words([
        &mut info.node_id,
        &mut info.cluster,
        &mut info.version,
        &mut info.hostname,
        &mut info.kernel,
        &mut info.arch,
        &mut info.boot_id,
        &mut info.started_at,
        &mut info.driver,
        &mut info.accelerator,
        &mut info.source,
    ]);
    cuts.list("schema versions", &mut info.schema_versions, MAX_CONDITIONS);
    cuts.list("drivers that are not used", &mut info.passed_over, MAX_CONDITIONS);
    cuts.texts(info.passed_over.iter_mut().flat_map(|over| [&mut over.what, &mut over.reason]));
    cuts.list("capabilities", &mut info.capabilities, MAX_CONDITIONS);
    cuts.texts(info.capabilities.iter_mut().flat_map(|it| [&mut it.name, &mut it.lacking]));
    cuts.list("root certificates", &mut info.roots, MAX_CONDITIONS);
    cuts.words(&mut info.roots);
    cuts.list("features", &mut info.features, MAX_CONDITIONS);
    cuts.words(&mut info.features);
    cuts.conditions(&mut info.conditions);
    cuts.tell(ConditionKind::InfoComplete, &mut info.conditions, now);
}

/// Cuts an instance's texts; `true` when one was cut.
pub fn fit_instance(instance: &mut InstanceStatus) -> bool {
    let mut cuts = Cuts::default();
    cuts.texts([&mut instance.reason, &mut instance.persist_error]);
    cuts.words([
        &mut instance.instance_id,
        &mut instance.tenant_id,
        &mut instance.pool_id,
        &mut instance.phase,
        &mut instance.since,
        &mut instance.address,
        &mut instance.revision,
        &mut instance.last_used_at,
        &mut instance.override_until,
        &mut instance.session,
        &mut instance.persisted_at,
    ]);
    cuts.shortened > 0
}

/// Cuts a text at a character's beginning; `true` when it was longer.
pub fn shorten(text: &mut String, most: usize) -> bool {
    if text.len() <= most {
        return false;
    }
    text.truncate(text.floor_char_boundary(most));
    text.shrink_to_fit();
    true
}

/// What was cut off.
#[derive(Default)]
struct Cuts {
    lists: Vec<String>,
    shortened: usize,
}

impl Cuts {
    fn list<T>(&mut self, what: &str, list: &mut Vec<T>, most: usize) {
        let all = list.len();
        if all > most {
            list.truncate(most);
            self.note(format!("{} of {all} {what}", all - most));
        }
        list.shrink_to_fit();
    }

    /// The first few lists are told of: a pool that is cut like others tells nothing new.
    fn note(&mut self, what: String) {
        if self.lists.len() < 4 && !self.lists.contains(&what) {
            self.lists.push(what);
        }
    }

    fn words<'a>(&mut self, words: impl IntoIterator<Item = &'a mut String>) {
        self.shortened +=
            words.into_iter().filter_map(|word| shorten(word, MAX_WORD_BYTES).then_some(())).count();
    }

    fn texts<'a>(&mut self, texts: impl IntoIterator<Item = &'a mut String>) {
        self.shortened +=
            texts.into_iter().filter_map(|text| shorten(text, MAX_TEXT_BYTES).then_some(())).count();
    }

    fn conditions(&mut self, conditions: &mut Vec<Condition>) {
        self.list("conditions", conditions, MAX_CONDITIONS);
        for condition in conditions {
            self.texts([&mut condition.message]);
            self.words([
                &mut condition.r#type,
                &mut condition.status,
                &mut condition.reason,
                &mut condition.since,
            ]);
        }
    }

    fn tell(mut self, kind: ConditionKind, conditions: &mut Vec<Condition>, now: Timestamp) {
        if self.shortened > 0 {
            self.lists.push(format!("the end of {} texts", self.shortened));
        }
        if !self.lists.is_empty() {
            let message = format!("more than is kept of one node; left out: {}", self.lists.join(", "));
            set_condition(conditions, Condition::new(kind, false, "TooLarge", message, now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Digest;
    use crate::status::{Capability, Counts, Mark, PassedOver, PoolStatus, Usage};

    fn now() -> Timestamp {
        Timestamp::from_unix_ms(0)
    }

    fn told(conditions: &[Condition], kind: ConditionKind) -> Option<&str> {
        conditions.iter().find(|condition| condition.is(kind)).map(|condition| condition.message.as_str())
    }

    fn pool(at: usize) -> PoolStatus {
        PoolStatus {
            tenant_id: format!("{at:063}"),
            pool_id: format!("{at:063}"),
            desired: Some(Counts { running: 1000, warm: 1000, sleeping: 1000, down: 1 }),
            actual: Some(Counts { running: 1000, warm: 1000, sleeping: 1000, down: 1 }),
            stopped: 100,
            failed: 100,
            managed: true,
            revision: Digest::of(b"").to_string(),
            deferred: Vec::new(),
            allocated: None,
            requested: None,
            current: None,
            claimable: 1000,
            has_template: true,
            has_image: true,
            serving: 1000,
            outdated: 1000,
            surge: 1000,
            failing: String::new(),
            cpu_percent: Some(1000),
        }
    }

    #[test]
    fn what_pools_may_use_gives_way_before_a_pool_does() {
        let usage = Some(Usage { vcpus: 1000, mem_mib: 1 << 20, disk_mib: 1 << 20, ..Usage::default() });
        let used =
            |at| PoolStatus { allocated: usage, requested: usage, current: pool(at).actual, ..pool(at) };
        let mut status = NodeStatus { pools: (0..MAX_POOLS).map(used).collect(), ..NodeStatus::default() };
        fit_status(&mut status, now());
        assert_eq!(status.pools, (0..MAX_POOLS).map(pool).collect::<Vec<_>>());
        assert!(
            told(&status.conditions, ConditionKind::StatusComplete).unwrap().contains("instances of pools")
        );
        let mut few = NodeStatus { pools: (0..100).map(used).collect(), ..NodeStatus::default() };
        fit_status(&mut few, now());
        assert!(few.pools.iter().all(|pool| pool.allocated == usage));
    }

    #[test]
    fn a_node_with_as_many_pools_as_one_may_have_is_kept_whole() {
        let mut status = NodeStatus {
            pools: (0..MAX_POOLS).map(pool).collect(),
            accepted: Some(Mark::new(1, 1, Digest::of(b""))),
            conditions: vec![Condition::new(ConditionKind::Converged, true, "Converged", "", now())],
            ..NodeStatus::default()
        };
        let before = status.clone();
        fit_status(&mut status, now());
        assert_eq!(status, before);
    }

    #[test]
    fn lists_without_end_are_cut_and_the_row_says_so() {
        let mut status = NodeStatus { pools: vec![PoolStatus::default(); 100_000], ..NodeStatus::default() };
        fit_status(&mut status, now());
        assert_eq!((status.pools.len(), status.pools.capacity()), (MAX_POOLS, MAX_POOLS));
        let message = told(&status.conditions, ConditionKind::StatusComplete).unwrap();
        assert!(message.contains("96000 of 100000 pools"), "{message}");
    }

    #[test]
    fn whatever_a_status_holds_it_is_kept_within_its_bytes() {
        let long = || "é".repeat(MAX_TEXT_BYTES);
        let condition = Condition { r#type: long(), message: long(), reason: long(), ..Condition::default() };
        let large = PoolStatus { deferred: vec![long(); 100], tenant_id: long(), failing: long(), ..pool(1) };
        let mut status = NodeStatus {
            node_id: long(),
            pools: vec![large; 5000],
            conditions: vec![condition; 1000],
            ..NodeStatus::default()
        };
        fit_status(&mut status, now());
        // The condition that tells of it is on top.
        assert!(status.encoded_len() <= MAX_STATUS_BYTES + MAX_TEXT_BYTES, "{}", status.encoded_len());
        assert!(status.conditions.len() <= MAX_CONDITIONS + 1);
        assert!(told(&status.conditions, ConditionKind::StatusComplete).unwrap().contains("deferred"));
        assert!(status.pools.iter().all(|pool| (1..=SHORT_TEXT_BYTES).contains(&pool.failing.len())));
        let once = status.clone();
        fit_status(&mut status, now());
        assert_eq!(status.pools, once.pools, "what was cut once is not cut again");
    }

    #[test]
    fn descriptions_and_instances_are_cut_too() {
        let mut info = NodeInfo {
            passed_over: vec![PassedOver::default(); 1000],
            capabilities: vec![Capability::default(); 1000],
            schema_versions: vec![1; 1000],
            driver: "x".repeat(5000),
            ..NodeInfo::default()
        };
        fit_info(&mut info, now());
        assert_eq!((info.passed_over.len(), info.driver.len()), (MAX_CONDITIONS, MAX_WORD_BYTES));
        assert_eq!(info.capabilities.len(), MAX_CONDITIONS);
        assert!(told(&info.conditions, ConditionKind::InfoComplete).is_some());
        let mut instance = InstanceStatus { reason: "x".repeat(5000), ..InstanceStatus::default() };
        assert!(fit_instance(&mut instance) && instance.reason.len() == MAX_TEXT_BYTES);
        assert!(!fit_instance(&mut instance));
    }
}
