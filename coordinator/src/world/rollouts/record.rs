//! What the store has of a pool's revisions: `rollouts/<tenant>/<pool>`, written when a revision is declared, is rolled out
//! everywhere, or fails. What each node is given stands in its offers.

use std::collections::BTreeSet;

use mvm_planner::fleet::rollout::Named;
use mvm_proto::object::{PoolRevision, PoolTemplate};
use mvm_proto::{Digest, Timestamp};
use serde::{Deserialize, Serialize};

/// Revisions that are kept for `mvm rollout undo`.
pub(crate) const MAX_HISTORY: usize = 10;
/// Revisions that are kept although they are older, because documents of nodes name them. Beyond that a node is given the
/// goal at once.
const MAX_NAMED: usize = 32;
/// Bytes of a cause or of a failure's message.
const MAX_TEXT: usize = 512;

/// A pool's revisions, oldest first, and how far the newest is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RolloutRecord {
    pub(super) revisions: Vec<RevisionRecord>,
    /// The number of the one that is declared.
    pub(super) target: u64,
    /// Of the last one that was rolled out everywhere; of the first one at first.
    pub(super) settled: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) failed: Option<Failed>,
    /// The annotation that went on with a rollout last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) resumed: Option<String>,
    /// A user went on with this revision although its instances failed: only a deadline stops it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) insisted: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RevisionRecord {
    pub(super) number: u64,
    /// As nodes name it.
    pub(super) digest: Digest,
    pub(super) created_at: Timestamp,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) cause: String,
    /// The bundle of its secrets; none: it has none, or one of them was never there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) secrets: Option<Digest>,
    /// That is all that it differs in from the one before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) values_changed: bool,
    pub(super) template: PoolTemplate,
}

/// What is declared, as far as it makes a revision.
#[derive(Debug, Clone)]
pub(super) struct Declared {
    pub(super) digest: Digest,
    pub(super) secrets: Option<Digest>,
    pub(super) template: PoolTemplate,
}

/// What there is new in what is declared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum News {
    None,
    Revision,
    /// Its secrets have other values.
    Values,
}

/// Why the declared revision is not rolled out any further.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failed {
    pub(super) reason: String,
    pub(super) message: String,
    /// It goes back to the settled one.
    pub(super) rolls_back: bool,
}

impl RolloutRecord {
    /// Of a pool that nothing is known of: what is declared is what nodes have, or are given.
    pub(super) fn first(declared: Declared, cause: &str, resumed: Option<&String>, now: Timestamp) -> Self {
        let first = RevisionRecord::of(declared, 1, cause, now);
        Self {
            revisions: vec![first],
            target: 1,
            settled: 1,
            failed: None,
            resumed: resumed.cloned(),
            insisted: false,
        }
    }

    /// What is declared now next to the newest revision.
    pub(super) fn news_of(&self, declared: &Declared) -> News {
        match self.revision(self.target) {
            Some(it)
                if (it.digest, &it.template.secrets) != (declared.digest, &declared.template.secrets) =>
            {
                News::Revision
            }
            // As long as it can't be had nothing is said of it.
            Some(it) if declared.secrets.is_some() && it.secrets != declared.secrets => News::Values,
            Some(_) => News::None,
            None => News::Revision,
        }
    }

    /// This is declared now. `is_named` tells of each revision whether a node may have it.
    pub(super) fn declare(
        &mut self,
        declared: Declared,
        cause: &str,
        now: Timestamp,
        is_named: impl Fn(&Digest) -> bool,
    ) {
        let number = self.next_number();
        // One with other values is no way back to.
        let is_same = |it: &RevisionRecord| (it.digest, it.secrets) == (declared.digest, declared.secrets);
        let known = self.revisions.iter().position(is_same);
        let created_at = known.map_or(now, |at| self.revisions.remove(at).created_at);
        let was_settled = !self.revisions.iter().any(|it| it.number == self.settled);
        self.revisions.push(RevisionRecord::of(declared, number, cause, created_at));
        (self.target, self.failed, self.insisted) = (number, None, false);
        if was_settled {
            self.settled = number;
        }
        self.forget_oldest(is_named);
    }

    /// The secrets of what is declared have other values now. They go to what nodes are being brought to: where that is the
    /// revision that a failed one went back to, they don't begin the failed one again.
    pub(super) fn rotate(
        &mut self,
        secrets: Digest,
        cause: &str,
        now: Timestamp,
        is_named: impl Fn(&Digest) -> bool,
    ) {
        let (number, rolls_back) = (self.next_number(), self.is_rolling_back());
        let goal = self.goal();
        let mut is_first = false;
        if let Some(target) = self.revisions.iter_mut().find(|it| it.number == self.target) {
            is_first = target.secrets.is_none();
            if is_first || rolls_back {
                target.secrets = Some(secrets);
            }
        }
        // It waited for them.
        if is_first {
            return;
        }
        let Some(goal) = self.revision(goal).cloned() else { return };
        let next = RevisionRecord {
            number,
            created_at: now,
            cause: cut(cause),
            secrets: Some(secrets),
            values_changed: true,
            ..goal
        };
        self.revisions.push(next);
        if rolls_back {
            self.settled = number;
        } else {
            (self.target, self.failed, self.insisted) = (number, None, false);
        }
        self.forget_oldest(is_named);
    }

