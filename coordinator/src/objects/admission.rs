//! What must hold in the cluster for an object to be taken, and what comes with it: one function per kind that has such
//! rules.

use mvm_proto::document::{DesiredCounts, DesiredState, MAX_DOCUMENT_BYTES};
use mvm_proto::object::{
    ApiKeySpec, ApiKeyStatus, Object, PoolSpec, TenantObjectStatus, TenantSpec, kind_named,
};
use mvm_proto::{FieldError, NodeId, Problem, TenantId, Timestamp};
use mvm_store::{Guard, Store, Transaction};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Objects;
use super::keys::{key_record_key, new_key};
use super::network::{NETWORKS_KEY, Networks};
use super::record::{collection_prefix, load_object, object_key};
use crate::records::{NodeRecord, node_key};
use crate::refuse;
use crate::render;
use crate::stored::{Versioned, encode, load, unchanged};

/// What an admitted object brings into its transaction.
#[derive(Default)]
pub(super) struct Admitted {
    pub(super) txn: Transaction,
    /// The text of a new key.
    pub(super) secret: Option<String>,
}

/// How often pools and keys of a tenant were made or went: guards their number against writes at the same time.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct PoolsOfTenant {
    /// Grows with every pool that is made or goes, and every key that is made.
    pub(super) changes: u64,
}

pub(super) fn pools_of_key(tenant: &str) -> String {
    format!("pools_of/{tenant}")
}

/// Holds `object` against the cluster; `before` is the stored one.
pub(super) async fn admit(
    objects: &Objects,
    object: &mut Object,
    before: Option<&Object>,
    now: Timestamp,
) -> Result<Admitted, Problem> {
    match object.kind.as_str() {
        "Tenant" => tenant(objects, object, before, now).await,
        "Pool" => pool(objects, object, before, now).await,
        "Node" => node(objects, object, before).await,
        "ApiKey" => api_key(objects, object, before).await,
        _ => Ok(Admitted::default()),
    }
}

async fn tenant(
    objects: &Objects,
    object: &mut Object,
    before: Option<&Object>,
    now: Timestamp,
) -> Result<Admitted, Problem> {
    let spec: TenantSpec = typed(object)?;
    let mut status: TenantObjectStatus = object.status().map_err(|error| refuse::internal(&error))?;
    // A subnet that was given stays, also where the user names it later.
    if before.is_some() {
        return match (spec.network.subnet, status.subnet) {
            (Some(wanted), Some(given)) if wanted != given => Err(refuse::invalid(&object.reference())
                .with_errors(vec![FieldError {
                    path: "spec.network.subnet".to_owned(),
                    expected: format!("must stay {given}: instances have addresses in it"),
                    found: wanted.to_string(),
                }])),
            _ => {
                // What a tenant says stands in each of its documents.
                let more = serde_json::to_vec(&object.spec).unwrap_or_default().len();
                check_size(objects, object, more, now)?;
                Ok(Admitted::default())
            }
        };
    }
    let found: Option<Versioned<Networks>> = load(&objects.store, NETWORKS_KEY).await?;
    let guard = unchanged(found.as_ref());
    let mut networks = found.map(|found| found.value).unwrap_or_default();
    let name = &object.metadata.name;
    let id: TenantId = name.parse().map_err(|error| refuse::bad_request(format!("the name {error}")))?;
    let (net_id, subnet) = networks.take(&id, spec.network.subnet, now)?;
    (status.net_id, status.subnet) = (Some(net_id), Some(subnet));
    object.status = serde_json::to_value(&status).unwrap_or(Value::Null);
    let txn = Transaction::new().guard(NETWORKS_KEY, guard).put(NETWORKS_KEY, encode(&networks));
    Ok(Admitted { txn, secret: None })
}

