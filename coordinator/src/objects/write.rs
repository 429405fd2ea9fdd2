//! Writing objects: one way for all kinds and all callers.

use mvm_proto::object::{ApiKeySpec, Declared, Kind, ManagedBy, Object, Outcome, kind_named, read};
use mvm_proto::{Digest, NodeId, Problem, TenantId, Timestamp};
use mvm_store::{Guard, Store, StoreError, Transaction};
use mvm_telemetry::{Attribute, current};
use serde_json::{Value, json};

use super::Objects;
use super::access::{Caller, Verb, allowed};
use super::admission::{admit, count_pools};
use super::audit::{self, AuditRecord};
pub(crate) use super::decide::Mode;
use super::decide::decide;
use super::network::{NETWORKS_KEY, Networks};
use super::once::Once;
use super::record::{collection_prefix, decode_object, encode_object, load_object, object_key};
use super::values;
use crate::records::{OBJECTS, assigned_key};
use crate::refuse;
use crate::stored::{MAX_TRIES, StateError, Versioned, encode, load, now};

/// One write that a caller asks for.
pub(crate) struct Writing<'a> {
    pub(crate) caller: &'a Caller,
    pub(crate) declared: Declared,
    pub(crate) mode: Mode,
    pub(crate) dry_run: bool,
    pub(crate) idempotency_key: Option<&'a str>,
}

/// What a write did.
pub(crate) struct Written {
    pub(crate) outcome: Outcome,
    pub(crate) object: Object,
    /// The text of a new key.
    pub(crate) secret: Option<String>,
}

/// What a deletion did.
pub(crate) struct Removed {
    /// Not: its finalizers have to be done first.
    pub(crate) gone: bool,
    pub(crate) object: Object,
}

/// Creates or changes an object.
pub(crate) async fn apply(objects: &Objects, writing: Writing<'_>) -> Result<Written, Problem> {
    let Writing { caller, mut declared, mode, dry_run, idempotency_key } = writing;
    let (kind, metadata) = (declared.kind, declared.metadata.clone());
    allowed(caller, Verb::Write, kind, metadata.tenant.as_ref(), &metadata.name)?;
    objects.pace(caller)?;
    let key = object_key(kind, metadata.tenant.as_ref(), &metadata.name);
    tell(&key, None);
    let asked = || {
        let given = values::asked(&objects.secret_keys, &declared.given);
        let given = given.map_or_else(String::new, |digest| format!("\n{digest}"));
        format!("{key}\n{}\n{:?}\n{:?}{given}", declared.spec, metadata.labels, metadata.annotations)
    };
    let once = idempotency_key.map(|text| Once::new(&caller.name, text, &asked())).transpose()?;
    // Writers of one object take turns here; the guards are for other processes.
    let _turn = objects.turns.take(&key).await;
    for _ in 0..MAX_TRIES {
        let now = now();
        let found = load_object(&objects.store, &key).await?;
        if let Some(uid) = match &once {
            Some(once) => once.made(&objects.store, now).await?,
            None => None,
        } {
            return match found.filter(|(object, _)| object.metadata.uid == uid) {
                Some((object, _)) => Ok(Written { outcome: Outcome::Unchanged, object, secret: None }),
                None => Err(refuse::no_object(kind, metadata.tenant.as_ref(), &metadata.name)),
            };
        }
        let before = found.as_ref().map(|(object, _)| object);
        let contents = values::resolve(objects, &mut declared, before).await?;
        let uid = || format!("{:032x}", fastrand::u128(..));
        let (outcome, mut object) = decide(before, &declared, mode, uid, now)?;
        tell(&key, Some(outcome));
        if outcome == Outcome::Unchanged {
            return Ok(Written { outcome, object, secret: None });
        }
        let mut admitted = admit(objects, &mut object, before, now).await?;
        if let Some(contents) = &contents {
            admitted.txn = values::admit(objects, &mut object, before, contents).await?;
        }
        if dry_run {
            return Ok(Written { outcome, object, secret: None });
        }
        let guard = found.as_ref().map_or(Guard::Absent, |(_, version)| Guard::Version(*version));
        let encoded = encode_object(&object);
        let record = AuditRecord {
            before: before.map(|before| Digest::of(&encode_object(before))),
            after: Some(Digest::of(&encoded)),
            ..AuditRecord::new(caller, object.reference(), outcome, now)
        };
        let mut txn = admitted.txn.guard(key.as_str(), guard).put(key.as_str(), encoded);
        txn = audit::note(txn, &record);
        if let Some(once) = &once {
            txn = once.note(txn, &object.metadata.uid, now);
        }
        let cause = objects.causes.writing(&key);
        match objects.store.commit(txn).await {
            Ok(committed) => {
                cause.done();
                object.metadata.resource_version = committed.revision.to_string();
                tracing::info!(object = %object.reference(), outcome = outcome.as_str(), by = %caller.name, "wrote");
                return Ok(Written { outcome, object, secret: admitted.secret });
            }
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(StateError::from(error).into()),
        }
    }
    Err(refuse::too_busy("the object"))
}

