//! Values of Secrets on their way into the store: compared with those that are there, counted, and encrypted in the transaction
//! that writes the object. The object says of a value how long it is, and its digest.

use std::collections::BTreeMap;

use mvm_proto::object::{
    Declared, GivenValues, MAX_SECRET_BYTES, MAX_TENANT_SECRET_BYTES, MAX_TENANT_SECRETS, Object, PoolSpec,
    SecretObjectStatus, SecretSpec, TenantSpec, kind_named,
};
use mvm_proto::{Digest, FieldError, Problem, TenantId};
use mvm_store::{Guard, MAX_CHANGES, Store, Transaction};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Objects;
use super::record::{collection_prefix, decode_object, load_object, object_key};
use crate::refuse;
use crate::secrets::{
    Contents, SecretKeys, SecretRecord, SecretsError, StoredValues, load_contents, secret_key,
};
use crate::stored::{StateError, Versioned, encode, load, unchanged};

/// Pools that a refusal names.
const NAMED: usize = 5;

/// What a tenant's Secrets come to: guards their number and size against writes at the same time.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct SecretsOfTenant {
    secrets: u64,
    bytes: u64,
}

fn secrets_of_key(tenant: &TenantId) -> String {
    format!("secrets_of/{tenant}")
}

fn of_tenant(object: &Object) -> Result<&TenantId, Problem> {
    object.metadata.tenant.as_ref().ok_or_else(|| refuse::bad_request("the Secret names no tenant"))
}

fn failed(error: &SecretsError) -> Problem {
    refuse::internal(error)
}

/// What a request gives, for the record of its idempotency key: without the coordinator's key nothing is to be guessed from it.
pub(super) fn asked(keys: &SecretKeys, given: &GivenValues) -> Option<Digest> {
    let GivenValues(given) = given;
    if given.is_empty() {
        return None;
    }
    let values = Contents::with(None, given.clone()).ok()?;
    Some(values.tag(keys))
}

/// Finds the values of a declared Secret, given or as they are stored, and puts into its spec what is told of them. None of other
/// kinds.
pub(super) async fn resolve(
    objects: &Objects,
    declared: &mut Declared,
    before: Option<&Object>,
) -> Result<Option<Contents>, Problem> {
    if declared.kind.name != "Secret" {
        return Ok(None);
    }
    let spec: SecretSpec =
        serde_json::from_value(declared.spec.clone()).map_err(|error| refuse::internal(&error))?;
    let stored = match before {
        Some(before) => {
            let read = load_contents(
                &objects.store,
                &objects.secret_keys,
                of_tenant(before)?,
                &before.metadata.name,
            );
            match read.await {
                Ok(stored) => stored,
                Err(error @ SecretsError::State(_)) => return Err(failed(&error)),
                // It can be given anew, and nothing of it can be kept.
                Err(error) => {
                    let object = before.reference();
                    tracing::warn!(%object, error = %mvm_proto::text::chain(&error), "can't read the values of a Secret");
                    None
                }
            }
        }
        None => None,
    };
    let (mut values, mut errors) = (StoredValues::new(), Vec::new());
    for (name, value) in &spec.data {
        let kept = || {
            let stored = stored.as_ref()?;
            stored.shown(name).filter(|shown| shown == value).and_then(|_| stored.value(name).cloned())
        };
        match declared.given.0.get(name).cloned().or_else(kept) {
            Some(value) => drop(values.insert(name.clone(), value)),
            None => errors.push(FieldError {
                path: format!("spec.data.{name}"),
                expected: "must be a value, or what the server shows of the value that is there".to_owned(),
                found: "the digest of another one".to_owned(),
            }),
        }
    }
    let contents = Contents::with(stored.as_ref(), values).map_err(|error| failed(&error))?;
    if contents.bytes() > MAX_SECRET_BYTES as u64 {
        errors.push(FieldError {
            path: "spec.data".to_owned(),
            expected: format!("must have at most {MAX_SECRET_BYTES} bytes in all values"),
            found: format!("{} bytes", contents.bytes()),
        });
    }
    if !errors.is_empty() {
        let name = format!("secret/{}", declared.metadata.name);
        return Err(refuse::invalid(&name).with_errors(errors));
    }
    let shown: BTreeMap<_, _> =
        spec.data.keys().filter_map(|name| Some((name.clone(), contents.shown(name)?))).collect();
    declared.spec = serde_json::to_value(SecretSpec { data: shown }).unwrap_or(Value::Null);
    Ok(Some(contents))
}

