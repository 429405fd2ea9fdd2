//! Guest sessions: a folder of a guest that outlives its instance and its node.
//!
//! When an instance of a pool with `persist` starts for the first time, it takes a session of the pool and gets the session's
//! files. From then on its folder is copied to a store at every interval, before every pause and at every stop. [`head`]
//! decides which instance holds which session, [`index`] describes the content of one, [`copy_out`] and [`bring_back`] transfer
//! it. The steps of an instance and [`crate::upkeep::session_copy_task`] call this module. When a store fails, the instance
//! continues; an event and a condition report the error, and the copy is retried.

mod blob_store;
mod bring_back;
mod copy_out;
mod deletion;
mod guest_files;
mod head;
mod held;
mod index;
mod interval;
mod limits;
mod session;
mod session_store;
mod space;
mod stored;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mvm_host::QuotaExceeded;
use mvm_planner::Action;
use mvm_proto::document::{Persist, RuntimePolicy};
use mvm_proto::status::{Condition, ConditionKind, InstanceStatus};
use mvm_proto::text::chain;
use mvm_proto::text::one_line;
use mvm_proto::{DesiredState, InstanceId, NodeId, Phase, PoolId, TenantId, Timestamp};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use crate::clock::Clock;
use crate::events::Events;
use crate::guest::{GuestLinks, LinkError};
use crate::instance::DATA_DISK_PATH;
use crate::instance::SessionMark;
use crate::instance::record::{Record, retry_after};
use crate::instance::records::Records;
use blob_store::{BlobStoreError, ObjectBlobStore};
use guest_files::LinkFiles;
use head::{FolderContent, Holder};
pub(crate) use interval::Due;
use limits::MAX_REMEMBERED_BYTES;
pub use limits::SessionLimits;
use session::{CopyReport, Session};
use session_store::SessionStore;
use space::{SessionSpace, TenantSpace};
pub use stored::{DeletedSessions, FoundSessions, WhichSessions};

/// A session is given back within this, or left to be found free later: its instance goes either way.
const RELEASE_WITHIN: Duration = Duration::from_secs(5);

/// An instance that starts waits this long for a store that may not answer at all.
const TAKE_WITHIN: Duration = Duration::from_secs(30);

/// A copy before a pause has at least this, whatever the drain left of its time.
const KEEP_AT_LEAST: Duration = Duration::from_secs(1);

/// How much longer a start may take that brings a session back: some gigabytes at the pace of a slow store.
const BRING_BACK_WITHIN: Duration = Duration::from_secs(900);

/// A store that failed is tried again at least this often, also when its interval is shorter.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// A step waits this long for what the tenant's sessions take; it is measured once.
const MEASURE_WITHIN: Duration = Duration::from_secs(5);

/// How many files an event names, and in how many bytes at most.
const NAMED: usize = 3;
const NAMED_BYTES: usize = 512;

/// What an event says of files that could not be copied whole. Their names are the guest's.
fn unsettled_message(count: usize, named: &[String]) -> String {
    let named = one_line(&named.join(", "), NAMED_BYTES);
    format!(
        "{count} file(s) kept changing and were not copied; the store keeps their previous version: {named}"
    )
}

#[derive(Debug, thiserror::Error)]
pub enum PersistError {
    #[error(transparent)]
    Store(#[from] BlobStoreError),
    #[error(transparent)]
    Guest(#[from] LinkError),
    #[error("another instance took the session {0}")]
    Taken(String),
    #[error("the store is damaged: {0}")]
    Damaged(String),
    #[error("could not take a session like {0}")]
    NoneFree(String),
    #[error("the session has more than {} files", index::MAX_ENTRIES)]
    TooMany,
    #[error("the session exceeds its size limit: {0}")]
    TooLarge(String),
    #[error(
        "the session exceeds max_disk_gib of tenant {tenant}: {exceeded}; free disk space, or raise the quota"
    )]
    OverQuota { tenant: TenantId, exceeded: QuotaExceeded },
    #[error(
        "the store's disk is full: {free_bytes} bytes are free, of which {keep_bytes} are reserved for the node"
    )]
    NoRoom { free_bytes: u64, keep_bytes: u64 },
    #[error("{0} is not a folder in the guest")]
    NotAFolder(String),
    #[error("the session store did not finish within {0:?}")]
    TooSlow(Duration),
    #[error("the instance has no session yet")]
    NoSession,
}

#[derive(Debug, Clone)]
pub struct SessionSettings {
    pub node: NodeId,
    /// What `local` means, and the only folder below which a document may name others.
    pub sessions_dir: PathBuf,
    /// Where the credentials of buckets are.
    pub secrets_dir: PathBuf,
    pub limits: SessionLimits,
}

