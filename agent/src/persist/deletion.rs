//! Deletes sessions from a store, under the same leases as instances hold them.
//!
//! A session is deleted by taking it: the writer of its next head holds it, and of many nodes that try at once one does. That
//! head names no content, so from then on the session is empty, whatever is still there; then the content goes, and the
//! session is given back. Its head stays, because its number refuses a holder of before; an instance that starts may take
//! it like a new one. Every step can be repeated.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mvm_proto::{InstanceId, PoolId, TenantId, Timestamp};

use super::PersistError;
use super::blob_store::{BlobStore, Listed};
use super::head::{Found, Head, Holder, SessionState, VERSION};
use super::held::Held;
use super::session_store::SessionStore;

/// How often the lease is renewed of a session that is being deleted.
const RENEWED_EVERY_SECONDS: u64 = 10;

/// What becomes of a session when some are to be deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    Delete,
    /// There is nothing to delete.
    Empty,
    /// It is used too recently to be meant.
    Young,
    /// It is in use, with the reason.
    InUse(String),
}

/// Whether a session goes of which those are meant that were not used for `unused_for`. `bound`: the instance of this node
/// whose own the session is by its record. `now` is the time of the store.
pub(super) fn judge(
    found: &Found,
    bound: Option<&InstanceId>,
    unused_for: Duration,
    now: Timestamp,
) -> Verdict {
    let is_young = now.since(found.written_at) < unused_for;
    match found.state(now) {
        SessionState::Empty => Verdict::Empty,
        SessionState::InUse if is_young => Verdict::Young,
        SessionState::InUse => {
            let holder = found.head.holder.as_ref();
            let holder = holder
                .map_or_else(String::new, |holder| format!("{} of node {}", holder.instance, holder.node));
            Verdict::InUse(format!("it is in use by {holder}; destroy that instance first"))
        }
        SessionState::Free | SessionState::Abandoned if is_young => Verdict::Young,
        SessionState::Free | SessionState::Abandoned => match bound {
            Some(instance) => Verdict::InUse(format!(
                "it belongs to {instance} of this node, which could not renew its lease; destroy that instance first"
            )),
            None => Verdict::Delete,
        },
    }
}

/// Deletes a session that is not in use. Fails with [`PersistError::Taken`] when it was taken meanwhile.
pub(super) async fn delete<S: BlobStore>(
    store: &SessionStore<S>,
    found: &Found,
    me: &Holder,
) -> Result<(), PersistError> {
    let head = Head {
        version: VERSION,
        number: found.head.number + 1,
        holder: Some(me.clone()),
        index: None,
        taken_at: None,
        every_seconds: RENEWED_EVERY_SECONDS,
    };
    let mut held = Held::begin(store.clone(), found.slot, head).await?;
    for key in store.unnamed(found.slot, &BTreeSet::new()).await? {
        held.remove(&key).await?;
    }
    held.write(|head| head.holder = None).await
}

/// Deletes everything that a tenant has in a store, once none of it is in use. Returns what is still in the way, each
/// session with its reason; nothing: nothing of the tenant is left.
pub(super) async fn clear_tenant<S: BlobStore>(
    blobs: &S,
    tenant: &TenantId,
    me: &Holder,
) -> Result<Vec<String>, PersistError> {
    let pools = pools_in(&blobs.list(tenant.as_str()).await?, tenant);
    let stores: Vec<_> = pools.iter().map(|pool| SessionStore::new(blobs.clone(), tenant, pool)).collect();
    let mut left = Vec::new();
    for store in &stores {
        let now = store.time(me).await?;
        for found in store.heads().await? {
            match judge(&found, None, Duration::ZERO, now) {
                Verdict::Empty | Verdict::Young => {}
                Verdict::InUse(reason) => left.push(format!("{}: {reason}", store.name(found.slot))),
                Verdict::Delete => match delete(store, &found, me).await {
                    Err(PersistError::Taken(name)) => left.push(format!("{name}: it was taken meanwhile")),
                    deleted => deleted?,
                },
            }
        }
    }
    if !left.is_empty() {
        return Ok(left);
    }
    // Listed first: what is taken after that has a newer head, which is not in the list.
    let mut listed = blobs.list(tenant.as_str()).await?;
    for store in &stores {
        for found in store.heads().await? {
            if (&found.head.holder, found.head.index) != (&None, None) {
                return Ok(vec![format!("{}: it was taken meanwhile", store.name(found.slot))]);
            }
        }
    }
    // Heads last: as long as there is content, there is a session to delete it with.
    listed.sort_by_key(|listed| listed.key.contains("/heads/"));
    for listed in listed {
        blobs.delete(&listed.key).await?;
    }
    let left = blobs.list(tenant.as_str()).await?;
    Ok(left.into_iter().map(|listed| format!("{}: it was written meanwhile", listed.key)).collect())
}

/// The pools that a tenant has something of among these objects.
pub(super) fn pools_in(listed: &[Listed], tenant: &TenantId) -> BTreeSet<PoolId> {
    listed.iter().filter_map(|listed| steps(&listed.key, tenant)?.next()?.parse().ok()).collect()
}

/// The tenants that have something among these objects.
pub(super) fn tenants_in(listed: &[Listed]) -> BTreeSet<TenantId> {
    listed.iter().filter_map(|listed| listed.key.split('/').next()?.parse().ok()).collect()
}

/// How many bytes of content each session has.
pub(super) fn sizes_in(listed: &[Listed], tenant: &TenantId) -> BTreeMap<(PoolId, u32), u64> {
    let mut sizes = BTreeMap::new();
    for listed in listed {
        let Some(mut steps) = steps(&listed.key, tenant) else { continue };
        let (Some(pool), Some("content"), Some(slot)) = (steps.next(), steps.next(), steps.next()) else {
            continue;
        };
        if let (Ok(pool), Ok(slot)) = (pool.parse(), slot.parse()) {
            let bytes: &mut u64 = sizes.entry((pool, slot)).or_default();
            *bytes = bytes.saturating_add(listed.bytes);
        }
    }
    sizes
}

fn steps<'a>(key: &'a str, tenant: &TenantId) -> Option<std::str::Split<'a, char>> {
    let mut steps = key.split('/');
    (steps.next()? == tenant.as_str()).then_some(steps)
}
