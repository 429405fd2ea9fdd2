//! The document of a node, from the declared objects that have a place on it: a function of them.

use std::borrow::Cow;
use std::collections::BTreeMap;

use mvm_planner::revision::revision_with;
use mvm_proto::document::{DesiredCounts, Network, Pool, Quotas, Resources, SCHEMA_VERSION, Tenant, Update};
use mvm_proto::object::{Object, PoolSpec, TenantObjectStatus, TenantSpec};
use mvm_proto::{ClusterId, DesiredState, Digest, FieldError, NodeId, PoolId, TenantId};

use crate::secrets::waiting;

/// A tenant as documents need it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RenderedTenant {
    pub(crate) spec: TenantSpec,
    pub(crate) network: Network,
}

impl RenderedTenant {
    /// None of an object whose network was not assigned, which admission does before it is stored.
    pub(crate) fn of(object: &Object) -> Option<Self> {
        let status: TenantObjectStatus = object.status().ok()?;
        let network = Network {
            tenant_net_id: status.net_id?,
            ipv4_subnet: status.subnet?,
            address_blocks: None,
            reserved_offsets: Vec::new(),
        };
        Some(Self { spec: object.spec().ok()?, network })
    }
}

/// What one tenant has on a node.
#[derive(Debug, Clone)]
pub(crate) struct Share<'a> {
    pub(crate) tenant: &'a RenderedTenant,
    pub(crate) quotas: Quotas,
    pub(crate) network: Network,
    pub(crate) pools: BTreeMap<PoolId, PoolShare<'a>>,
}

/// A pool on a node.
#[derive(Debug, Clone)]
pub(crate) struct PoolShare<'a> {
    /// With the revision that the node is to have.
    pub(crate) spec: Cow<'a, PoolSpec>,
    pub(crate) counts: DesiredCounts,
    pub(crate) update: Option<Update>,
    /// The digest of the bundle that its guests are given.
    pub(crate) secrets: Option<Digest>,
}

impl Share<'_> {
    /// Lowers the counts to what a document of these quotas and addresses may ask for: what is placed may have to wait
    /// until other nodes let go of theirs. What sleeps is lowered last, because it has memory and disks to lose.
    pub(crate) fn fit(&mut self) {
        let per_pool = self.quotas.max_instances_per_pool;
        let mut addresses = self.network.instance_capacity();
        let mut left: Vec<u32> = self.pools.iter().map(|_| per_pool).collect();
        let amounts: [fn(&mut DesiredCounts) -> &mut u32; 3] =
            [|counts| &mut counts.sleeping, |counts| &mut counts.running, |counts| &mut counts.warm];
        for amount in amounts {
            for (pool, left) in self.pools.values_mut().zip(&mut left) {
                let count = amount(&mut pool.counts);
                *count = (*count).min(*left).min(addresses);
                (*left, addresses) = (*left - *count, addresses - *count);
            }
        }
    }
}

/// The document that makes a node have these shares, and nothing else.
pub(crate) fn document(
    cluster: &ClusterId,
    node: &NodeId,
    shares: &BTreeMap<TenantId, Share<'_>>,
) -> DesiredState {
    let tenants = shares.iter().map(|(id, share)| Tenant {
        tenant_id: id.clone(),
        pinned: share.tenant.spec.pinned,
        network: share.network.clone(),
        quotas: share.quotas,
        secrets_hash: None,
        egress: share.tenant.spec.egress.clone(),
        pools: share.pools.iter().map(|(id, of)| pool(id, of)).collect(),
    });
    DesiredState {
        schema_version: SCHEMA_VERSION,
        node_id: node.clone(),
        cluster: Some(cluster.clone()),
        tenants: tenants.collect(),
        prune_unknown_tenants: true,
        prune_unknown_pools: true,
        removed_tenants: Vec::new(),
    }
}

/// The revision that a spec declares, whatever its secrets are.
pub(crate) fn revision(id: &PoolId, spec: &PoolSpec) -> Digest {
    let counts = DesiredCounts::default();
    let share = PoolShare { spec: Cow::Borrowed(spec), counts, update: None, secrets: None };
    revision_with(&pool(id, &share), None)
}

fn pool(id: &PoolId, share: &PoolShare<'_>) -> Pool {
    let spec = &*share.spec;
    let policies = spec.policies.clone();
    Pool {
        pool_id: id.clone(),
        flake_ref: spec.image.r#ref.clone(),
        profile: spec.profile.clone(),
        image_digest: spec.image.digest,
        role: policies.role,
        instance_resources: Resources::from(spec.resources),
        desired_counts: share.counts,
        pinned: policies.pinned,
        critical: policies.critical,
        runtime_policy: policies.runtime_policy,
        sleep_policy: policies.sleep_policy,
        seccomp_policy: policies.seccomp_policy,
        snapshot_compression: policies.snapshot_compression,
        snapshot_encryption: policies.snapshot_encryption,
        stopped_retention_seconds: policies.stopped_retention_seconds,
        persist: policies.persist,
        warmup: policies.warmup,
        io_limits: policies.io_limits,
        restart: policies.restart,
        health: policies.health,
        workload: policies.workload,
        secrets_hash: share.secrets,
        update: share.update,
    }
}

/// A document with this pool alone, read by the document's own strict rules.
pub(crate) fn alone(
    cluster: &ClusterId,
    tenant: &Object,
    name: &str,
    spec: &PoolSpec,
) -> Result<DesiredState, Vec<FieldError>> {
    let whole = |expected: &str| {
        vec![FieldError {
            path: String::new(),
            expected: expected.to_owned(),
            found: "something else".to_owned(),
        }]
    };
    let (Some(rendered), Ok(tenant_id), Ok(pool_id), Ok(node)) =
        (RenderedTenant::of(tenant), tenant.metadata.name.parse(), name.parse(), "n".parse())
    else {
        return Err(whole("must belong to a tenant that has a network"));
    };
    let counts = DesiredCounts { running: 1, warm: 0, sleeping: 0 };
    let quotas = Quotas { max_pools: 1, max_instances_per_pool: 1, ..rendered.spec.quotas.into() };
    let network = rendered.network.clone();
    let secrets = (!spec.secrets.is_empty()).then(|| waiting(&tenant_id, &spec.secrets));
    let share = PoolShare { spec: Cow::Borrowed(spec), counts, update: None, secrets };
    let pools = BTreeMap::from([(pool_id, share)]);
    let share = Share { tenant: &rendered, quotas, network, pools };
    let document = document(cluster, &node, &BTreeMap::from([(tenant_id, share)]));
    let text = serde_json::to_vec(&document).unwrap_or_default();
    DesiredState::parse(&text).map_err(|errors| {
        let own = "tenants[0].pools[0].";
        let of_spec = |error: FieldError| match error.path.strip_prefix(own) {
            Some(field) => FieldError { path: format!("spec.{field}"), ..error },
            None => error,
        };
        errors.0.into_iter().map(of_spec).collect()
    })
}