    fn next_number(&self) -> u64 {
        self.revisions.iter().map(|it| it.number).max().unwrap_or(0) + 1
    }

    /// Whether there is a revision to go back to: values of before are not kept.
    pub(super) fn can_go_back(&self) -> bool {
        self.digest(self.settled) != self.digest(self.target)
    }

    fn forget_oldest(&mut self, is_named: impl Fn(&Digest) -> bool) {
        let (settled, target) = (self.settled, self.target);
        let is_kept = |it: &RevisionRecord| it.number == settled || it.number == target;
        while self.revisions.len() > MAX_HISTORY {
            let is_full = self.revisions.len() > MAX_NAMED;
            let is_newest = |it: &RevisionRecord| self.number(&it.digest) == Some(it.number);
            let is_in_use = |it: &RevisionRecord| is_newest(it) && is_named(&it.digest);
            let oldest = self.revisions.iter().position(|it| !is_kept(it) && (is_full || !is_in_use(it)));
            let Some(oldest) = oldest else { break };
            self.revisions.remove(oldest);
        }
    }

    pub(super) fn fail(&mut self, reason: &str, message: &str, rolls_back: bool) {
        self.failed = Some(Failed { reason: reason.to_owned(), message: cut(message), rolls_back });
    }

    pub(super) fn is_rolling_back(&self) -> bool {
        self.failed.as_ref().is_some_and(|failed| failed.rolls_back)
    }

    /// The number of the revision that nodes are brought to.
    pub(super) fn goal(&self) -> u64 {
        if self.is_rolling_back() { self.settled } else { self.target }
    }

    /// Whether what a document is to name is more than what is declared: where nothing is noted a document says what the spec does.
    pub(super) fn is_noted(&self, named: &Named) -> bool {
        let is_all = |number| self.digest(number) == Some(named.revision);
        named.grant.is_some() || !is_all(self.target) || !is_all(self.goal())
    }

    pub(super) fn revision(&self, number: u64) -> Option<&RevisionRecord> {
        self.revisions.iter().find(|it| it.number == number)
    }

    pub(super) fn digest(&self, number: u64) -> Option<Digest> {
        self.revision(number).map(|it| it.digest)
    }

    /// The newest one of a digest: those before differ from it in their secrets alone, whose values of before are not kept.
    fn newest(&self, digest: &Digest) -> Option<&RevisionRecord> {
        self.revisions.iter().rfind(|it| it.digest == *digest)
    }

    pub(super) fn number(&self, digest: &Digest) -> Option<u64> {
        self.newest(digest).map(|it| it.number)
    }

    pub(super) fn template(&self, digest: &Digest) -> Option<&PoolTemplate> {
        self.newest(digest).map(|it| &it.template)
    }

    /// The Secrets that revisions name.
    pub(super) fn secrets(&self) -> impl Iterator<Item = &BTreeSet<String>> {
        self.revisions.iter().map(|it| &it.template.secrets).filter(|names| !names.is_empty())
    }

    /// Of revisions that have secrets.
    pub(super) fn digests_with_secrets(&self) -> BTreeSet<Digest> {
        self.revisions.iter().filter(|it| !it.template.secrets.is_empty()).map(|it| it.digest).collect()
    }

    pub(super) fn history(&self) -> Vec<PoolRevision> {
        let told = |it: &RevisionRecord| PoolRevision {
            number: it.number,
            created_at: it.created_at.to_string(),
            cause: it.cause.clone(),
            values_changed: it.values_changed,
            template: it.template.clone(),
        };
        self.revisions.iter().map(told).collect()
    }
}

impl RevisionRecord {
    fn of(declared: Declared, number: u64, cause: &str, created_at: Timestamp) -> Self {
        let Declared { digest, secrets, template } = declared;
        Self { number, digest, created_at, cause: cut(cause), secrets, values_changed: false, template }
    }
}

