//! The work that is due at every interval: copies the sessions of running instances, renews the lease of the others.

use std::sync::Arc;

use mvm_proto::document::Persist;
use mvm_proto::text::chain;
use mvm_proto::{InstanceId, Phase, TenantId};
use tokio::time::Instant;

use super::head::FolderContent;
use super::session::Session;
use super::{InstanceSession, PersistError, Sessions, locked};
use crate::instance::SessionMark;
use crate::instance::record::Record;
use crate::instance::records::Records;

/// An instance whose session is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Due {
    /// Absent: it was never looked at.
    pub(crate) since: Option<Instant>,
    pub(crate) tenant: TenantId,
    pub(crate) instance: InstanceId,
}

impl Sessions {
    /// Instances whose session is to be copied or said to be held now, with their tenants and since when.
    pub(crate) fn due(&self, records: &Records) -> Vec<Due> {
        let now = Instant::now();
        let mut due = Vec::new();
        records.for_each(|record, moving_to| {
            let settled = moving_to.is_none() && record.intent.is_none();
            if !settled || self.policy(record).persist.is_none() {
                return;
            }
            let runs = record.phase == Phase::Running;
            let bound = matches!(record.session, Some(SessionMark::Bound { .. }));
            let since = locked(&self.instance_session(&record.id).status).due;
            if (runs || bound) && since.is_none_or(|since| since <= now) {
                due.push(Due { since, tenant: record.tenant.clone(), instance: record.id.clone() });
            }
        });
        due
    }

    /// What is due for one instance: a copy of what runs, a word that it is still held of what rests.
    pub(crate) async fn copy_or_renew(&self, record: &Record, records: &Arc<Records>) {
        let Some(persist) = self.policy(record).persist else { return };
        let instance_session = self.instance_session(&record.id);
        let copy_or_renew = async {
            match (record.phase, record.session) {
                (Phase::Running, Some(SessionMark::Bound { .. })) => {
                    self.copy(&instance_session, record, records, &persist, false).await
                }
                (Phase::Running, _) => self.begin(&instance_session, record, records, &persist).await,
                _ => self.renew(&instance_session, record, &persist).await,
            }
        };
        let within = self.settings.limits.copy_within;
        let done = tokio::time::timeout(within, copy_or_renew).await;
        match done.unwrap_or(Err(PersistError::TooSlow(within))) {
            Ok(()) => records.set_arrived(record),
            Err(PersistError::Taken(session)) => {
                let message = format!("another instance took {session}; it continues with a new session");
                self.events.publish("SessionTaken", record.full_name(), message);
                self.unbind(record, records).await;
            }
            // A step began with it meanwhile, and sees to its session itself.
            Err(_) if records.is_leased(&record.id) => {}
            Err(error) => {
                let first = locked(&instance_session.status).failures == 0;
                let error = self.failed(&instance_session, record, &persist, error);
                if first {
                    self.events.publish(
                        "SessionNotKept",
                        record.full_name(),
                        format!("its session was not copied: {}", chain(&error)),
                    );
                }
            }
        }
    }

    /// Takes a new session for an instance that has content and none.
    async fn begin(
        &self,
        instance_session: &InstanceSession,
        record: &Record,
        records: &Arc<Records>,
        persist: &Persist,
    ) -> Result<(), PersistError> {
        let mut work = instance_session.work.lock().await;
        let (store, me) = (self.store(record, &persist.store)?, self.me(record));
        let session = Session::take(store, &me, FolderContent::Content, persist.every_seconds).await?;
        let mark = SessionMark::Bound { slot: session.slot };
        if self.mark(record, records, Some(mark)).await {
            *work = Some(session);
            drop(work);
            let bound = Record { session: Some(mark), ..record.clone() };
            return self.copy(instance_session, &bound, records, persist, false).await;
        }
        session.release().await
    }

    async fn unbind(&self, record: &Record, records: &Arc<Records>) {
        *self.instance_session(&record.id).work.lock().await = None;
        if self.mark(record, records, None).await {
            locked(&self.instance_session(&record.id).status).due = None;
        }
    }

    /// Writes down which session an instance has, unless someone acts on it.
    async fn mark(&self, record: &Record, records: &Arc<Records>, mark: Option<SessionMark>) -> bool {
        let Some(lease) = records.lease(&record.id, record.phase) else { return false };
        let Some(mut current) = records.get(lease.id()) else { return false };
        current.session = mark;
        let saved = records.save(&current).await;
        if let Err(error) = &saved {
            tracing::warn!(id = %record.id, error = %chain(error), "could not record which session it holds");
        }
        saved.is_ok()
    }

    async fn renew(
        &self,
        instance_session: &InstanceSession,
        record: &Record,
        persist: &Persist,
    ) -> Result<(), PersistError> {
        let mut work = instance_session.work.lock().await;
        let mut session = match instance_session.recall(&mut work) {
            Some(session) => session,
            None => self.resume(record, persist).await?,
        };
        session.renew(persist.every_seconds).await?;
        let whole = locked(&instance_session.status).whole;
        self.succeeded(instance_session, &session, persist, whole);
        *work = self.remember(instance_session, record, session);
        Ok(())
    }
}
