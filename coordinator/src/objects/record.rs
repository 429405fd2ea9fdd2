//! How objects are kept in the store.
//!
//! ```text
//! objects/<plural>/<name>            an object of the cluster
//! objects/<plural>/<tenant>/<name>   an object of a tenant
//! ```

use mvm_proto::TenantId;
use mvm_proto::object::{Kind, Object};
use mvm_store::{Entry, Store};
use serde::{Deserialize, Serialize};

use crate::records::OBJECTS;
use crate::stored::{Backend, StateError, encode};

/// Where the objects of API keys are.
pub(crate) const API_KEY_OBJECTS: &str = "objects/api-keys/";
/// The version of the records that this build writes.
const SCHEMA: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Record {
    schema: u32,
    object: Object,
}

pub(crate) fn collection_prefix(kind: &Kind, tenant: Option<&TenantId>) -> String {
    match tenant {
        Some(tenant) => format!("{OBJECTS}{}/{tenant}/", kind.plural),
        None => format!("{OBJECTS}{}/", kind.plural),
    }
}

pub(crate) fn object_key(kind: &Kind, tenant: Option<&TenantId>, name: &str) -> String {
    collection_prefix(kind, tenant) + name
}

/// What is stored of an object. Its version is the store's, so it is in no record.
pub(super) fn encode_object(object: &Object) -> Vec<u8> {
    let mut object = object.clone();
    object.metadata.resource_version = String::new();
    encode(&Record { schema: SCHEMA, object })
}

/// The object of an entry, with its version.
pub(crate) fn decode_object(entry: &Entry) -> Result<Object, StateError> {
    let unreadable = |cause| StateError::Unreadable { key: entry.key.clone(), cause };
    let record: Record = serde_json::from_slice(&entry.value).map_err(unreadable)?;
    if record.schema > SCHEMA {
        let text =
            format!("it is of schema {}, and this version reads up to {SCHEMA}: upgrade", record.schema);
        return Err(unreadable(serde::de::Error::custom(text)));
    }
    let mut object = record.object;
    object.metadata.resource_version = entry.version.to_string();
    Ok(object)
}

/// An object and the version that guards it.
pub(super) async fn load_object(store: &Backend, key: &str) -> Result<Option<(Object, u64)>, StateError> {
    let Some(entry) = store.get(key).await? else { return Ok(None) };
    Ok(Some((decode_object(&entry)?, entry.version)))
}