async fn pool(
    objects: &Objects,
    object: &Object,
    before: Option<&Object>,
    now: Timestamp,
) -> Result<Admitted, Problem> {
    let spec: PoolSpec = typed(object)?;
    let tenant_id =
        object.metadata.tenant.clone().ok_or_else(|| refuse::bad_request("the pool names no tenant"))?;
    let (tenant, tenant_key, version) = living_tenant(objects, &tenant_id).await?;
    let tenant_spec: TenantSpec = typed(&tenant)?;
    let mut errors = over_quota(&spec, &tenant_spec);
    let was = before.and_then(|before| before.spec::<PoolSpec>().ok());
    errors.extend(refused_image(&spec, was.as_ref(), &tenant_id, &tenant_spec));
    let mut txn = Transaction::new().guard(tenant_key, Guard::Version(version));
    if before.is_none() {
        // Before they are listed: one that is made meanwhile makes this transaction fail.
        txn = count_pools(objects, txn, tenant_id.as_str()).await?;
        let prefix = collection_prefix(kind_named("pools").map_err(refuse::bad_request)?, Some(&tenant_id));
        let pools = objects.store.list(&prefix).await.map_err(crate::stored::StateError::from)?.entries.len();
        if pools >= usize::try_from(tenant_spec.quotas.max_pools).unwrap_or(usize::MAX) {
            let detail =
                format!("tenant {tenant_id} has {pools} pools, as many as its quota max_pools allows");
            return Err(Problem::new(
                422,
                "quota_exceeded",
                detail,
                "Delete a pool, or raise the tenant's quota.",
            ));
        }
    }
    // What every node would refuse is refused here, in the words of the document's own rules.
    let rendered = render::alone(&objects.cluster, &tenant, &object.metadata.name, &spec);
    errors.extend(rendered.err().into_iter().flatten());
    if !errors.is_empty() {
        return Err(refuse::invalid(&object.reference()).with_errors(errors));
    }
    if let Ok(document) = render::alone(&objects.cluster, &tenant, &object.metadata.name, &spec) {
        check_images(objects, &document, now)?;
        check_size(objects, object, serde_json::to_vec(&document).unwrap_or_default().len(), now)?;
    }
    Ok(Admitted { txn, secret: None })
}

/// Whether the documents of all nodes are small enough with an object that adds so many bytes to some of them.
fn check_size(objects: &Objects, object: &Object, more: usize, now: Timestamp) -> Result<(), Problem> {
    // Tried on a copy, so that sessions and placement go on meanwhile.
    let near =
        Some(objects.world.lock()).filter(|world| world.may_be_too_large(more)).map(|world| world.clone());
    let too_large = near.and_then(|world| world.too_large(object, &objects.cluster, now));
    let Some((node, bytes)) = too_large else { return Ok(()) };
    let detail = format!(
        "with {} the document of node {node} would have {bytes} bytes; the limit is {MAX_DOCUMENT_BYTES}",
        object.reference()
    );
    let advice = "Make the workloads of pools smaller (`workload.env`, `workload.args`), or keep pools from this node: \
                  `placement.node_labels`, `placement.max_per_node`, or `mvm cordon` for new ones.";
    Err(Problem::new(422, "document_too_large", detail, advice))
}

/// Whether agents would take the images, by the trust that this coordinator has.
fn check_images(objects: &Objects, document: &DesiredState, now: Timestamp) -> Result<(), Problem> {
    objects.trust.current().check_images(document, now).map_err(|error| error.to_problem())
}

/// A pool is made or goes, or a key is made: what counts them at the same time has to count again.
pub(super) async fn count_pools(
    objects: &Objects,
    txn: Transaction,
    tenant: &str,
) -> Result<Transaction, Problem> {
    let key = pools_of_key(tenant);
    let found: Option<Versioned<PoolsOfTenant>> = load(&objects.store, &key).await?;
    let changes = found.as_ref().map_or(0, |found| found.value.changes) + 1;
    Ok(txn
        .guard(key.as_str(), unchanged(found.as_ref()))
        .put(key.as_str(), encode(&PoolsOfTenant { changes })))
}

