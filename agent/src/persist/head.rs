//! Heads: the lease on a session. They say which sessions a pool has, who holds each, and which one a new instance takes.
//!
//! The newest head of a session is its state. Heads are numbered, and a store accepts each number once. The writer of the next
//! number holds the session; a holder that was away finds its number taken, and so learns that it lost the session.

use std::time::Duration;

use mvm_proto::{Digest, InstanceId, NodeId, Timestamp};
use serde::{Deserialize, Serialize};

/// The only form of heads so far.
pub(crate) const VERSION: u32 = 1;

/// A session whose holder has not been heard of for this many of its own intervals, and some more, is free.
const MISSED_INTERVALS: u32 = 3;
const MISSED_MORE: Duration = Duration::from_secs(30);

/// No pool has more instances than this many sessions.
const MAX_SLOTS: u32 = 100_000;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Head {
    pub(crate) version: u32,
    pub(crate) number: u64,
    /// Absent: given back, and free for the next that starts.
    pub(crate) holder: Option<Holder>,
    /// What the session is made of; absent: nothing was kept yet.
    pub(crate) index: Option<Digest>,
    /// When that was so.
    pub(crate) taken_at: Option<Timestamp>,
    /// How often the holder says that it is there.
    pub(crate) every_seconds: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Holder {
    pub(crate) node: NodeId,
    pub(crate) instance: InstanceId,
}

/// A session's newest head, and when the store took it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) slot: u32,
    pub(crate) head: Head,
    pub(crate) written_at: Timestamp,
}

/// What a session is at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SessionState {
    /// Nothing was copied, or it was deleted. Its head stays: its number refuses a holder of before.
    Empty,
    Free,
    /// It has a holder whose lease has expired.
    Abandoned,
    InUse,
}

impl SessionState {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Free => "free",
            Self::Abandoned => "abandoned",
            Self::InUse => "in_use",
        }
    }
}

impl Found {
    pub(crate) fn state(&self, now: Timestamp) -> SessionState {
        match (&self.head.holder, self.head.index) {
            (Some(_), _) if !self.is_free(now) => SessionState::InUse,
            (Some(_), _) => SessionState::Abandoned,
            (None, Some(_)) => SessionState::Free,
            (None, None) => SessionState::Empty,
        }
    }

    /// Whether it has no holder, or one whose lease has expired.
    fn is_free(&self, now: Timestamp) -> bool {
        let every = Duration::from_secs(self.head.every_seconds);
        self.head.holder.is_none()
            || now.since(self.written_at) > every.saturating_mul(MISSED_INTERVALS) + MISSED_MORE
    }
}

/// What an instance has of its own when it asks for a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FolderContent {
    /// It starts for the first time: whatever session it gets becomes its content.
    Nothing,
    /// It has content already, which must not be mixed with another's.
    Content,
}

/// Which session to take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Choice {
    /// This one, which has a past.
    Take(Found),
    /// One that had no holder.
    New { slot: u32 },
    /// There are too many.
    None,
}

/// The session for `me` among those of its pool. The one that it holds already, after a crash between taking it and
/// noting that; else the first that is free, so that the oldest sessions live on; else a new one. `now` is the time of the
/// store, as [`Found::written_at`] is: a node's own clock decides nothing.
pub(crate) fn choose(found: &[Found], me: &Holder, content: FolderContent, now: Timestamp) -> Choice {
    let mine = |found: &&Found| found.head.holder.as_ref() == Some(me);
    if let Some(mine) = found.iter().find(mine) {
        return Choice::Take(mine.clone());
    }
    let free = found.iter().filter(|found| found.is_free(now)).min_by_key(|found| found.slot);
    if let (Some(free), FolderContent::Nothing) = (free, content) {
        return Choice::Take(free.clone());
    }
    let taken = |slot: &u32| found.iter().any(|found| found.slot == *slot);
    (0..MAX_SLOTS).find(|slot| !taken(slot)).map_or(Choice::None, |slot| Choice::New { slot })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(node: &str, bits: u32) -> Holder {
        Holder { node: node.parse().unwrap(), instance: InstanceId::from_bits(bits) }
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_ms(1_000_000_000 + seconds * 1000)
    }

    fn found(slot: u32, holder: Option<Holder>) -> Found {
        let head = Head {
            version: VERSION,
            number: 7,
            holder,
            index: Some(Digest::of(b"index")),
            taken_at: Some(at(0)),
            every_seconds: 10,
        };
        Found { slot, head, written_at: at(0) }
    }

    #[test]
    fn a_first_start_takes_its_own_then_the_first_free_then_a_new_session() {
        let (me, other) = (holder("node-b", 1), holder("node-a", 2));
        let held = found(0, Some(other));
        let take = |all: &[Found], content| choose(all, &me, content, at(5));
        assert_eq!(take(&[], FolderContent::Nothing), Choice::New { slot: 0 });
        assert_eq!(take(std::slice::from_ref(&held), FolderContent::Nothing), Choice::New { slot: 1 });
        let all = [held.clone(), found(2, None), found(1, None)];
        assert_eq!(take(&all, FolderContent::Nothing), Choice::Take(found(1, None)));
        let mine = found(3, Some(me.clone()));
        let all = [held.clone(), found(1, None), mine.clone()];
        assert_eq!(take(&all, FolderContent::Content), Choice::Take(mine));
        assert_eq!(take(&[held, found(1, None)], FolderContent::Content), Choice::New { slot: 2 });
    }

    #[test]
    fn a_session_is_free_only_when_its_holder_was_silent_for_long() {
        let me = holder("node-b", 1);
        let all = [found(0, Some(holder("node-a", 2)))];
        assert_eq!(choose(&all, &me, FolderContent::Nothing, at(60)), Choice::New { slot: 1 });
        assert_eq!(choose(&all, &me, FolderContent::Nothing, at(61)), Choice::Take(all[0].clone()));
        // The same instance number on another node is another instance.
        let same = [found(0, Some(holder("node-a", 1)))];
        assert_eq!(choose(&same, &me, FolderContent::Nothing, at(5)), Choice::New { slot: 1 });
    }
}