/// The sessions of this node's instances.
#[derive(Debug)]
pub struct Sessions {
    settings: SessionSettings,
    links: GuestLinks,
    clock: Clock,
    events: Events,
    pools: Mutex<BTreeMap<(TenantId, PoolId), Policy>>,
    instances: Mutex<BTreeMap<InstanceId, Arc<InstanceSession>>>,
    stores: Mutex<BTreeMap<String, ObjectBlobStore>>,
    space: Arc<SessionSpace>,
}

/// What the document in force says of a pool.
#[derive(Debug, Clone)]
struct Policy {
    persist: Option<Persist>,
    drain: Duration,
    /// What the tenant may have on disk; absent: the document does not say.
    max_disk_bytes: Option<u64>,
}

/// One instance's session: who works on it, and the status that is shown of it.
#[derive(Debug, Default)]
struct InstanceSession {
    /// Absent: not loaded yet, or the last attempt failed.
    work: tokio::sync::Mutex<Option<Session<ObjectBlobStore>>>,
    status: Mutex<SessionStatus>,
}

#[derive(Debug, Default)]
struct SessionStatus {
    session: String,
    persisted_at: Option<Timestamp>,
    /// Nothing ran since that was copied.
    whole: bool,
    /// Of which tenant it is, and what it takes in memory until the next copy.
    remembered: Option<(TenantId, u64)>,
    error: Option<String>,
    failures: u32,
    /// When the next copy is due.
    due: Option<Instant>,
    /// How many files never held still at the last copy, and the first of them: told once.
    unsettled: (usize, Vec<String>),
}

