//! The transactions of one settling: placements first, then documents, as few transactions as the store takes. Each is good by
//! itself: a crash between two leaves placements whose documents the next start issues.

use mvm_proto::{DesiredState, NodeId, Problem};
use mvm_store::{Guard, MAX_CHANGES, Store, StoreError, Transaction};

use crate::documents::{Signed, Stored};
use crate::records::EPOCH_KEY;
use crate::refuse;
use crate::state::State;
use crate::stored::StateError;

/// Bytes of one such transaction: what etcd takes, with room for its keys. One document may be larger.
const MAX_BATCH_BYTES: usize = 1024 * 1024;
/// One is the epoch's.
const MAX_GUARDS: usize = MAX_CHANGES - 1;

/// A record to write, or to delete.
pub(super) type Change = (String, Option<Vec<u8>>);

/// A signed document, what it says, and what is stored with it.
#[derive(Debug)]
pub(super) struct Issue {
    pub(super) node: NodeId,
    pub(super) desired: DesiredState,
    pub(super) signed: Signed,
    pub(super) beside: Vec<Change>,
}

impl Issue {
    fn bytes(&self) -> usize {
        let beside = self.beside.iter().map(bytes_of);
        self.signed.stored.envelope.len() + beside.sum::<usize>()
    }

    fn changes(&self) -> usize {
        Signed::CHANGES + self.beside.len()
    }
}

/// What goes into one transaction.
#[derive(Debug, Default)]
pub(super) struct Batch {
    placements: Vec<Change>,
    issues: Vec<Issue>,
    changes: usize,
    bytes: usize,
}

/// What became of a batch.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) stored: Vec<(NodeId, DesiredState, Stored)>,
    /// Something of these nodes changed meanwhile: their documents have to be made anew.
    pub(super) lost: Vec<NodeId>,
}

impl Batch {
    pub(super) fn is_empty(&self) -> bool {
        self.placements.is_empty() && self.issues.is_empty()
    }

    /// Whether there is room for a placement. There always is in an empty batch.
    pub(super) fn takes_placement(&self, change: &Change) -> bool {
        self.is_empty() || self.has_room(1, bytes_of(change))
    }

    pub(super) fn add_placement(&mut self, change: Change) {
        (self.changes, self.bytes) = (self.changes + 1, self.bytes + bytes_of(&change));
        self.placements.push(change);
    }

    /// Whether there is room for a document. There always is in an empty batch.
    pub(super) fn takes_issue(&self, issue: &Issue) -> bool {
        let guards = (self.issues.len() + 1) * Signed::GUARDS;
        self.is_empty() || (guards <= MAX_GUARDS && self.has_room(issue.changes(), issue.bytes()))
    }

    pub(super) fn add_issue(&mut self, issue: Issue) {
        // What goes with the document is newer, and no key is written twice.
        let is_older = |(key, _): &Change| issue.beside.iter().any(|(newer, _)| newer == key);
        self.placements.retain(|change| !is_older(change));
        (self.changes, self.bytes) = (self.changes + issue.changes(), self.bytes + issue.bytes());
        self.issues.push(issue);
    }

    fn has_room(&self, changes: usize, bytes: usize) -> bool {
        self.changes + changes <= MAX_CHANGES && self.bytes + bytes <= MAX_BATCH_BYTES
    }

    /// Only the process that took the newest epoch places.
    fn transaction(&self, epoch_version: u64) -> Transaction {
        let txn = Transaction::new().guard(EPOCH_KEY, Guard::Version(epoch_version));
        let txn = self.placements.iter().fold(txn, change);
        self.issues.iter().fold(txn, |txn, issue| {
            let txn = issue.signed.add_to(txn);
            issue.beside.iter().fold(txn, change)
        })
    }

    /// Stores all of it. A node that changed meanwhile is left out, and does not keep the others from theirs.
    pub(super) async fn commit(mut self, state: &State) -> Result<Outcome, Problem> {
        let mut lost = Vec::new();
        while !self.is_empty() {
            match state.store.commit(self.transaction(state.epoch_version)).await {
                Ok(_) => break,
                Err(StoreError::Conflict { key }) => {
                    let at = self.issues.iter().position(|issue| issue.signed.is_guarded_by(&key));
                    let Some(at) = at else { return Err(refuse::not_leading()) };
                    lost.push(self.issues.remove(at).node);
                }
                Err(error) => return Err(StateError::from(error).into()),
            }
        }
        let stored = self.issues.into_iter().map(|issue| {
            let stored = state.documents.committed(&issue.node, issue.signed);
            (issue.node, issue.desired, stored)
        });
        Ok(Outcome { stored: stored.collect(), lost })
    }
}

fn bytes_of((key, value): &Change) -> usize {
    key.len() + value.as_ref().map_or(0, Vec::len)
}

fn change(txn: Transaction, (key, value): &Change) -> Transaction {
    match value {
        Some(value) => txn.put(key.as_str(), value.clone()),
        None => txn.delete(key.as_str()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placement(bytes: usize) -> Change {
        ("placed/a".to_owned(), Some(vec![0; bytes]))
    }

    #[test]
    fn a_batch_is_full_when_the_store_would_refuse_more() {
        let mut batch = Batch::default();
        while batch.takes_placement(&placement(100)) {
            batch.add_placement(placement(100));
        }
        assert_eq!(batch.placements.len(), MAX_CHANGES);
        let mut batch = Batch::default();
        while batch.takes_placement(&placement(100_000)) {
            batch.add_placement(placement(100_000));
        }
        assert_eq!(batch.placements.len(), 10);
        assert!(Batch::default().takes_placement(&placement(MAX_BATCH_BYTES * 2)));
    }
}
