//! Which object has a name now, as the store has it: for what is kept of objects longer than they are there. Read once for each name.

use std::collections::BTreeMap;

use mvm_proto::TenantId;
use mvm_proto::object::{Kind, Object, kind_named};

use super::record::{load_object, object_key};
use crate::stored::{Backend, StateError};

type Named = (&'static str, Option<TenantId>, String);

#[derive(Debug)]
pub(crate) struct Uids<'a> {
    store: &'a Backend,
    known: BTreeMap<Named, Option<String>>,
}

impl<'a> Uids<'a> {
    pub(crate) fn new(store: &'a Backend) -> Self {
        Self { store, known: BTreeMap::new() }
    }

    /// The uid of the object of this name; none: there is none.
    pub(crate) async fn of(
        &mut self,
        kind: &'static Kind,
        tenant: Option<&TenantId>,
        name: &str,
    ) -> Result<Option<String>, StateError> {
        let named = (kind.name, tenant.cloned(), name.to_owned());
        if let Some(known) = self.known.get(&named) {
            return Ok(known.clone());
        }
        let found = load_object(self.store, &object_key(kind, tenant, name)).await?;
        let uid = found.map(|(object, _)| object.metadata.uid);
        self.known.insert(named, uid.clone());
        Ok(uid)
    }

    pub(crate) async fn of_tenant(&mut self, tenant: &TenantId) -> Result<Option<String>, StateError> {
        match kind_named("tenants") {
            Ok(kind) => self.of(kind, None, tenant.as_str()).await,
            Err(_) => Ok(None),
        }
    }
}

/// The object of this name, if there is one.
pub(crate) async fn current(
    store: &Backend,
    kind: &Kind,
    tenant: Option<&TenantId>,
    name: &str,
) -> Result<Option<Object>, StateError> {
    Ok(load_object(store, &object_key(kind, tenant, name)).await?.map(|(object, _)| object))
}
