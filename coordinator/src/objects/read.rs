//! Reading objects: one, or a page of a list.

use std::ops::ControlFlow;

use mvm_proto::object::{FieldSelector, Kind, LabelSelector, Metadata, Object};
use mvm_proto::{Problem, TenantId};
use mvm_store::Store;
use mvm_telemetry::{Attribute, current};

use super::access::{Caller, Verb, allowed};
use super::record::{collection_prefix, decode_object, object_key};
use crate::records::OBJECTS;
use crate::refuse;
use crate::stored::{Backend, StateError};

/// The most objects of one page, and how many there are where the caller does not say.
const MAX_PAGE: usize = 1000;
/// Bytes of one page, as they are stored. A page is one message, with what the fleet says of each object beside it; what one
/// tenant declares must not make the lists of all tenants too large to be sent.
const MAX_PAGE_BYTES: usize = 1024 * 1024;

/// Which objects of a kind are meant.
#[derive(Debug, Clone, Default)]
pub(crate) struct Filter {
    pub(crate) tenant: Option<TenantId>,
    pub(crate) labels: LabelSelector,
    pub(crate) fields: FieldSelector,
}

impl Filter {
    pub(crate) fn new(tenant: &str, labels: &str, fields: &str) -> Result<Self, Problem> {
        let tenant = match tenant {
            "" => None,
            text => Some(text.parse().map_err(|error| refuse::bad_request(format!("tenant {error}")))?),
        };
        let labels =
            labels.parse().map_err(|error| refuse::bad_request(format!("label_selector {error}")))?;
        let fields =
            fields.parse().map_err(|error| refuse::bad_request(format!("field_selector {error}")))?;
        Ok(Self { tenant, labels, fields })
    }

    /// Of a caller that reaches one tenant alone, the objects of that tenant.
    pub(crate) fn within(mut self, caller: &Caller, kind: &Kind) -> Self {
        if kind.is_tenant_scoped() && self.tenant.is_none() {
            self.tenant.clone_from(&caller.tenant);
        }
        self
    }

    /// Whether an object of this name, as it is or was, may be one of those: names never change.
    pub(crate) fn may_match(&self, metadata: &Metadata) -> bool {
        self.fields.may_match_name(&metadata.name)
    }

    pub(crate) fn matches(&self, caller: &Caller, kind: &Kind, object: &Object) -> bool {
        caller.may_see(kind, object.metadata.tenant.as_ref(), &object.metadata.name)
            && self.labels.matches(&object.metadata.labels)
            && (self.fields.is_empty() || self.fields.matches(object))
    }
}

/// Some objects of a list, in the order of their tenants and names.
pub(crate) struct Page {
    pub(crate) objects: Vec<Object>,
    /// Where the next page begins; empty: there is none.
    pub(crate) continue_from: String,
    /// Watching after this revision misses nothing.
    pub(crate) revision: u64,
}

pub(crate) async fn get(
    store: &Backend,
    caller: &Caller,
    kind: &Kind,
    tenant: Option<&TenantId>,
    name: &str,
) -> Result<Object, Problem> {
    allowed(caller, Verb::Read, kind, tenant, name)?;
    let unknown = || refuse::no_object(kind, tenant, name);
    // What is no name is in no key.
    mvm_proto::id::check_name(name).map_err(|_| unknown())?;
    let key = object_key(kind, tenant, name);
    current::set(Attribute::Object, key.strip_prefix(OBJECTS).unwrap_or(&key));
    let entry = store.get(&key).await.map_err(StateError::from)?;
    Ok(decode_object(&entry.ok_or_else(unknown)?)?)
}

pub(crate) async fn list(
    store: &Backend,
    caller: &Caller,
    kind: &Kind,
    filter: &Filter,
    limit: usize,
    continue_from: &str,
) -> Result<Page, Problem> {
    allowed(caller, Verb::Read, kind, filter.tenant.as_ref(), "")?;
    let limit = if limit == 0 { MAX_PAGE } else { limit.min(MAX_PAGE) };
    let prefix = collection_prefix(kind, filter.tenant.as_ref());
    let listing = store.list(&prefix).await.map_err(StateError::from)?;
    let start = format!("{}{continue_from}", collection_prefix(kind, None));
    let begin = if continue_from.is_empty() {
        0
    } else {
        listing.entries.partition_point(|entry| entry.key <= start)
    };
    let (mut objects, mut bytes) = (Vec::new(), 0);
    let mut last = "";
    let more = listing.entries[begin..].iter().try_for_each(|entry| match decode_object(entry) {
        Ok(object) if filter.matches(caller, kind, &object) => {
            bytes += entry.value.len();
            if objects.len() == limit || (bytes > MAX_PAGE_BYTES && !objects.is_empty()) {
                return ControlFlow::Break(Ok(()));
            }
            objects.push(object);
            last = &entry.key;
            ControlFlow::Continue(())
        }
        Ok(_) => ControlFlow::Continue(()),
        Err(error) => ControlFlow::Break(Err(error)),
    });
    let continue_from = match more {
        ControlFlow::Break(Err(error)) => return Err(error.into()),
        ControlFlow::Break(Ok(())) => {
            last.strip_prefix(&collection_prefix(kind, None)).unwrap_or_default().to_owned()
        }
        ControlFlow::Continue(()) => String::new(),
    };
    Ok(Page { objects, continue_from, revision: listing.revision })
}