/// What users and nodes say, as much of it as is kept.
fn cut(text: &str) -> String {
    let end =
        text.char_indices().map(|(at, one)| at + one.len_utf8()).take_while(|end| *end <= MAX_TEXT).last();
    text[..end.unwrap_or(0)].to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn template(number: u64) -> PoolTemplate {
        let json = json!({ "image": { "ref": format!("builtin:{number}") }, "profile": "default",
            "resources": { "vcpus": 1, "mem_mib": 64 } });
        serde_json::from_value(json).unwrap()
    }

    fn digest(number: u64) -> Digest {
        Digest::of(&number.to_be_bytes())
    }

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_unix_ms(ms)
    }

    fn declared(number: u64) -> Declared {
        Declared { digest: digest(number), secrets: None, template: template(number) }
    }

    fn with_secrets(number: u64, values: &[u8]) -> Declared {
        let mut declared = declared(number);
        declared.template.secrets.insert("db".to_owned());
        Declared { secrets: Some(Digest::of(values)), ..declared }
    }

    fn numbers(record: &RolloutRecord) -> Vec<(u64, Digest, bool)> {
        record.revisions.iter().map(|it| (it.number, it.digest, it.values_changed)).collect()
    }

    #[test]
    fn a_revision_that_is_declared_again_is_the_newest_with_its_first_time() {
        let mut record = RolloutRecord::first(declared(0), "first", None, at(0));
        record.declare(declared(1), "second", at(1), |_| false);
        record.fail("InstancesFailing", "why", false);
        record.declare(declared(0), "undo", at(2), |_| false);
        let told: Vec<_> = record.history().into_iter().map(|it| (it.number, it.cause)).collect();
        assert_eq!(told, [(2, "second".to_owned()), (3, "undo".to_owned())]);
        assert_eq!((record.target, record.settled, record.failed.as_ref()), (3, 3, None));
        assert_eq!(record.revisions[1].created_at, at(0));
    }

    #[test]
    fn other_values_are_a_revision_that_can_t_be_gone_back_from() {
        let mut record = RolloutRecord::first(with_secrets(0, b"1"), "", None, at(0));
        assert_eq!(record.news_of(&with_secrets(0, b"1")), News::None);
        assert_eq!(record.news_of(&Declared { secrets: None, ..with_secrets(0, b"1") }), News::None);
        assert_eq!(record.news_of(&declared(0)), News::Revision, "another name is more than a value");
        assert_eq!(record.news_of(&with_secrets(0, b"2")), News::Values);
        record.rotate(Digest::of(b"2"), "secret db changed", at(1), |_| false);
        assert_eq!(numbers(&record), [(1, digest(0), false), (2, digest(0), true)]);
        assert_eq!((record.target, record.settled, record.can_go_back()), (2, 1, false));
        assert_eq!(record.news_of(&with_secrets(0, b"2")), News::None);
        assert_eq!((record.number(&digest(0)), record.history()[1].values_changed), (Some(2), true));
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<RolloutRecord>(&text).unwrap(), record);
    }

    #[test]
    fn values_that_were_waited_for_are_of_the_same_revision() {
        let waits = Declared { secrets: None, ..with_secrets(0, b"") };
        let mut record = RolloutRecord::first(waits, "", None, at(0));
        record.rotate(Digest::of(b"1"), "", at(1), |_| false);
        assert_eq!(numbers(&record), [(1, digest(0), false)]);
        assert_eq!(record.news_of(&with_secrets(0, b"1")), News::None);
    }

    #[test]
    fn other_values_of_a_pool_that_went_back_don_t_begin_again_with_what_failed() {
        let mut record = RolloutRecord::first(with_secrets(0, b"1"), "", None, at(0));
        record.declare(with_secrets(1, b"1"), "", at(1), |_| false);
        record.fail("InstancesFailing", "why", true);
        record.rotate(Digest::of(b"2"), "", at(2), |_| false);
        assert_eq!((record.target, record.settled, record.digest(record.goal())), (2, 3, Some(digest(0))));
        assert!(record.is_rolling_back() && record.can_go_back());
        assert_eq!(record.news_of(&with_secrets(1, b"2")), News::None);
        // What stands still because it failed is begun again: the values may be what it lacked.
        record.fail("InstancesFailing", "why", false);
        record.rotate(Digest::of(b"3"), "", at(3), |_| false);
        assert_eq!((record.target, record.failed.as_ref()), (4, None));
        assert_eq!(record.digest(4), Some(digest(1)));
    }

    #[test]
    fn the_history_is_bounded_and_keeps_what_nodes_have() {
        let mut record = RolloutRecord::first(declared(0), "", None, at(0));
        for number in 1..100 {
            record.declare(declared(number), "", at(0), |it| *it == digest(5));
        }
        assert_eq!(record.revisions.len(), MAX_HISTORY);
        let kept: Vec<_> = record.revisions.iter().map(|it| it.digest).collect();
        assert!(kept.contains(&digest(0)) && kept.contains(&digest(5)) && kept.contains(&digest(99)));
        for number in 100..200 {
            record.declare(declared(number), "", at(0), |_| true);
        }
        assert_eq!(record.revisions.len(), MAX_NAMED);
        let mut record = RolloutRecord::first(with_secrets(0, b"first"), "", None, at(0));
        for values in 0..100u8 {
            record.rotate(Digest::of(&[values]), "", at(0), |_| false);
        }
        assert_eq!(record.revisions.len(), MAX_HISTORY);
    }

    #[test]
    fn texts_are_cut_between_letters() {
        assert_eq!(cut(&"ü".repeat(400)).len(), MAX_TEXT);
        assert_eq!((cut("short"), cut("")), ("short".to_owned(), String::new()));
    }
}