fn over_quota(spec: &PoolSpec, tenant: &TenantSpec) -> Vec<FieldError> {
    let DesiredCounts { running, warm, sleeping } = spec.counts.into();
    let total = u64::from(running) + u64::from(warm) + u64::from(sleeping);
    let most = tenant.quotas.max_instances_per_pool;
    let is_over = total > u64::from(most);
    let error = || FieldError {
        path: "spec.counts".to_owned(),
        expected: format!("must add up to at most {most}, the tenant's quota max_instances_per_pool"),
        found: total.to_string(),
    };
    is_over.then(error).into_iter().collect()
}

/// An image that the tenant may not boot from. A pool that had it before its tenant's list changed keeps it.
fn refused_image(
    spec: &PoolSpec,
    before: Option<&PoolSpec>,
    tenant: &TenantId,
    of: &TenantSpec,
) -> Option<FieldError> {
    let is_kept = before.is_some_and(|before| before.image == spec.image);
    (!is_kept && !of.images.allows(&spec.image)).then(|| FieldError {
        path: "spec.image".to_owned(),
        expected: format!("must be one that tenant {tenant} may use: {}", of.images.allow.join(", ")),
        found: mvm_proto::json::quote(&spec.image.r#ref),
    })
}

async fn node(objects: &Objects, object: &Object, before: Option<&Object>) -> Result<Admitted, Problem> {
    if before.is_some() {
        return Ok(Admitted::default());
    }
    let name = &object.metadata.name;
    let node: NodeId = name.parse().map_err(|error| refuse::bad_request(format!("the name {error}")))?;
    let record: Option<Versioned<NodeRecord>> = load(&objects.store, &node_key(&node)).await?;
    match record {
        Some(found) if found.value.removed_at.is_none() => Ok(Admitted::default()),
        _ => Err(refuse::unknown_node(&node)),
    }
}

/// The tenant that something is made for, with its key in the store and the version that guards it.
async fn living_tenant(objects: &Objects, id: &TenantId) -> Result<(Object, String, u64), Problem> {
    let tenants = kind_named("tenants").map_err(refuse::bad_request)?;
    let key = object_key(tenants, None, id.as_str());
    let found = load_object(&objects.store, &key).await?;
    let (tenant, version) = found.ok_or_else(|| refuse::unknown_tenant(id))?;
    if tenant.metadata.deleting_since.is_some() {
        return Err(refuse::being_deleted(&tenant.reference()));
    }
    Ok((tenant, key, version))
}

async fn api_key(
    objects: &Objects,
    object: &mut Object,
    before: Option<&Object>,
) -> Result<Admitted, Problem> {
    if before.is_some() {
        return Ok(Admitted::default());
    }
    let spec: ApiKeySpec = typed(object)?;
    let mut txn = Transaction::new();
    if let Some(id) = &spec.tenant {
        let (_, key, version) = living_tenant(objects, id).await?;
        // Guarded by the number, too: with its tenant go all keys that were made until then.
        txn = count_pools(objects, txn.guard(key, Guard::Version(version)), id.as_str()).await?;
    }
    let key = new_key(&object.metadata.name, &object.metadata.uid)?;
    let status = ApiKeyStatus { key_id: key.id.clone(), ..ApiKeyStatus::default() };
    object.status = serde_json::to_value(&status).unwrap_or(Value::Null);
    let record_key = key_record_key(&key.id);
    let txn = txn.guard(record_key.as_str(), Guard::Absent).put(record_key.as_str(), encode(&key.record));
    Ok(Admitted { txn, secret: Some(key.text) })
}

fn typed<T: serde::de::DeserializeOwned>(object: &Object) -> Result<T, Problem> {
    object.spec().map_err(|error| refuse::internal(&error))
}
