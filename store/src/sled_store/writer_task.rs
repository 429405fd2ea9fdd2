//! The one task that writes.
//!
//! Requests wait in a bounded queue. The task takes all that wait, up to a limit, decides them as one group,
//! writes one batch, flushes once, publishes the new state to readers and watchers, and answers everybody. So
//! the time of a flush is the window in which the next group gathers, and no transaction waits for a timer. The
//! blocking part runs in `spawn_blocking`, which also keeps paused test clocks from running ahead of the disk.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::disk::Disk;
use super::group::Group;
use super::{Settings, Shared};
use crate::{Change, Committed, LeaseId, StoreError, Transaction};

/// Callers beyond this wait for room in the queue; many times the number of concurrent committers expected.
pub(super) const QUEUE_REQUESTS: usize = 1024;

/// How much one group may hold in memory; one transaction may go over it, never several.
const MAX_GROUP_BYTES: usize = 16 * 1024 * 1024;

/// A disk that has not answered for this long is treated as failed, and so is a sled that waits for a thread
/// of its own that died.
const WRITE_DEADLINE: Duration = Duration::from_secs(60);

/// What the log needs on disk for each byte of value: the data, the change log, and sled's rewritten pages.
const SPACE_FACTOR: u64 = 4;

pub(super) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

#[derive(Debug)]
pub(super) enum Request {
    Commit { transaction: Transaction, reply: Reply<Committed> },
    Grant { ttl: Duration, reply: Reply<LeaseId> },
    End { lease: LeaseId, reply: Reply<()> },
    Close { done: oneshot::Sender<()> },
}

impl Request {
    fn value_bytes(&self) -> usize {
        let Self::Commit { transaction, .. } = self else { return 0 };
        let bytes = |change: &Change| match change {
            Change::Put { value, .. } => value.len(),
            Change::Delete { .. } => 0,
        };
        transaction.changes().iter().map(bytes).sum()
    }

    /// Deletes are let through on a nearly full disk: they are how space comes back.
    fn needs_space(&self) -> bool {
        match self {
            Self::Commit { transaction, .. } => {
                transaction.changes().iter().any(|change| matches!(change, Change::Put { .. }))
            }
            Self::Grant { .. } => true,
            Self::End { .. } | Self::Close { .. } => false,
        }
    }

    fn refuse(self, error: StoreError) {
        // The caller of an answer that can't be delivered is gone.
        match self {
            Self::Commit { reply, .. } => drop(reply.send(Err(error))),
            Self::Grant { reply, .. } => drop(reply.send(Err(error))),
            Self::End { reply, .. } => drop(reply.send(Err(error))),
            Self::Close { done } => {
                let _ = done.send(());
            }
        }
    }
}

/// Runs until `Close` or until every handle is gone.
pub(super) async fn writer_task(
    mut queue: mpsc::Receiver<Request>,
    disk: Disk,
    shared: Arc<Shared>,
    settings: Settings,
) {
    let mut disk = Some(disk);
    let mut failure = None;
    let mut closers = Vec::new();
    while closers.is_empty() {
        let Some(first) = queue.recv().await else { break };
        let requests = gather(first, &mut queue, &mut closers);
        let Some(ready) = disk.take() else {
            let error = failure.clone().unwrap_or(StoreError::Closed);
            requests.into_iter().for_each(|request| request.refuse(error.clone()));
            continue;
        };
        let group_shared = Arc::clone(&shared);
        let group_settings = settings.clone();
        let working = tokio::task::spawn_blocking(move || {
            let outcome = write_group(&ready, requests, &group_shared, &group_settings);
            (ready, outcome)
        });
        match tokio::time::timeout(WRITE_DEADLINE, working).await {
            Ok(Ok((ready, Ok(())))) => disk = Some(ready),
            // Dropping sled here means that nothing can be written any more, not even by its own threads.
            Ok(Ok((ready, Err(error)))) => {
                tracing::error!(%error, "the store is failed and only serves reads from now on");
                failure = Some(error);
                close(ready).await;
            }
            Ok(Err(_)) | Err(_) => {
                let reason = format!("no answer within {WRITE_DEADLINE:?}");
                let error = StoreError::Failed { path: shared.path.clone(), reason };
                tracing::error!(%error, "the store is failed and only serves reads from now on");
                failure = Some(error);
            }
        }
    }
    shared.close();
    queue.close();
    while let Ok(request) = queue.try_recv() {
        request.refuse(StoreError::Closed);
    }
    if let Some(disk) = disk {
        close(disk).await;
    }
    for done in closers {
        // The caller may have stopped waiting.
        let _ = done.send(());
    }
}