/// Says of the request which object it is of, and what came of that.
fn tell(key: &str, outcome: Option<Outcome>) {
    current::set(Attribute::Object, key.strip_prefix(OBJECTS).unwrap_or(key));
    if let Some(outcome) = outcome {
        current::set(Attribute::Outcome, outcome.as_str());
    }
}

/// Deletes an object, or marks it as being deleted where its finalizers have to be done first.
pub(crate) async fn delete(
    objects: &Objects,
    caller: &Caller,
    kind: &'static Kind,
    tenant: Option<&TenantId>,
    name: &str,
    options: &DeleteOptions<'_>,
) -> Result<Removed, Problem> {
    allowed(caller, Verb::Write, kind, tenant, name)?;
    objects.pace(caller)?;
    let unknown = || refuse::no_object(kind, tenant, name);
    mvm_proto::id::check_name(name).map_err(|_| unknown())?;
    if kind.name == "Node" {
        let advice = format!("Take it out of the cluster: `mvm node remove {name}`.");
        return Err(Problem::new(
            422,
            "made_by_enrolment",
            "nodes come and go by enrolment and removal",
            advice,
        ));
    }
    let key = object_key(kind, tenant, name);
    tell(&key, Some(Outcome::Deleted));
    let _turn = objects.turns.take(&key).await;
    for _ in 0..MAX_TRIES {
        let now = now();
        let (mut object, version) = load_object(&objects.store, &key).await?.ok_or_else(unknown)?;
        let seen = options.resource_version;
        if !seen.is_empty() && seen != object.metadata.resource_version {
            return Err(refuse::stale(&object.reference(), seen, &object.metadata.resource_version));
        }
        if kind.name == "Secret" && !options.force {
            values::refuse_in_use(objects, &object).await?;
        }
        let gone = options.force || object.metadata.finalizers.is_empty();
        if options.dry_run || (!gone && object.metadata.deleting_since.is_some()) {
            return Ok(Removed { gone, object });
        }
        let record = AuditRecord {
            before: Some(Digest::of(&encode_object(&object))),
            ..AuditRecord::new(caller, object.reference(), Outcome::Deleted, now)
        };
        let mut txn = Transaction::new().guard(key.as_str(), Guard::Version(version));
        txn = if gone {
            remove(objects, txn, &object, now).await?
        } else {
            object.metadata.deleting_since = Some(now);
            txn.put(key.as_str(), encode_object(&object))
        };
        let cause = objects.causes.writing(&key);
        match objects.store.commit(audit::note(txn, &record)).await {
            Ok(committed) => {
                cause.done();
                object.metadata.resource_version = committed.revision.to_string();
                tracing::info!(object = %object.reference(), gone, by = %caller.name, "deleted");
                return Ok(Removed { gone, object });
            }
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(StateError::from(error).into()),
        }
    }
    Err(refuse::too_busy("the object"))
}

/// How an object is deleted.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DeleteOptions<'a> {
    /// Refuse when it has changed since this version; empty: whatever version.
    pub(crate) resource_version: &'a str,
    pub(crate) dry_run: bool,
    /// Without its finalizers.
    pub(crate) force: bool,
}