/// Adds a Secret's values to the transaction that writes its object, where its tenant has room for them.
pub(super) async fn admit(
    objects: &Objects,
    object: &mut Object,
    before: Option<&Object>,
    contents: &Contents,
) -> Result<Transaction, Problem> {
    let tenant_id = of_tenant(object)?.clone();
    let tenants = kind_named("tenants").map_err(refuse::bad_request)?;
    let tenant_key = object_key(tenants, None, tenant_id.as_str());
    let (tenant, version) =
        load_object(&objects.store, &tenant_key).await?.ok_or_else(|| refuse::unknown_tenant(&tenant_id))?;
    if tenant.metadata.deleting_since.is_some() {
        return Err(refuse::being_deleted(&tenant.reference()));
    }
    let had = before.map(bytes_of);
    let key = secrets_of_key(&tenant_id);
    let found: Option<Versioned<SecretsOfTenant>> = load(&objects.store, &key).await?;
    let guard = unchanged(found.as_ref());
    let mut all = found.map(|found| found.value).unwrap_or_default();
    all.secrets += u64::from(had.is_none());
    all.bytes = all.bytes.saturating_sub(had.unwrap_or(0)) + contents.bytes();
    let over = |what: String| {
        let detail = format!("with {} tenant {tenant_id} would have {what}", object.reference());
        Problem::new(422, "quota_exceeded", detail, "Delete Secrets or values that are not needed.")
    };
    if all.secrets > MAX_TENANT_SECRETS as u64 && had.is_none() {
        return Err(over(format!("{} Secrets; {MAX_TENANT_SECRETS} are the most", all.secrets)));
    }
    if all.bytes > MAX_TENANT_SECRET_BYTES && contents.bytes() > had.unwrap_or(0) {
        let most = MAX_TENANT_SECRET_BYTES;
        return Err(over(format!("{} bytes in its Secrets; {most} are the most", all.bytes)));
    }
    let mut status: SecretObjectStatus = object.status().map_err(|error| refuse::internal(&error))?;
    status.observed.observed_generation = object.metadata.generation;
    status.bytes = contents.bytes();
    object.status = serde_json::to_value(&status).unwrap_or(Value::Null);
    let name = object.metadata.name.as_str();
    let record = SecretRecord::new(&objects.secret_keys, (&tenant_id, name, &object.metadata.uid), contents);
    let record = record.map_err(|error| failed(&error))?;
    Ok(Transaction::new()
        .guard(tenant_key, Guard::Version(version))
        .guard(key.as_str(), guard)
        .put(key.as_str(), encode(&all))
        .put(secret_key(&tenant_id, name), encode(&record)))
}

fn bytes_of(object: &Object) -> u64 {
    object.status::<SecretObjectStatus>().map_or(0, |status| status.bytes)
}

/// With a Secret go its values.
pub(super) async fn remove(
    objects: &Objects,
    txn: Transaction,
    object: &Object,
) -> Result<Transaction, Problem> {
    let tenant = of_tenant(object)?;
    let key = secrets_of_key(tenant);
    let found: Option<Versioned<SecretsOfTenant>> = load(&objects.store, &key).await?;
    let guard = unchanged(found.as_ref());
    let mut all = found.map(|found| found.value).unwrap_or_default();
    all.secrets = all.secrets.saturating_sub(1);
    all.bytes = all.bytes.saturating_sub(bytes_of(object));
    let txn = txn.delete(secret_key(tenant, &object.metadata.name)).guard(key.as_str(), guard);
    Ok(if all.secrets == 0 { txn.delete(key.as_str()) } else { txn.put(key.as_str(), encode(&all)) })
}

/// Refuses the deletion of a Secret that a pool names. Pools that are being deleted start nothing any more.
pub(super) async fn refuse_in_use(objects: &Objects, object: &Object) -> Result<(), Problem> {
    let pools = kind_named("pools").map_err(refuse::bad_request)?;
    let listed = objects.store.list(&collection_prefix(pools, Some(of_tenant(object)?))).await;
    let mut using = Vec::new();
    for entry in listed.map_err(StateError::from)?.entries {
        let pool = decode_object(&entry)?;
        let names = pool.spec::<PoolSpec>().map(|spec| spec.secrets).unwrap_or_default();
        if pool.metadata.deleting_since.is_none() && names.contains(&object.metadata.name) {
            using.push(pool.reference());
        }
    }
    if using.is_empty() {
        return Ok(());
    }
    let more = using.len().saturating_sub(NAMED);
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    using.truncate(NAMED);
    let detail = format!("{} is named by {}{rest}", object.reference(), using.join(", "));
    let advice = "Take it out of the pools' `secrets` first. With --force it is deleted all the same: what runs goes on, and \
                  the pools start nothing until there is one again.";
    Err(Problem::new(409, "secret_in_use", detail, advice))
}

/// Deletes all Secrets of a tenant that is deleted with its data.
pub(super) async fn remove_all(objects: &Objects, tenant: &TenantId) -> Result<(), Problem> {
    let kind = kind_named("secrets").map_err(refuse::bad_request)?;
    let listed =
        objects.store.list(&collection_prefix(kind, Some(tenant))).await.map_err(StateError::from)?;
    let mut keys: Vec<String> = Vec::new();
    for entry in &listed.entries {
        let name = entry.key.rsplit('/').next().unwrap_or_default();
        keys.extend([entry.key.clone(), secret_key(tenant, name)]);
    }
    // Both of one are in one transaction, and the count goes last.
    keys.push(secrets_of_key(tenant));
    for some in keys.chunks(MAX_CHANGES) {
        let txn = some.iter().fold(Transaction::new(), |txn, key| txn.delete(key.as_str()));
        objects.store.commit(txn).await.map_err(StateError::from)?;
    }
    Ok(())
}

/// Whether a tenant's Secrets go with it.
pub(super) fn go_with(tenant: &Object) -> bool {
    use mvm_proto::object::OnDelete;
    tenant.spec::<TenantSpec>().is_ok_and(|spec| spec.on_delete == OnDelete::Delete)
}
