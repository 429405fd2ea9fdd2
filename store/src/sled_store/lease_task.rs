//! Ends leases whose time is up.
//!
//! Deadlines live in memory only: keeping a lease alive costs no write, and a lease found at opening gets its
//! whole time again, because no client could keep it alive while the store was closed. One task sleeps until
//! the earliest deadline and asks the writer to end the lease, which deletes its keys in one transaction.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;

use super::Shared;
use super::writer_task::Request;
use crate::{LeaseId, StoreError};

/// Between attempts to end a lease while the disk is full.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Who must be kept alive until when.
#[derive(Debug, Default)]
pub(super) struct Deadlines {
    leases: Mutex<BTreeMap<LeaseId, Deadline>>,
    changed: Notify,
}

#[derive(Debug, Clone, Copy)]
struct Deadline {
    at: Instant,
    ttl: Duration,
    /// Its time is up; it can't be kept alive any more, even if ending it takes a while.
    over: bool,
}

impl Deadlines {
    pub(super) fn start(&self, lease: LeaseId, ttl: Duration) {
        let deadline = Deadline { at: Instant::now() + ttl, ttl, over: false };
        self.lock().insert(lease, deadline);
        self.changed.notify_one();
    }

    pub(super) fn keep_alive(&self, lease: LeaseId) -> Result<(), StoreError> {
        let now = Instant::now();
        let mut leases = self.lock();
        match leases.get_mut(&lease) {
            Some(deadline) if !deadline.over && now < deadline.at => {
                deadline.at = now + deadline.ttl;
                Ok(())
            }
            _ => Err(StoreError::LeaseNotFound { lease }),
        }
    }

    pub(super) fn forget(&self, lease: LeaseId) {
        self.lock().remove(&lease);
    }

    /// Leases to end now, and when to look again.
    fn due(&self, now: Instant) -> (Vec<LeaseId>, Option<Instant>) {
        let mut leases = self.lock();
        let mut due = Vec::new();
        for (lease, deadline) in leases.iter_mut().filter(|(_, deadline)| deadline.at <= now) {
            deadline.over = true;
            deadline.at = now + RETRY_PAUSE;
            due.push(*lease);
        }
        (due, leases.values().map(|deadline| deadline.at).min())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<LeaseId, Deadline>> {
        self.leases.lock()
    }
}

/// Runs until the store is closed or every handle is gone.
pub(super) async fn lease_task(shared: Arc<Shared>, writer: mpsc::WeakSender<Request>) {
    let mut progress = shared.progress.subscribe();
    loop {
        let (due, next) = shared.deadlines.due(Instant::now());
        // Together, so that leases that end together share a flush.
        join_all(due.into_iter().map(|lease| end(&shared, &writer, lease))).await;
        let sleep = async {
            match next {
                Some(next) => tokio::time::sleep_until(next).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = sleep => {}
            () = shared.deadlines.changed.notified() => {}
            _ = progress.wait_for(|progress| progress.closed) => return,
        }
    }
}

async fn end(shared: &Shared, writer: &mpsc::WeakSender<Request>, lease: LeaseId) {
    let (reply, answer) = oneshot::channel();
    let Some(writer) = writer.upgrade() else { return };
    if writer.send(Request::End { lease, reply }).await.is_err() {
        return;
    }
    drop(writer);
    match answer.await {
        Ok(Ok(())) => tracing::debug!(%lease, "lease ended"),
        Ok(Err(StoreError::LeaseNotFound { .. })) => shared.deadlines.forget(lease),
        Ok(Err(error @ StoreError::Failed { .. })) => {
            tracing::error!(%error, %lease, "could not end a lease; it ends after the next opening");
            shared.deadlines.forget(lease);
        }
        Ok(Err(error)) => tracing::warn!(%error, %lease, "could not end a lease; trying again"),
        Err(_) => {}
    }
}