/// Takes an object out of the store, with what belongs to it alone.
async fn remove(
    objects: &Objects,
    txn: Transaction,
    object: &Object,
    now: Timestamp,
) -> Result<Transaction, Problem> {
    let kind = kind_named(&object.kind).map_err(refuse::bad_request)?;
    let mut txn = txn.delete(object_key(kind, object.metadata.tenant.as_ref(), &object.metadata.name));
    match kind.name {
        "Tenant" => {
            let pools = kind_named("pools").map_err(refuse::bad_request)?;
            let tenant: TenantId = object
                .metadata
                .name
                .parse()
                .map_err(|error| refuse::bad_request(format!("the name {error}")))?;
            // Before they are listed: a pool or key that is made meanwhile makes this transaction fail.
            txn = count_pools(objects, txn, tenant.as_str()).await?;
            let left = objects
                .store
                .list(&collection_prefix(pools, Some(&tenant)))
                .await
                .map_err(StateError::from)?;
            if !left.entries.is_empty() {
                let detail = format!("tenant {tenant} still has {} pools", left.entries.len());
                return Err(Problem::new(
                    409,
                    "has_pools",
                    detail,
                    "Delete its pools first, or delete it without --force.",
                ));
            }
            if values::go_with(object) {
                values::remove_all(objects, &tenant).await?;
            }
            let found: Option<Versioned<Networks>> = load(&objects.store, NETWORKS_KEY).await?;
            if let Some(found) = found {
                let mut networks = found.value;
                networks.free(&tenant, &objects.nodes_of(&tenant), now);
                txn = txn
                    .guard(NETWORKS_KEY, Guard::Version(found.version))
                    .put(NETWORKS_KEY, encode(&networks));
            }
            delete_keys_of(objects, &tenant, now).await?;
        }
        "Pool" => {
            if let Some(tenant) = &object.metadata.tenant {
                txn = count_pools(objects, txn, tenant.as_str()).await?;
            }
        }
        "Secret" => txn = values::remove(objects, txn, object).await?,
        "ApiKey" => txn = delete_key(txn, object),
        _ => {}
    }
    Ok(txn)
}

/// With a tenant go the keys that reach it alone: the next tenant of that name is another.
async fn delete_keys_of(objects: &Objects, tenant: &TenantId, now: Timestamp) -> Result<(), Problem> {
    let kind = kind_named("api-keys").map_err(refuse::bad_request)?;
    let all = objects.store.list(&collection_prefix(kind, None)).await.map_err(StateError::from)?;
    for entry in all.entries {
        let object = decode_object(&entry)?;
        let spec: ApiKeySpec = object.spec().map_err(|error| refuse::internal(&error))?;
        if spec.tenant.as_ref() != Some(tenant) {
            continue;
        }
        let record = AuditRecord {
            before: Some(Digest::of(&encode_object(&object))),
            ..AuditRecord::new(&Caller::coordinator(), object.reference(), Outcome::Deleted, now)
        };
        let txn = Transaction::new().guard(entry.key.as_str(), Guard::Version(entry.version));
        let txn = delete_key(txn.delete(entry.key.as_str()), &object);
        match objects.store.commit(audit::note(txn, &record)).await {
            Ok(_) => tracing::info!(object = %object.reference(), %tenant, "deleted with its tenant"),
            // It was changed or deleted: the caller tries again.
            Err(StoreError::Conflict { .. }) => return Err(refuse::too_busy("the keys of the tenant")),
            Err(error) => return Err(StateError::from(error).into()),
        }
    }
    Ok(())
}

/// The text of a key counts no more.
fn delete_key(txn: Transaction, object: &Object) -> Transaction {
    match object.status.get("key_id").and_then(Value::as_str) {
        Some(id) => txn.delete(super::keys::key_record_key(id)),
        None => txn,
    }
}

/// The finalizers of an object that is being deleted are done: it goes.
pub(crate) async fn finish(objects: &Objects, object: &Object, now: Timestamp) -> Result<(), Problem> {
    let kind = kind_named(&object.kind).map_err(refuse::bad_request)?;
    let key = object_key(kind, object.metadata.tenant.as_ref(), &object.metadata.name);
    let _turn = objects.turns.take(&key).await;
    let decided_on = &object.metadata.uid;
    let Some((object, version)) = load_object(&objects.store, &key).await? else { return Ok(()) };
    // It may have been forced away and declared again meanwhile.
    if object.metadata.deleting_since.is_none() || object.metadata.uid != *decided_on {
        return Ok(());
    }
    let txn = Transaction::new().guard(key.as_str(), Guard::Version(version));
    let txn = remove(objects, txn, &object, now).await?;
    match objects.store.commit(txn).await {
        Ok(_) | Err(StoreError::Conflict { .. }) => Ok(()),
        Err(error) => Err(StateError::from(error).into()),
    }
}

