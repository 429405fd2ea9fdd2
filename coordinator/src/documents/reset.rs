//! A trust root that resets high-water marks, followed in the store: what was numbered and claimed before it no longer
//! counts, and every stored document is to be issued again under the first numbers of this epoch.

use mvm_proto::{NodeId, Problem, Timestamp};
use mvm_store::{Guard, Store, StoreError, Transaction};

use super::Documents;
use crate::records::{ASSIGNED, Assigned, NODES, NodeRecord, Numbers, assigned_key, envelope_key, node_key};
use crate::refuse;
use crate::stored::{MAX_TRIES, StateError, Versioned, encode, load, load_all, unchanged};

/// The newest resetting root that this store has followed. Written last, so that a crash in between repeats the rest.
const FOLLOWED_KEY: &str = "meta/numbers_reset";

/// Stands for "not numbered since the reset": below everything that is ever given out.
pub(super) const UNNUMBERED: Numbers = Numbers { epoch: 0, generation: 0 };

impl Documents {
    /// Follows the newest resetting root, unless that was done before.
    pub(crate) async fn follow_reset(&self, now: Timestamp) -> Result<(), Problem> {
        let newest = self.trust.newest_reset();
        let followed: Option<Versioned<u64>> = load(&self.store, FOLLOWED_KEY).await?;
        if followed.as_ref().map_or(0, |followed| followed.value) >= newest {
            return Ok(());
        }
        self.forget_floors().await?;
        for (node, _) in load_all::<Assigned>(&self.store, ASSIGNED).await? {
            if let Ok(node) = node.parse() {
                self.forget_numbers(&node, now).await?;
            }
        }
        let txn = Transaction::new().guard(FOLLOWED_KEY, unchanged(followed.as_ref()));
        match self.store.commit(txn.put(FOLLOWED_KEY, encode(&newest))).await {
            // Someone else followed it at the same time.
            Ok(_) | Err(StoreError::Conflict { .. }) => Ok(()),
            Err(error) => Err(StateError::from(error).into()),
        }
    }

    async fn forget_floors(&self) -> Result<(), Problem> {
        for (_, found) in load_all::<NodeRecord>(&self.store, NODES).await? {
            if found.value.floor.is_none() {
                continue;
            }
            let key = node_key(&found.value.node_id);
            let record = NodeRecord { floor: None, ..found.value };
            let txn = Transaction::new().guard(key.as_str(), Guard::Version(found.version));
            match self.store.commit(txn.put(key, encode(&record))).await {
                // A concurrent change of the record has seen the node after its reset, or will.
                Ok(_) | Err(StoreError::Conflict { .. }) => {}
                Err(error) => return Err(StateError::from(error).into()),
            }
        }
        Ok(())
    }

    /// The content stays as it was signed. It gets its numbers when it is issued again, which is due at once: the
    /// director's key may be replaced by the same root, and be in place only after the next start.
    async fn forget_numbers(&self, node: &NodeId, now: Timestamp) -> Result<(), Problem> {
        let key = assigned_key(node);
        for _ in 0..MAX_TRIES {
            let Some(before) = load::<Assigned>(&self.store, &key).await? else { return Ok(()) };
            let envelope = self.store.get(&envelope_key(node)).await.map_err(StateError::from)?;
            let Some(envelope) = envelope.filter(|envelope| envelope.version == before.version) else {
                continue;
            };
            let assigned =
                Assigned { numbers: UNNUMBERED, issued_at: now, expires_at: now, ..before.value.clone() };
            let txn = Transaction::new()
                .guard(key.as_str(), unchanged(Some(&before)))
                .put(key.as_str(), encode(&assigned))
                .put(envelope_key(node), envelope.value);
            match self.store.commit(txn).await {
                Ok(_) => {
                    self.due.set(node, now);
                    return Ok(());
                }
                Err(StoreError::Conflict { .. }) => {}
                Err(error) => return Err(StateError::from(error).into()),
            }
        }
        Err(refuse::too_busy("the document"))
    }
}
