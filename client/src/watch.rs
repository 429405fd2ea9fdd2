//! Watches that go on: over lost connections, restarted servers and gaps.
//!
//! A [`Watch`] lists, then follows from the list's version. When its connection ends it follows on from the last version
//! that it was told; when the server no longer has what came after that (the problem `gone`) it lists again. A copy that
//! is replaced at each [`Change::Listed`] and changed by what follows misses nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::Stream;
use mvm_proto::object::Object;
use mvm_proto::wire::objects::v1::{WatchEvent, WatchRequest};
use tonic::Streaming;

use crate::error::CallError;
use crate::objects::{Listing, Objects, Query, object};

/// Between attempts: twice as long after each that brought nothing.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// What a watch tells.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// All there is: first of all, and again after a gap.
    Listed(Vec<Object>),
    Added(Object),
    Modified(Object),
    /// As it was last.
    Deleted(Object),
}

/// The objects of a query, as they change.
#[derive(Debug)]
pub struct Watch {
    objects: Objects,
    query: Query,
    /// What was told last; none before the first list and after a gap.
    version: Option<String>,
    stream: Option<Streaming<WatchEvent>>,
    has_listed: bool,
    /// The references of what was told of and not deleted since.
    known: BTreeSet<String>,
    pause: Duration,
}

impl Watch {
    pub(crate) fn new(objects: Objects, query: Query) -> Self {
        Self {
            objects,
            query,
            version: None,
            stream: None,
            has_listed: false,
            known: BTreeSet::new(),
            pause: Duration::ZERO,
        }
    }

    /// The next change. Waits while the server can't be reached, but for the first list, whose failure is told.
    /// Dropping the future before it is done loses nothing.
    pub async fn next(&mut self) -> Result<Change, CallError> {
        loop {
            if !self.pause.is_zero() {
                tokio::time::sleep(self.pause).await;
            }
            let told = match (self.version.clone(), self.stream.as_mut()) {
                (None, _) => match self.objects.list(&self.query).await {
                    Ok(Listing { objects, resource_version }) => {
                        self.version = Some(resource_version);
                        self.has_listed = true;
                        self.known = objects.iter().map(Object::reference).collect();
                        self.pause = Duration::ZERO;
                        return Ok(Change::Listed(objects));
                    }
                    Err(error) => Err(error),
                },
                (Some(version), None) => self.follow(version).await.map(|()| None),
                (Some(_), Some(stream)) => match stream.message().await {
                    Ok(Some(event)) => Ok(Some(event)),
                    // The server has ended the stream, to stop perhaps.
                    Ok(None) => Err(tonic::Status::unavailable("the stream ended").into()),
                    Err(status) => Err(status.into()),
                },
            };
            match told {
                Ok(None) => {}
                Ok(Some(event)) => {
                    self.pause = Duration::ZERO;
                    if let Some(change) = self.take(event)? {
                        return Ok(change);
                    }
                }
                Err(error) => self.recover(error)?,
            }
        }
    }

    /// As a stream, which ends after an error.
    pub fn into_stream(self) -> impl Stream<Item = Result<Change, CallError>> {
        futures::stream::unfold(Some(self), |watch| async {
            let mut watch = watch?;
            match watch.next().await {
                Ok(change) => Some((Ok(change), Some(watch))),
                Err(error) => Some((Err(error), None)),
            }
        })
    }

    async fn follow(&mut self, resource_version: String) -> Result<(), CallError> {
        let request = WatchRequest {
            kind: self.query.kind.plural.to_owned(),
            tenant: self.query.tenant.clone().unwrap_or_default(),
            label_selector: self.query.labels.clone(),
            field_selector: self.query.fields.clone(),
            resource_version,
        };
        self.stream = Some(self.objects.generated().watch(request).await?.into_inner());
        Ok(())
    }

    /// A bookmark is no change; it moves the version on.
    fn take(&mut self, event: WatchEvent) -> Result<Option<Change>, CallError> {
        let WatchEvent { r#type, object: carried, resource_version } = event;
        let changed = || object(carried.as_ref().ok_or(CallError::Lacks("the object"))?);
        let change = match r#type.as_str() {
            "added" => Some(Change::Added(changed()?)),
            "modified" => Some(Change::Modified(changed()?)),
            "deleted" => Some(Change::Deleted(changed()?)),
            // Also what a later server tells beyond that.
            _ => None,
        };
        // A server can't know which objects were listed before: it calls everything deleted that the query does not select.
        let change = match change {
            Some(Change::Deleted(object)) if !self.known.remove(&object.reference()) => None,
            Some(Change::Added(object)) => {
                self.known.insert(object.reference());
                Some(Change::Added(object))
            }
            Some(Change::Modified(object)) => {
                self.known.insert(object.reference());
                Some(Change::Modified(object))
            }
            change => change,
        };
        if !resource_version.is_empty() {
            self.version = Some(resource_version);
        }
        Ok(change)
    }

    fn recover(&mut self, error: CallError) -> Result<(), CallError> {
        self.stream = None;
        if error.is_gone() {
            // A server that answers a fresh list with `gone`, too, is not asked without a pause.
            self.version = None;
        } else if !(error.is_lost() && self.has_listed) {
            return Err(error);
        }
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        Ok(())
    }
}
