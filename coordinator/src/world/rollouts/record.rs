//! What the store has of a pool's revisions: `rollouts/<tenant>/<pool>`, written when a revision is declared, is rolled out
//! everywhere, or fails. What each node is given stands in its offers.

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
    pub(super) template: PoolTemplate,
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
    pub(super) fn first(
        digest: Digest,
        template: PoolTemplate,
        cause: &str,
        resumed: Option<&String>,
        now: Timestamp,
    ) -> Self {
        let first = RevisionRecord { number: 1, digest, created_at: now, cause: cut(cause), template };
        Self {
            revisions: vec![first],
            target: 1,
            settled: 1,
            failed: None,
            resumed: resumed.cloned(),
            insisted: false,
        }
    }

    /// This is declared now. `is_named` tells of each revision whether a node may have it.
    pub(super) fn declare(
        &mut self,
        digest: Digest,
        template: PoolTemplate,
        cause: &str,
        now: Timestamp,
        is_named: impl Fn(&Digest) -> bool,
    ) {
        let number = self.revisions.iter().map(|it| it.number).max().unwrap_or(0) + 1;
        let known = self.revisions.iter().position(|it| it.digest == digest);
        let created_at = known.map_or(now, |at| self.revisions.remove(at).created_at);
        let was_settled = !self.revisions.iter().any(|it| it.number == self.settled);
        self.revisions.push(RevisionRecord { number, digest, created_at, cause: cut(cause), template });
        (self.target, self.failed, self.insisted) = (number, None, false);
        if was_settled {
            self.settled = number;
        }
        let is_kept = |it: &RevisionRecord| it.number == self.settled || it.number == number;
        while self.revisions.len() > MAX_HISTORY {
            let is_full = self.revisions.len() > MAX_NAMED;
            let oldest =
                self.revisions.iter().position(|it| !is_kept(it) && (is_full || !is_named(&it.digest)));
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

    pub(super) fn digest(&self, number: u64) -> Option<Digest> {
        self.revisions.iter().find(|it| it.number == number).map(|it| it.digest)
    }

    pub(super) fn number(&self, digest: &Digest) -> Option<u64> {
        self.revisions.iter().find(|it| it.digest == *digest).map(|it| it.number)
    }

    pub(super) fn template(&self, digest: &Digest) -> Option<&PoolTemplate> {
        self.revisions.iter().find(|it| it.digest == *digest).map(|it| &it.template)
    }

    pub(super) fn history(&self) -> Vec<PoolRevision> {
        let told = |it: &RevisionRecord| PoolRevision {
            number: it.number,
            created_at: it.created_at.to_string(),
            cause: it.cause.clone(),
            template: it.template.clone(),
        };
        self.revisions.iter().map(told).collect()
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

    #[test]
    fn a_revision_that_is_declared_again_is_the_newest_with_its_first_time() {
        let mut record = RolloutRecord::first(digest(0), template(0), "first", None, at(0));
        record.declare(digest(1), template(1), "second", at(1), |_| false);
        record.fail("InstancesFailing", "why", false);
        record.declare(digest(0), template(0), "undo", at(2), |_| false);
        let told: Vec<_> = record.history().into_iter().map(|it| (it.number, it.cause)).collect();
        assert_eq!(told, [(2, "second".to_owned()), (3, "undo".to_owned())]);
        assert_eq!((record.target, record.settled, record.failed.as_ref()), (3, 3, None));
        assert_eq!(record.revisions[1].created_at, at(0));
    }

    #[test]
    fn the_history_is_bounded_and_keeps_what_nodes_have() {
        let mut record = RolloutRecord::first(digest(0), template(0), "", None, at(0));
        for number in 1..100 {
            record.declare(digest(number), template(number), "", at(0), |it| *it == digest(5));
        }
        assert_eq!(record.revisions.len(), MAX_HISTORY);
        let kept: Vec<_> = record.revisions.iter().map(|it| it.digest).collect();
        assert!(kept.contains(&digest(0)) && kept.contains(&digest(5)) && kept.contains(&digest(99)));
        for number in 100..200 {
            record.declare(digest(number), template(number), "", at(0), |_| true);
        }
        assert_eq!(record.revisions.len(), MAX_NAMED);
    }

    #[test]
    fn texts_are_cut_between_letters() {
        assert_eq!(cut(&"ü".repeat(400)).len(), MAX_TEXT);
        assert_eq!((cut("short"), cut("")), ("short".to_owned(), String::new()));
    }
}
