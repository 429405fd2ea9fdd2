//! Writing what the server has to say of objects: many in one transaction, and only where it is news.

use mvm_proto::object::{Kind, Object};
use mvm_proto::{Problem, TenantId};
use mvm_store::{Guard, MAX_CHANGES, Store, StoreError, Transaction};
use serde_json::Value;

use super::Objects;
use super::record::{encode_object, load_object, object_key};
use crate::stored::StateError;

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

/// Writes the statuses of these objects, and says which were changed by someone else meanwhile, by their place in the list:
/// those are to be looked at again.
pub(crate) async fn set_statuses(
    objects: &Objects,
    all: &[StatusOf<'_>],
    change: ChangeOf<'_>,
) -> Result<Vec<usize>, Problem> {
    let (mut lost, mut batch, mut bytes) = (Vec::new(), Vec::new(), 0);
    for (at, of) in all.iter().enumerate() {
        let key = object_key(of.kind, of.tenant, of.name);
        let Some((mut object, version)) = load_object(&objects.store, &key).await? else { continue };
        match change(at, &object) {
            Some(status) if status != object.status => object.status = status,
            _ => continue,
        }
        let value = encode_object(&object);
        if !batch.is_empty() && (batch.len() == MAX_CHANGES || bytes + value.len() > MAX_BATCH_BYTES) {
            commit(objects, std::mem::take(&mut batch), &mut lost).await?;
            bytes = 0;
        }
        bytes += value.len();
        batch.push((at, key, version, value));
    }
    commit(objects, batch, &mut lost).await?;
    Ok(lost)
}

async fn commit(
    objects: &Objects,
    mut batch: Vec<(usize, String, u64, Vec<u8>)>,
    lost: &mut Vec<usize>,
) -> Result<(), Problem> {
    while !batch.is_empty() {
        let txn = batch.iter().fold(Transaction::new(), |txn, (_, key, version, value)| {
            txn.guard(key.as_str(), Guard::Version(*version)).put(key.as_str(), value.clone())
        });
        match objects.store.commit(txn).await {
            Ok(_) => break,
            Err(StoreError::Conflict { key: changed }) => {
                match batch.iter().position(|(_, key, ..)| *key == changed) {
                    Some(at) => lost.push(batch.remove(at).0),
                    None => break,
                }
            }
            Err(error) => return Err(StateError::from(error).into()),
        }
    }
    Ok(())
}
