//! Watching objects: every change from a revision on, in order and without a gap.

use std::collections::{BTreeSet, VecDeque};

use mvm_proto::Problem;
use mvm_proto::object::{API_VERSION, Kind, Metadata, Object};
use mvm_store::{Event, Store, StoreError, Watch};
use serde_json::Value;

use super::access::{Caller, Verb, allowed};
use super::read::{Filter, list};
use super::record::{OBJECTS, collection_prefix, decode_object};
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
    ready: VecDeque<(Changed, Option<Object>, u64)>,
    /// What the caller has been told of, by their references; all that there is, if it began with a list.
    known: BTreeSet<String>,
    knows_all: bool,
    changes: Watch,
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
    let (mut ready, mut known) = (VecDeque::new(), BTreeSet::new());
    let knows_all = after.is_empty();
    let after = if after.is_empty() {
        let mut from = String::new();
        let revision = loop {
            let page = list(store, caller, kind, &filter, 0, &from).await?;
            let version = |object: &Object| object.metadata.resource_version.parse().unwrap_or(page.revision);
            ready.extend(page.objects.into_iter().map(|object| {
                let version = version(&object);
                known.insert(object.reference());
                (Changed::Added, Some(object), version)
            }));
            if page.continue_from.is_empty() {
                break page.revision;
            }
            // A list of several pages is of several revisions: what changed in between is told again.
            from = page.continue_from;
        };
        ready.push_back((Changed::Bookmark, None, revision));
        revision
    } else {
        after
            .parse()
            .map_err(|_| refuse::bad_request("resource_version must be a version that a list gave"))?
    };
    let changes = store.watch(&collection_prefix(kind, filter.tenant.as_ref()), after);
    Ok(Watching { caller: caller.clone(), kind, filter, ready, known, knows_all, changes })
}

impl Watching {
    /// The next change; waits for it.
    pub(crate) async fn next(&mut self) -> Result<(Changed, Option<Object>, u64), Problem> {
        loop {
            if let Some(ready) = self.ready.pop_front() {
                return Ok(ready);
            }
            let event = self.changes.next().await.map_err(problem)?;
            if let Some(change) = self.read(&event)? {
                return Ok(change);
            }
        }
    }

    fn read(&mut self, event: &Event) -> Result<Option<(Changed, Option<Object>, u64)>, Problem> {
        let version = event.version();
        match event {
            Event::Put(entry) => {
                let object = decode_object(entry)?;
                let is_first = self.known.insert(object.reference());
                let is_new = is_first && (self.knows_all || object.metadata.generation == 1);
                let changed = match self.filter.matches(&self.caller, self.kind, &object) {
                    true if is_new => Changed::Added,
                    true => Changed::Modified,
                    false => Changed::Deleted,
                };
                let sees =
                    self.caller.may_see(self.kind, object.metadata.tenant.as_ref(), &object.metadata.name);
                Ok(sees.then_some((changed, Some(object), version)))
            }
            Event::Delete { key, .. } => {
                let Some(object) = named_by(key, self.kind, version) else { return Ok(None) };
                self.known.remove(&object.reference());
                let sees =
                    self.caller.may_see(self.kind, object.metadata.tenant.as_ref(), &object.metadata.name);
                Ok(sees.then_some((Changed::Deleted, Some(object), version)))
            }
        }
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
            let detail = format!("changes before version {oldest} are no longer kept");
            Problem::new(410, "gone", detail, "List again, and watch from the version of the list.")
        }
        StoreError::Closed => refuse::stopping(),
        error => StateError::from(error).into(),
    }
}
