//! Which document is to be issued again next. In memory: rebuilt from the store at start.

use std::collections::{BTreeSet, HashMap};

use mvm_proto::{NodeId, Timestamp};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(crate) struct DueList {
    inner: Mutex<Inner>,
    /// Told whenever the first entry may have changed.
    pub(crate) changed: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    order: BTreeSet<(Timestamp, NodeId)>,
    of: HashMap<NodeId, Timestamp>,
}

impl DueList {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Puts `node` on the list, or moves it.
    pub(crate) fn set(&self, node: &NodeId, at: Timestamp) {
        let mut inner = self.lock();
        if let Some(before) = inner.of.insert(node.clone(), at) {
            inner.order.remove(&(before, node.clone()));
        }
        inner.order.insert((at, node.clone()));
        drop(inner);
        self.changed.notify_one();
    }

    /// When the next one is due.
    pub(crate) fn next(&self) -> Option<Timestamp> {
        self.lock().order.first().map(|(at, _)| *at)
    }

    /// Takes off up to `most` that are due at `now`.
    pub(crate) fn take(&self, now: Timestamp, most: usize) -> Vec<NodeId> {
        let mut inner = self.lock();
        let mut due = Vec::new();
        while due.len() < most && inner.order.first().is_some_and(|(at, _)| *at <= now) {
            if let Some((_, node)) = inner.order.pop_first() {
                inner.of.remove(&node);
                due.push(node);
            }
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_come_out_when_due_and_a_later_date_replaces_the_earlier() {
        let at = Timestamp::from_unix_ms;
        let node = |name: &str| -> NodeId { name.parse().unwrap() };
        let list = DueList::default();
        list.set(&node("a"), at(10));
        list.set(&node("b"), at(20));
        list.set(&node("a"), at(30));
        assert_eq!(list.next(), Some(at(20)));
        assert_eq!(list.take(at(25), 9), [node("b")]);
        assert_eq!(list.take(at(29), 9), []);
        assert_eq!(list.take(at(30), 9), [node("a")]);
        assert_eq!(list.next(), None);
    }
}