/// Marks every pool of a tenant that is being deleted.
pub(crate) async fn delete_pools_of(
    objects: &Objects,
    tenant: &TenantId,
    now: Timestamp,
) -> Result<(), Problem> {
    let kind = kind_named("pools").map_err(refuse::bad_request)?;
    let pools = objects.store.list(&collection_prefix(kind, Some(tenant))).await.map_err(StateError::from)?;
    for entry in pools.entries {
        let mut object = decode_object(&entry)?;
        if object.metadata.deleting_since.is_some() {
            continue;
        }
        object.metadata.deleting_since = Some(now);
        let txn = Transaction::new().guard(entry.key.as_str(), Guard::Version(entry.version));
        match objects.store.commit(txn.put(entry.key.as_str(), encode_object(&object))).await {
            Ok(_) | Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(StateError::from(error).into()),
        }
    }
    Ok(())
}

/// What declaring an object would make of the stored one; nothing is written.
pub(crate) async fn propose(
    objects: &Objects,
    caller: &Caller,
    declared: &Declared,
) -> Result<(Outcome, Option<Object>, Object), Problem> {
    let (kind, metadata) = (declared.kind, &declared.metadata);
    allowed(caller, Verb::Write, kind, metadata.tenant.as_ref(), &metadata.name)?;
    let key = object_key(kind, metadata.tenant.as_ref(), &metadata.name);
    let before = load_object(&objects.store, &key).await?.map(|(object, _)| object);
    let mut declared = declared.clone();
    values::resolve(objects, &mut declared, before.as_ref()).await?;
    let (outcome, object) = decide(before.as_ref(), &declared, Mode::Apply, String::new, now())?;
    Ok((outcome, before, object))
}

/// Changes the spec of an object as a part of something else that a caller asks for.
pub(crate) async fn change_spec(
    objects: &Objects,
    caller: &Caller,
    kind: &Kind,
    tenant: Option<&TenantId>,
    name: &str,
    change: impl Fn(&Object) -> Option<Value>,
) -> Result<(), Problem> {
    let key = object_key(kind, tenant, name);
    for _ in 0..MAX_TRIES {
        let Some((mut object, version)) = load_object(&objects.store, &key).await? else { return Ok(()) };
        let before = Digest::of(&encode_object(&object));
        match change(&object) {
            Some(spec) if spec != object.spec => object.spec = spec,
            _ => return Ok(()),
        }
        object.metadata.generation += 1;
        let encoded = encode_object(&object);
        let record = AuditRecord {
            before: Some(before),
            after: Some(Digest::of(&encoded)),
            ..AuditRecord::new(caller, object.reference(), Outcome::Configured, now())
        };
        let txn = Transaction::new().guard(key.as_str(), Guard::Version(version));
        match objects.store.commit(audit::note(txn.put(key.as_str(), encoded), &record)).await {
            Ok(_) => return Ok(()),
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(StateError::from(error).into()),
        }
    }
    Err(refuse::too_busy("the object"))
}

/// Makes the object of an enrolled node, if it has none. One that got documents by push before goes on with them.
pub(crate) async fn ensure_node(objects: &Objects, node: &NodeId) -> Result<(), Problem> {
    let kind = kind_named("nodes").map_err(refuse::bad_request)?;
    let key = object_key(kind, None, node.as_str());
    if objects.store.get(&key).await.map_err(StateError::from)?.is_some() {
        return Ok(());
    }
    let was_pushed = objects.store.get(&assigned_key(node)).await.map_err(StateError::from)?.is_some();
    let managed_by = if was_pushed { ManagedBy::Push } else { ManagedBy::Objects };
    let declared = json!({
        "api_version": mvm_proto::object::API_VERSION,
        "kind": kind.name,
        "metadata": { "name": node },
        "spec": { "managed_by": managed_by.as_str() },
    });
    let declared = read(declared.to_string().as_bytes())
        .map_err(|errors| refuse::invalid(node.as_str()).with_errors(errors))?;
    let uid = || format!("{:032x}", fastrand::u128(..));
    let (_, object) = decide(None, &declared, Mode::Create, uid, now())?;
    let txn = Transaction::new().guard(key.as_str(), Guard::Absent).put(key.as_str(), encode_object(&object));
    match objects.store.commit(txn).await {
        Ok(_) | Err(StoreError::Conflict { .. }) => Ok(()),
        Err(error) => Err(StateError::from(error).into()),
    }
}

/// With a node that is removed from the cluster goes its object, in the same transaction.
pub(crate) fn remove_node(
    txn: Transaction,
    node: &NodeId,
    by: &Caller,
    now: Timestamp,
) -> Result<Transaction, Problem> {
    let kind = kind_named("nodes").map_err(refuse::bad_request)?;
    let record = AuditRecord::new(by, format!("node/{node}"), Outcome::Deleted, now);
    Ok(audit::note(txn.delete(object_key(kind, None, node.as_str())), &record))
}