impl InstanceSession {
    /// The session as it is remembered, which counts as remembered again only once it is put back.
    fn recall(&self, work: &mut Option<Session<ObjectBlobStore>>) -> Option<Session<ObjectBlobStore>> {
        locked(&self.status).remembered = None;
        work.take()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

impl Sessions {
    pub fn new(settings: SessionSettings, links: GuestLinks, clock: Clock, events: Events) -> Self {
        Self {
            settings,
            links,
            clock,
            events,
            pools: Mutex::default(),
            instances: Mutex::default(),
            stores: Mutex::default(),
            space: Arc::default(),
        }
    }

    /// Takes what the document in force says of sessions. It holds for instances that run, too.
    pub(crate) fn follow(&self, desired: &DesiredState) {
        let policies = desired.pools().map(|(tenant, pool)| {
            let drain = Duration::from_secs(pool.runtime_policy.drain_timeout_seconds);
            let max_disk_bytes = Some(tenant.quotas.max_disk_gib.saturating_mul(1 << 30));
            let policy = Policy { persist: pool.persist.as_deref().cloned(), drain, max_disk_bytes };
            ((tenant.tenant_id.clone(), pool.pool_id.clone()), policy)
        });
        *locked(&self.pools) = policies.collect();
    }

    fn policy(&self, record: &Record) -> Policy {
        let named = locked(&self.pools).get(&(record.tenant.clone(), record.pool.clone())).cloned();
        // A pool that the document no longer names goes on as it began.
        named.unwrap_or_else(|| Policy {
            persist: record.persist.clone(),
            drain: Duration::from_secs(RuntimePolicy::default().drain_timeout_seconds),
            max_disk_bytes: None,
        })
    }

    fn instance_session(&self, id: &InstanceId) -> Arc<InstanceSession> {
        Arc::clone(locked(&self.instances).entry(id.clone()).or_default())
    }

    fn me(&self, record: &Record) -> Holder {
        Holder { node: self.settings.node.clone(), instance: record.id.clone() }
    }

    fn store(&self, record: &Record, store: &str) -> Result<SessionStore<ObjectBlobStore>, PersistError> {
        let blobs = self.blobs(store)?;
        let space = blobs.folder().map(|folder| TenantSpace {
            all: Arc::clone(&self.space),
            tenant: record.tenant.clone(),
            store: store.to_owned(),
            folder: folder.to_owned(),
        });
        let store = SessionStore::new(blobs, &record.tenant, &record.pool);
        Ok(store.limited(self.settings.limits.max_bytes, space))
    }

    fn blobs(&self, store: &str) -> Result<ObjectBlobStore, PersistError> {
        if let Some(known) = locked(&self.stores).get(store) {
            return Ok(known.clone());
        }
        let SessionSettings { sessions_dir, secrets_dir, .. } = &self.settings;
        let blobs = ObjectBlobStore::open(store, sessions_dir, secrets_dir)?;
        locked(&self.stores).insert(store.to_owned(), blobs.clone());
        Ok(blobs)
    }

    /// What the sessions of an instance's tenant take of this node's disk, as far as it can be found out soon.
    pub(crate) async fn disk_used(&self, record: &Record) -> u64 {
        if let Some(persist) = self.policy(record).persist
            && let Ok(store) = self.store(record, &persist.store)
        {
            let measured = tokio::time::timeout(MEASURE_WITHIN, store.measure_once()).await;
            if let Err(error) = measured.unwrap_or(Err(PersistError::TooSlow(MEASURE_WITHIN))) {
                tracing::warn!(id = %record.id, error = %chain(&error), "could not measure the disk use of its tenant's sessions");
            }
        }
        self.space.used(&record.tenant)
    }

    /// Keeps a session in memory for its next copy, unless its tenant has enough there.
    fn remember(
        &self,
        instance_session: &InstanceSession,
        record: &Record,
        session: Session<ObjectBlobStore>,
    ) -> Option<Session<ObjectBlobStore>> {
        locked(&instance_session.status).remembered = None;
        let of_tenant = |instance_session: &Arc<InstanceSession>| {
            let remembered = locked(&instance_session.status).remembered.clone();
            remembered.map_or(0, |(tenant, bytes)| if tenant == record.tenant { bytes } else { 0 })
        };
        let bytes = session.remembered_bytes();
        let all = locked(&self.instances).values().map(of_tenant).fold(bytes, u64::saturating_add);
        (all <= MAX_REMEMBERED_BYTES).then(|| {
            locked(&instance_session.status).remembered = Some((record.tenant.clone(), bytes));
            session
        })
    }

    /// How much longer than for others a step that starts this instance may take.
    pub(crate) fn patience(&self, action: Action, record: Option<&Record>) -> Duration {
        let starts = matches!(action, Action::Create | Action::Start | Action::Replace);
        let holds_back = starts && record.is_some_and(|record| self.holds_back(record));
        if holds_back { BRING_BACK_WITHIN } else { Duration::ZERO }
    }

    /// Whether the guest's work must wait until [`Self::bring_back`] is over.
    pub(crate) fn holds_back(&self, record: &Record) -> bool {
        self.policy(record).persist.is_some()
    }

    /// Before the work in a guest begins: gives it the session that is its own, or the one that it takes now.
    ///
    /// Where the store does not answer, it begins with nothing, in a session of its own: the one that it could not get
    /// is never written over. Only half a session is an error, because a guest must not work with that.
    pub(crate) async fn bring_back(
        &self,
        record: &mut Record,
        records: &Records,
    ) -> Result<(), PersistError> {
        let Some(persist) = self.policy(record).persist else {
            // Its content is its own from here on.
            record.session = record.session.filter(|mark| matches!(mark, SessionMark::Bound { .. }));
            return Ok(());
        };
        let on_disk = record.resources.data_disk_mib > 0 && is_below(&persist.path, DATA_DISK_PATH);
        let half = matches!(record.session, Some(SessionMark::Taken { .. }));
        if on_disk && matches!(record.session, None | Some(SessionMark::Bound { .. })) {
            return Ok(());
        }
        let instance_session = self.instance_session(&record.id);
        let mut work = instance_session.work.lock().await;
        *work = None;
        let taken = tokio::time::timeout(TAKE_WITHIN, self.take_again(record, &persist));
        let taken = taken.await.unwrap_or(Err(PersistError::TooSlow(TAKE_WITHIN)));
        let mut session = match taken {
            Ok(session) => session,
            Err(error) if half => return Err(self.failed(&instance_session, record, &persist, error)),
            Err(error) => {
                let message = format!(
                    "starts with an empty session, because its own could not be restored: {}",
                    chain(&error)
                );
                self.events.publish("SessionNotBroughtBack", record.full_name(), message);
                self.failed(&instance_session, record, &persist, error);
                record.session = None;
                return Ok(());
            }
        };
        record.session = Some(SessionMark::Taken { slot: session.slot });
        record.has_arrived();
        if let Err(error) = records.save(record).await {
            tracing::warn!(id = %record.id, error = %chain(&error), "could not record which session it holds");
        }
        let files = LinkFiles { links: &self.links, instance: &record.id };
        if let Err(error) = session.bring_back(&files, &persist.path).await {
            return Err(self.failed(&instance_session, record, &persist, error));
        }
        record.session = Some(SessionMark::Bound { slot: session.slot });
        if let Some(at) = session.taken_at() {
            self.events.publish(
                "SessionBroughtBack",
                record.full_name(),
                format!("has {} as it was at {at}", session.name()),
            );
        }
        self.succeeded(&instance_session, &session, &persist, false);
        *work = self.remember(&instance_session, record, session);
        Ok(())
    }

    /// The session that a record names, if it is still its own; else one for an empty folder.
    async fn take_again(
        &self,
        record: &Record,
        persist: &Persist,
    ) -> Result<Session<ObjectBlobStore>, PersistError> {
        let (store, me) = (self.store(record, &persist.store)?, self.me(record));
        if let Some(slot) = record.session.and_then(SessionMark::slot)
            && let Some(session) =
                Session::resume(store.clone(), slot, &me, &before(record), persist.every_seconds).await?
        {
            return Ok(session);
        }
        Session::take(store, &me, FolderContent::Nothing, persist.every_seconds).await
    }

    /// Copies a drained guest's session before it is paused, within what is left of its time to drain.
    pub(crate) async fn keep_before_pause(&self, record: &Record, records: &Records, left: Duration) {
        self.keep_within(record, records, left.max(KEEP_AT_LEAST)).await;
    }

    /// Ends a guest's work and copies what it left, within its time to drain.
    pub(crate) async fn keep_before_stop(&self, record: &Record, records: &Records, grace: Duration) {
        let Policy { persist: Some(_), drain, .. } = self.policy(record) else { return };
        if let Err(error) = self.links.end_work(&record.id, grace).await {
            tracing::info!(id = %record.id, %error, "its session is copied while it runs");
        }
        self.keep_within(record, records, drain.max(KEEP_AT_LEAST)).await;
    }

    async fn keep_within(&self, record: &Record, records: &Records, within: Duration) {
        let Some(persist) = self.policy(record).persist else { return };
        let instance_session = self.instance_session(&record.id);
        let kept =
            tokio::time::timeout(within, self.copy(&instance_session, record, records, &persist, true)).await;
        if let Err(error) = kept.unwrap_or(Err(PersistError::TooSlow(within))) {
            let lost = locked(&instance_session.status).persisted_at;
            let since = lost.map_or_else(|| "nothing".to_owned(), |at| format!("it as it was at {at}"));
            let message = format!("its session was not copied, the store has {since}: {}", chain(&error));
            self.events.publish("SessionNotKept", record.full_name(), message);
            self.failed(&instance_session, record, &persist, error);
        }
    }

    /// Makes a new copy. `last`: nothing runs in the guest from here on.
    async fn copy(
        &self,
        instance_session: &InstanceSession,
        record: &Record,
        records: &Records,
        persist: &Persist,
        last: bool,
    ) -> Result<(), PersistError> {
        let (quota_bytes, used_bytes) =
            (self.policy(record).max_disk_bytes, records.disk_used(&record.tenant));
        self.space.note(&record.tenant, quota_bytes, used_bytes);
        let mut work = instance_session.work.lock().await;
        // Put back only when its state is known: what was cut off in the middle is looked at again.
        let mut session = match instance_session.recall(&mut work) {
            Some(session) => session,
            None => self.resume(record, persist).await?,
        };
        let files = LinkFiles { links: &self.links, instance: &record.id };
        let now = self.clock.now();
        match session.copy_folder(&files, &persist.path, persist.every_seconds, now).await {
            Ok(kept) => {
                self.tell(instance_session, record, &kept);
                self.succeeded(instance_session, &session, persist, last);
                *work = self.remember(instance_session, record, session);
                Ok(())
            }
            Err(error) => {
                if matches!(
                    error,
                    PersistError::Guest(_)
                        | PersistError::NotAFolder(_)
                        | PersistError::TooMany
                        | PersistError::TooLarge(_)
                ) {
                    *work = self.remember(instance_session, record, session);
                }
                Err(error)
            }
        }
    }

    async fn resume(
        &self,
        record: &Record,
        persist: &Persist,
    ) -> Result<Session<ObjectBlobStore>, PersistError> {
        let slot = record.session.and_then(SessionMark::slot).ok_or(PersistError::NoSession)?;
        let store = self.store(record, &persist.store)?;
        let name = store.name(slot);
        let (me, before) = (self.me(record), before(record));
        let resumed = Session::resume(store, slot, &me, &before, persist.every_seconds).await?;
        resumed.ok_or(PersistError::Taken(name))
    }

    /// Lets go of the session of an instance that goes on elsewhere, which is still its own there.
    pub(crate) fn leave(&self, id: &InstanceId) {
        locked(&self.instances).remove(id);
    }

    /// Gives the session of an instance that goes for good back to its pool.
    pub(crate) async fn release(&self, record: &Record) {
        let instance_session = locked(&self.instances).remove(&record.id).unwrap_or_default();
        let Some(persist) = self.policy(record).persist.or_else(|| record.persist.clone()) else { return };
        if record.session.and_then(SessionMark::slot).is_none() {
            return;
        }
        let release = async {
            let held = instance_session.work.lock().await.take();
            let session = match held {
                Some(session) => session,
                None => self.resume(record, &persist).await?,
            };
            session.release().await
        };
        let released = tokio::time::timeout(RELEASE_WITHIN, release).await;
        if let Err(error) = released.unwrap_or(Err(PersistError::TooSlow(RELEASE_WITHIN))) {
            let message = format!(
                "could not release its session, which another instance can take only after its lease expires: {}",
                chain(&error)
            );
            self.events.publish("SessionNotReleased", record.full_name(), message);
        }
    }

    fn succeeded(
        &self,
        instance_session: &InstanceSession,
        session: &Session<ObjectBlobStore>,
        persist: &Persist,
        whole: bool,
    ) {
        let mut status = locked(&instance_session.status);
        status.session = session.name();
        status.persisted_at = session.taken_at();
        status.whole = whole;
        status.error = None;
        status.failures = 0;
        status.due = Some(Instant::now() + Duration::from_secs(persist.every_seconds));
    }

    fn failed(
        &self,
        instance_session: &InstanceSession,
        record: &Record,
        persist: &Persist,
        error: PersistError,
    ) -> PersistError {
        // Credentials may have been changed since the place was opened.
        locked(&self.stores).remove(&persist.store);
        let mut status = locked(&instance_session.status);
        status.failures = status.failures.saturating_add(1);
        status.error = Some(chain(&error));
        let longest = Duration::from_secs(persist.every_seconds).max(LONGEST_RETRY);
        status.due = Some(Instant::now() + retry_after(status.failures, fastrand::f64()).min(longest));
        tracing::warn!(id = %record.id, error = %chain(&error), "its session could not be copied");
        error
    }

    fn tell(&self, instance_session: &InstanceSession, record: &Record, kept: &CopyReport) {
        tracing::debug!(id = %record.id, sent = kept.sent_bytes, skipped = kept.skipped, "its session was copied");
        let named: Vec<String> = kept.unsettled.iter().take(NAMED).cloned().collect();
        let unsettled = (kept.unsettled.len(), named);
        let known = std::mem::replace(&mut locked(&instance_session.status).unsettled, unsettled.clone());
        if kept.unsettled.is_empty() || unsettled == known {
            return;
        }
        self.events.publish(
            "SessionFilesUnsettled",
            record.full_name(),
            unsettled_message(unsettled.0, &unsettled.1),
        );
    }

    /// Adds what is known of an instance's session to its status.
    pub(crate) fn show(&self, record: &Record, status: &mut InstanceStatus) {
        if self.policy(record).persist.is_none() {
            return;
        }
        let Some(instance_session) = locked(&self.instances).get(&record.id).cloned() else { return };
        let known = locked(&instance_session.status);
        status.session = known.session.clone();
        status.persisted_at = known.persisted_at.map_or_else(String::new, |at| at.to_string());
        status.persist_error = known.error.clone().unwrap_or_default();
        let until = if record.phase == Phase::Running { self.clock.now() } else { record.since };
        status.loss_window_seconds = match known.persisted_at {
            _ if known.whole && record.phase != Phase::Running => 0,
            Some(at) => until.since(at).as_secs(),
            None => until.since(record.since).as_secs(),
        };
    }

    /// Whether every session is in its store as often as its pool asks for.
    pub(crate) fn condition(&self) -> Condition {
        let failing: Vec<(InstanceId, String)> = locked(&self.instances)
            .iter()
            .filter_map(|(id, instance_session)| {
                Some((id.clone(), locked(&instance_session.status).error.clone()?))
            })
            .collect();
        let new = |holds, reason, message: String| {
            Condition::new(ConditionKind::SessionsPersisted, holds, reason, message, self.clock.now())
        };
        match failing.first() {
            None => new(true, "Copied", String::new()),
            Some((id, error)) => {
                new(false, "NotCopied", format!("{} session(s), first that of {id}: {error}", failing.len()))
            }
        }
    }
}

/// Who an instance that came from other nodes was there.
fn before(record: &Record) -> Vec<Holder> {
    let nodes = record.came_from.iter().chain(&record.came_through);
    nodes.map(|node| Holder { node: node.clone(), instance: record.id.clone() }).collect()
}

/// Whether `path` is `folder` or lies in it.
fn is_below(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}
