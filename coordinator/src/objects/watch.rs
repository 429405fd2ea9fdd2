//! Watching objects: every change from a revision on, in order and without a gap.

use std::collections::{BTreeSet, VecDeque};

use futures::FutureExt as _;
use mvm_proto::Problem;
use mvm_proto::object::{API_VERSION, Kind, Metadata, Object};
use mvm_store::{Event, Store, StoreError, Watch};
use serde_json::Value;

use super::access::{Caller, Verb, allowed};
use super::read::{Filter, list};
use super::record::{collection_prefix, decode_object};
use crate::records::{EPOCH_KEY, OBJECTS};
use crate::refuse;
use crate::stored::{Backend, StateError};

/// What happened to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Changed {
    Added,
    Modified,
    /// It is gone, or is no longer one of those that are watched.
    Deleted,
    /// Nothing that is watched changed up to this revision.
    Bookmark,
}

impl Changed {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Modified => "modified",
            Self::Deleted => "deleted",
            Self::Bookmark => "bookmark",
        }
    }
}

/// A stream of changes.
pub(crate) struct Watching {
    caller: Caller,
    kind: &'static Kind,
    filter: Filter,
    store: Backend,
    ready: VecDeque<(Changed, Option<Object>, u64)>,
    /// Where the next page of the list begins; none: all of it was told, or nothing of it is to be.
    rest: Option<String>,
    /// What is told once the list is: the revision of its first page.
    listed_at: u64,
    /// What the caller knows of that it asked for, by their references.
    known: BTreeSet<String>,
    /// Whether that is all: it began with a list. Otherwise the caller may know of more.
    knows_all: bool,
    /// What it was told is gone, or is none of those, and has not come back.
    gone: BTreeSet<String>,
    changes: Watch,
    /// The first of the changes, which was looked at to see that they are kept.
    first: Option<Event>,
}

/// Watches a kind from `after` on, or from what there is now.
pub(crate) async fn watch(
    store: &Backend,
    caller: &Caller,
    kind: &'static Kind,
    filter: Filter,
    after: &str,
) -> Result<Watching, Problem> {
    allowed(caller, Verb::Read, kind, filter.tenant.as_ref(), "")?;
    let mut watching = Watching {
        caller: caller.clone(),
        kind,
        filter,
        store: store.clone(),
        ready: VecDeque::new(),
        rest: after.is_empty().then(String::new),
        listed_at: 0,
        known: BTreeSet::new(),
        knows_all: after.is_empty(),
        gone: BTreeSet::new(),
        changes: Watch::from_stream(futures::stream::empty()),
        first: None,
    };
    let after = if after.is_empty() {
        // What changes while the other pages are read is told again.
        watching.listed_at = watching.read_page("").await?;
        watching.listed_at
    } else {
        after
            .parse()
            .map_err(|_| refuse::bad_request("resource_version must be a version that a list gave"))?
    };
    let newest = revision(store).await?;
    if after > newest {
        let detail = format!(
            "version {after} is not of this store, whose newest is {newest}: it was restored, perhaps"
        );
        return Err(gone(detail));
    }
    watching.changes = store.watch(&collection_prefix(kind, watching.filter.tenant.as_ref()), after);
    // What is no longer kept is told as an answer, and not in a stream that has begun.
    watching.first = watching.changes.next().now_or_never().transpose().map_err(problem)?;
    Ok(watching)
}

/// The newest revision of the store.
pub(crate) async fn revision(store: &Backend) -> Result<u64, Problem> {
    Ok(store.list(EPOCH_KEY).await.map_err(StateError::from)?.revision)
}

impl Watching {
    /// The next change; waits for it.
    pub(crate) async fn next(&mut self) -> Result<(Changed, Option<Object>, u64), Problem> {
        loop {
            if let Some(ready) = self.ready.pop_front() {
                return Ok(ready);
            }
            // One page at a time: a reader that is slow does not have all of it kept for it here.
            if let Some(from) = self.rest.clone() {
                self.read_page(&from).await?;
                continue;
            }
            let event = match self.first.take() {
                Some(event) => event,
                None => self.changes.next().await.map_err(problem)?,
            };
            if let Some(change) = self.read(&event)? {
                return Ok(change);
            }
        }
    }

    /// Makes a page of the list ready to be told, and says of which revision it is.
    async fn read_page(&mut self, from: &str) -> Result<u64, Problem> {
        let page = list(&self.store, &self.caller, self.kind, &self.filter, 0, from).await?;
        for object in page.objects {
            let version = object.metadata.resource_version.parse().unwrap_or(page.revision);
            self.known.insert(object.reference());
            self.ready.push_back((Changed::Added, Some(object), version));
        }
        self.rest = Some(page.continue_from).filter(|from| !from.is_empty());
        if self.rest.is_none() {
            let listed_at = if from.is_empty() { page.revision } else { self.listed_at };
            self.ready.push_back((Changed::Bookmark, None, listed_at));
        }
        Ok(page.revision)
    }

    fn read(&mut self, event: &Event) -> Result<Option<(Changed, Option<Object>, u64)>, Problem> {
        let version = event.version();
        let (object, is_meant) = match event {
            Event::Put(entry) => {
                let object = decode_object(entry)?;
                let is_meant = self.filter.matches(&self.caller, self.kind, &object);
                (object, is_meant)
            }
            Event::Delete { key, .. } => match named_by(key, self.kind, version) {
                Some(object) => (object, false),
                None => return Ok(None),
            },
        };
        let metadata = &object.metadata;
        if !self.caller.may_see(self.kind, metadata.tenant.as_ref(), &metadata.name)
            || !self.filter.may_match(metadata)
        {
            return Ok(None);
        }
        let reference = object.reference();
        let was_gone = self.gone.remove(&reference);
        if is_meant {
            let is_first = self.known.insert(reference);
            let is_new = is_first && (self.knows_all || was_gone || metadata.generation == 1);
            let changed = if is_new { Changed::Added } else { Changed::Modified };
            return Ok(Some((changed, Some(object), version)));
        }
        let was_known = self.known.remove(&reference);
        if !self.knows_all {
            self.gone.insert(reference);
        }
        // One that goes on from a version may have been told of it before.
        let is_news = was_known || (!self.knows_all && !was_gone);
        Ok(is_news.then_some((Changed::Deleted, Some(object), version)))
    }
}

/// What is known of a deleted object: its name.
fn named_by(key: &str, kind: &Kind, version: u64) -> Option<Object> {
    let path = key.strip_prefix(OBJECTS)?.strip_prefix(kind.plural)?.strip_prefix('/')?;
    let (tenant, name) = match path.split_once('/') {
        Some((tenant, name)) => (Some(tenant.parse().ok()?), name),
        None => (None, path),
    };
    let resource_version = version.to_string();
    let metadata = Metadata { name: name.to_owned(), tenant, resource_version, ..Metadata::default() };
    Some(Object {
        api_version: API_VERSION.to_owned(),
        kind: kind.name.to_owned(),
        metadata,
        spec: Value::Object(serde_json::Map::default()),
        status: Value::Null,
    })
}

fn problem(error: StoreError) -> Problem {
    match error {
        StoreError::Compacted { oldest, .. } => {
            gone(format!("changes before version {oldest} are no longer kept"))
        }
        StoreError::Closed => refuse::stopping(),
        error => StateError::from(error).into(),
    }
}

fn gone(detail: String) -> Problem {
    Problem::new(410, "gone", detail, "List again, and watch from the version of the list.")
}
