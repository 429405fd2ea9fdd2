//! Writing what the server has to say of objects: many in one transaction, and only where it is news.

use mvm_proto::object::{Kind, Object};
use mvm_proto::{Problem, TenantId};
use mvm_store::{Guard, MAX_CHANGES, Store, StoreError, Transaction};
use serde_json::Value;

use super::Objects;
use super::record::{encode_object, load_object, object_key};
use super::uids::Uids;
use crate::events::{Change, Events, Happening, Subject, add_to, happenings};
use crate::stored::{StateError, now};

/// Bytes of one such transaction.
const MAX_BATCH_BYTES: usize = 1024 * 1024;

/// An object whose status may have changed.
#[derive(Debug, Clone)]
pub(crate) struct StatusOf<'a> {
    pub(crate) kind: &'static Kind,
    pub(crate) tenant: Option<&'a TenantId>,
    pub(crate) name: &'a str,
}

/// What an object's status becomes; `at` is its place in the list.
type ChangeOf<'a> = &'a (dyn Fn(usize, &Object) -> Option<Value> + Sync);

/// A status to write, with what happened to its object.
struct Pending {
    at: usize,
    key: String,
    version: u64,
    value: Vec<u8>,
    subject: Subject,
    happenings: Vec<Happening>,
}

impl Pending {
    /// The most changes that it is in a transaction: each event may take the place of another.
    fn changes(&self) -> usize {
        1 + 2 * self.happenings.len()
    }
}

/// So many things happen to an object at once at most: what is left out holds on, and is seen in its status.
const MAX_HAPPENINGS: usize = 16;

/// Writes the statuses of these objects with the events that follow from them, and says which were changed by someone else meanwhile, by their place in the list:
/// those are to be looked at again.
pub(crate) async fn set_statuses(
    objects: &Objects,
    events: &Events,
    all: &[StatusOf<'_>],
    change: ChangeOf<'_>,
) -> Result<Vec<usize>, Problem> {
    let (mut lost, mut batch, mut bytes, mut changes) = (Vec::new(), Vec::<Pending>::new(), 0, 0);
    let mut uids = Uids::new(&objects.store);
    for (at, of) in all.iter().enumerate() {
        let key = object_key(of.kind, of.tenant, of.name);
        let Some((mut object, version)) = load_object(&objects.store, &key).await? else { continue };
        let status = match change(at, &object) {
            Some(status) if status != object.status => status,
            _ => continue,
        };
        let mut happenings = happenings(&object, &status);
        happenings.truncate(MAX_HAPPENINGS);
        object.status = status;
        let tenant_uid = match of.tenant {
            Some(tenant) if !happenings.is_empty() => uids.of_tenant(tenant).await?.unwrap_or_default(),
            _ => String::new(),
        };
        let (value, subject) = (encode_object(&object), Subject::new(&object, &tenant_uid));
        let pending = Pending { at, key, version, value, subject, happenings };
        let is_full =
            changes + pending.changes() > MAX_CHANGES || bytes + pending.value.len() > MAX_BATCH_BYTES;
        if !batch.is_empty() && is_full {
            commit(objects, events, std::mem::take(&mut batch), &mut lost).await?;
            (bytes, changes) = (0, 0);
        }
        (bytes, changes) = (bytes + pending.value.len(), changes + pending.changes());
        batch.push(pending);
    }
    commit(objects, events, batch, &mut lost).await?;
    Ok(lost)
}

async fn commit(
    objects: &Objects,
    events: &Events,
    mut batch: Vec<Pending>,
    lost: &mut Vec<usize>,
) -> Result<(), Problem> {
    while !batch.is_empty() {
        let txn = batch.iter().fold(Transaction::new(), |txn, Pending { key, version, value, .. }| {
            txn.guard(key.as_str(), Guard::Version(*version)).put(key.as_str(), value.clone())
        });
        let now = now();
        let told = batch.iter().filter(|pending| !pending.happenings.is_empty());
        // Two may make room by dropping the same event.
        let mut noted: Vec<Change> = Vec::new();
        for change in told.flat_map(|pending| events.propose(&pending.subject, &pending.happenings, now)) {
            if !noted.contains(&change) {
                noted.push(change);
            }
        }
        match objects.store.commit(add_to(txn, &noted)).await {
            Ok(_) => {
                events.note(noted);
                break;
            }
            Err(StoreError::Conflict { key: changed }) => {
                match batch.iter().position(|pending| pending.key == changed) {
                    Some(at) => lost.push(batch.remove(at).at),
                    None => break,
                }
            }
            Err(error) => return Err(StateError::from(error).into()),
        }
    }
    Ok(())
}
