//! What is in the session stores that this node knows: listed and deleted for operators, for retention, and for tenants that
//! were removed. See [`super::deletion`] for how.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mvm_proto::status::GuestSession;
use mvm_proto::text::chain;
use mvm_proto::{InstanceId, PoolId, TenantId};

use super::blob_store::{BlobStore, ObjectBlobStore};
use super::deletion::{Verdict, clear_tenant, delete, judge, pools_in, sizes_in, tenants_in};
use super::head::{Holder, SessionState};
use super::session_store::SessionStore;
use super::{PersistError, Sessions, locked};
use crate::instance::SessionMark;
use crate::instance::records::Records;

/// The store that every node has.
const LOCAL: &str = "local";
/// One store may not answer at all; the others are asked all the same.
const STORE_WITHIN: Duration = Duration::from_secs(60);

/// Which sessions are meant; absent is all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WhichSessions {
    pub tenant: Option<TenantId>,
    pub pool: Option<PoolId>,
    pub slot: Option<u32>,
    /// Only those that were not used for so long.
    pub unused_for: Duration,
    /// Stores to look in besides those that this node knows.
    pub stores: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct FoundSessions {
    pub sessions: Vec<GuestSession>,
    /// Stores that could not be read, each with the reason.
    pub unreadable: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeletedSessions {
    pub deleted: Vec<GuestSession>,
    /// Those that are still there, with the reason.
    pub kept: Vec<(GuestSession, String)>,
    pub unreadable: Vec<String>,
}

/// Sessions that instances of this node have by their records.
type Bound = BTreeMap<(String, TenantId, PoolId, u32), InstanceId>;

impl Sessions {
    /// The sessions in the stores that this node knows.
    pub(crate) async fn list(&self, which: &WhichSessions, records: &Records) -> FoundSessions {
        let mut all = FoundSessions::default();
        for (store, tenants) in self.places(which, records, &mut all.unreadable).await {
            let looked = tokio::time::timeout(STORE_WITHIN, self.list_in(&store, &tenants, which)).await;
            match looked.unwrap_or(Err(PersistError::TooSlow(STORE_WITHIN))) {
                Ok(found) => all.sessions.extend(found),
                Err(error) => all.unreadable.push(self.unreadable(&store, &error)),
            }
        }
        all
    }

    /// Deletes those that are not in use.
    pub(crate) async fn delete(&self, which: &WhichSessions, records: &Records) -> DeletedSessions {
        let mut all = DeletedSessions::default();
        let bound = bound(records);
        for (store, tenants) in self.places(which, records, &mut all.unreadable).await {
            for tenant in tenants {
                if let Err(error) = self.delete_in(&store, &tenant, which, &bound, &mut all).await {
                    all.unreadable.push(self.unreadable(&store, &error));
                    break;
                }
                self.space.forget(&tenant, &store);
            }
        }
        all
    }

    /// Deletes everything that a tenant has in these stores and on this node; what is still in the way. Nothing: nothing is
    /// left.
    pub(crate) async fn clear(&self, tenant: &TenantId, stores: &[String]) -> Vec<String> {
        let mut left = Vec::new();
        let stores: BTreeSet<&str> = stores.iter().map(String::as_str).chain([LOCAL]).collect();
        for store in stores {
            let cleared = async {
                let blobs = self.blobs(store)?;
                let mut left = clear_tenant(&blobs, tenant, &self.deleter()).await?;
                let foreign = blobs.foreign(tenant.as_str())?.into_iter();
                left.extend(foreign.map(|path| {
                    format!("{}: it is none of a session's files; remove it by hand", path.display())
                }));
                if left.is_empty() {
                    blobs.remove_empty_folders(tenant.as_str());
                }
                Ok(left)
            };
            let cleared: Result<Vec<String>, PersistError> = cleared.await;
            self.space.forget(tenant, store);
            match cleared {
                Ok(in_the_way) => left.extend(in_the_way),
                Err(error) => left.push(self.unreadable(store, &error)),
            }
        }
        left
    }

    /// Holds a session while it is deleted. Another one each time: none goes on with what an earlier one began.
    fn deleter(&self) -> Holder {
        Holder { node: self.settings.node.clone(), instance: InstanceId::from_bits(fastrand::u32(..)) }
    }

    fn unreadable(&self, store: &str, error: &PersistError) -> String {
        // Credentials may be changed before the next try.
        locked(&self.stores).remove(store);
        format!("the session store {store}: {}", chain(error))
    }

    /// The stores to look in, and whose sessions there. In the node's own store that is everyone's, elsewhere those of the
    /// tenants that this node knows.
    async fn places(
        &self,
        which: &WhichSessions,
        records: &Records,
        unreadable: &mut Vec<String>,
    ) -> BTreeMap<String, BTreeSet<TenantId>> {
        let mut places: BTreeMap<String, BTreeSet<TenantId>> = BTreeMap::new();
        let meant = |tenant: &TenantId| which.tenant.as_ref().is_none_or(|meant| meant == tenant);
        for ((tenant, _), policy) in locked(&self.pools).iter() {
            if let Some(persist) = policy.persist.as_ref().filter(|_| meant(tenant)) {
                places.entry(persist.store.clone()).or_default().insert(tenant.clone());
            }
        }
        records.for_each(|record, _| {
            if let Some(persist) = record.persist.as_ref().filter(|_| meant(&record.tenant)) {
                places.entry(persist.store.clone()).or_default().insert(record.tenant.clone());
            }
        });
        match &which.tenant {
            Some(tenant) => {
                for store in which.stores.iter().map(String::as_str).chain([LOCAL]) {
                    places.entry(store.to_owned()).or_default().insert(tenant.clone());
                }
            }
            None => {
                let listed = async { Ok(self.blobs(LOCAL)?.list("").await?) };
                match listed.await {
                    Ok(listed) => places.entry(LOCAL.to_owned()).or_default().extend(tenants_in(&listed)),
                    Err(error) => unreadable.push(self.unreadable(LOCAL, &error)),
                }
            }
        }
        places
    }

    async fn list_in(
        &self,
        store: &str,
        tenants: &BTreeSet<TenantId>,
        which: &WhichSessions,
    ) -> Result<Vec<GuestSession>, PersistError> {
        let blobs = self.blobs(store)?;
        let mut sessions = Vec::new();
        for tenant in tenants {
            let Looked { pools } = self.look(&blobs, store, tenant, which).await?;
            sessions.extend(pools.into_iter().flat_map(|pool| pool.found).map(|(_, session)| session));
        }
        Ok(sessions)
    }

    async fn delete_in(
        &self,
        store: &str,
        tenant: &TenantId,
        which: &WhichSessions,
        bound: &Bound,
        all: &mut DeletedSessions,
    ) -> Result<(), PersistError> {
        let blobs = self.blobs(store)?;
        let looked = tokio::time::timeout(STORE_WITHIN, self.look(&blobs, store, tenant, which)).await;
        let Looked { pools } = looked.unwrap_or(Err(PersistError::TooSlow(STORE_WITHIN)))?;
        for InPool { pool, store: sessions, now, found } in pools {
            for (found, session) in found {
                let key = (store.to_owned(), tenant.clone(), pool.clone(), found.slot);
                match judge(&found, bound.get(&key), which.unused_for, now) {
                    Verdict::Empty | Verdict::Young => {}
                    Verdict::InUse(reason) => all.kept.push((session, reason)),
                    Verdict::Delete => match delete(&sessions, &found, &self.deleter()).await {
                        Ok(()) => all.deleted.push(session),
                        Err(PersistError::Taken(_)) => {
                            all.kept.push((session, "it was taken by an instance meanwhile".to_owned()));
                        }
                        Err(error) => {
                            all.kept.push((session, chain(&error)));
                            return Err(error);
                        }
                    },
                }
            }
        }
        Ok(())
    }

    async fn look(
        &self,
        blobs: &ObjectBlobStore,
        store: &str,
        tenant: &TenantId,
        which: &WhichSessions,
    ) -> Result<Looked, PersistError> {
        let listed = blobs.list(tenant.as_str()).await?;
        let mut sizes = sizes_in(&listed, tenant);
        let mut pools = Vec::new();
        for pool in pools_in(&listed, tenant) {
            if which.pool.as_ref().is_some_and(|meant| *meant != pool) {
                continue;
            }
            let sessions = SessionStore::new(blobs.clone(), tenant, &pool);
            // Before the heads are read: one that is renewed meanwhile is newer than this.
            let now = sessions.time(&self.deleter()).await?;
            let mut found = sessions.heads().await?;
            found.retain(|found| {
                which.slot.is_none_or(|slot| slot == found.slot) && found.state(now) != SessionState::Empty
            });
            let told = |found: super::head::Found| {
                let holder = found.head.holder.as_ref();
                let session = GuestSession {
                    session: sessions.name(found.slot),
                    store: store.to_owned(),
                    state: found.state(now).as_str().to_owned(),
                    holder: holder.map_or_else(String::new, |it| format!("{}/{}", it.node, it.instance)),
                    taken_at: found.head.taken_at.map_or_else(String::new, |at| at.to_string()),
                    used_at: found.written_at.to_string(),
                    bytes: sizes.remove(&(pool.clone(), found.slot)).unwrap_or_default(),
                };
                (found, session)
            };
            let found = found.into_iter().map(told).collect();
            pools.push(InPool { pool: pool.clone(), store: sessions, now, found });
        }
        Ok(Looked { pools })
    }
}

/// What a tenant has in one store.
struct Looked {
    pools: Vec<InPool>,
}

struct InPool {
    pool: PoolId,
    store: SessionStore<ObjectBlobStore>,
    now: mvm_proto::Timestamp,
    found: Vec<(super::head::Found, GuestSession)>,
}

fn bound(records: &Records) -> Bound {
    let mut bound = Bound::new();
    records.for_each(|record, _| {
        let Some(persist) = &record.persist else { return };
        if let Some(slot) = record.session.and_then(SessionMark::slot) {
            let key = (persist.store.clone(), record.tenant.clone(), record.pool.clone(), slot);
            bound.insert(key, record.id.clone());
        }
    });
    bound
}