async fn close(disk: Disk) {
    if tokio::task::spawn_blocking(move || disk.close()).await.is_err() {
        tracing::warn!("closing the store was cut short");
    }
}

/// The first request and all that wait behind it, up to the limits; a `Close` ends the group.
fn gather(
    first: Request,
    queue: &mut mpsc::Receiver<Request>,
    closers: &mut Vec<oneshot::Sender<()>>,
) -> Vec<Request> {
    let mut requests = Vec::new();
    let mut bytes = 0;
    let mut next = Some(first);
    while let Some(request) = next {
        if let Request::Close { done } = request {
            closers.push(done);
            break;
        }
        bytes += request.value_bytes();
        requests.push(request);
        let full = requests.len() >= QUEUE_REQUESTS || bytes >= MAX_GROUP_BYTES;
        next = if full { None } else { queue.try_recv().ok() };
    }
    requests
}

/// An answer that is ready but may only be given once the group is durable.
enum Answer {
    Commit(Reply<Committed>, Result<Committed, StoreError>),
    Grant(Reply<LeaseId>, Duration, LeaseId),
    End(Reply<()>, LeaseId, Result<(), StoreError>),
}

/// The error is that of the disk, after which it must not be used; every request has its own answer.
fn write_group(
    disk: &Disk,
    requests: Vec<Request>,
    shared: &Shared,
    settings: &Settings,
) -> Result<(), StoreError> {
    let requests = refuse_without_space(disk, requests, settings);
    let (answers, written) = {
        let state = shared.read();
        let mut group = Group::new(&state, &settings.watched);
        let answers: Vec<Answer> =
            requests.into_iter().filter_map(|request| decide(&mut group, request)).collect();
        (answers, group.finish(settings.log_bytes))
    };
    if let Some((delta, batch)) = written {
        if let Err(error) = disk.write(batch, delta.revision) {
            // Even a conflict may have been with a write that is now lost, so everybody gets the error.
            answers.into_iter().for_each(|answer| answer.fail(error.clone()));
            return Err(error);
        }
        let revision = delta.revision;
        shared.write().apply(delta);
        shared.publish(revision);
    }
    answers.into_iter().for_each(|answer| answer.give(shared));
    Ok(())
}

fn refuse_without_space(disk: &Disk, requests: Vec<Request>, settings: &Settings) -> Vec<Request> {
    let bytes: usize = requests.iter().map(Request::value_bytes).sum();
    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
    let needed = settings.reserve_bytes.saturating_add(bytes.saturating_mul(SPACE_FACTOR));
    if settings.reserve_bytes == 0 || !requests.iter().any(Request::needs_space) {
        return requests;
    }
    let Err(error) = disk.check_space(needed) else { return requests };
    let (refused, kept): (Vec<_>, Vec<_>) = requests.into_iter().partition(Request::needs_space);
    refused.into_iter().for_each(|request| request.refuse(error.clone()));
    kept
}

fn decide(group: &mut Group<'_>, request: Request) -> Option<Answer> {
    match request {
        Request::Commit { transaction, reply } => {
            let result = group.commit(&transaction);
            Some(Answer::Commit(reply, result))
        }
        Request::Grant { ttl, reply } => Some(Answer::Grant(reply, ttl, group.grant(ttl))),
        Request::End { lease, reply } => {
            let result = group.end(lease);
            Some(Answer::End(reply, lease, result))
        }
        Request::Close { .. } => None,
    }
}

impl Answer {
    fn give(self, shared: &Shared) {
        match self {
            Self::Commit(reply, result) => drop(reply.send(result)),
            Self::Grant(reply, ttl, lease) => {
                shared.deadlines.start(lease, ttl);
                drop(reply.send(Ok(lease)));
            }
            Self::End(reply, lease, result) => {
                shared.deadlines.forget(lease);
                drop(reply.send(result));
            }
        }
    }

    fn fail(self, error: StoreError) {
        match self {
            Self::Commit(reply, _) => drop(reply.send(Err(error))),
            Self::Grant(reply, ..) => drop(reply.send(Err(error))),
            Self::End(reply, ..) => drop(reply.send(Err(error))),
        }
    }
}
