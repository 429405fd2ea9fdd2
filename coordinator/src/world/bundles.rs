//! What pools' guests are given of their tenants' Secrets: which bundle each pool names, and what it waits for. The values are not
//! here; which bundle they make is worked out beside ([`crate::placement`]).

use std::collections::BTreeSet;

use mvm_planner::fleet::PoolKey;
use mvm_proto::object::{Object, PoolSpec};
use mvm_proto::status::{Condition, set_condition};
use mvm_proto::{Digest, NodeId, TenantId, Timestamp};

use super::World;
use crate::secrets::waiting;

const KIND: &str = "SecretsReady";

/// The bundle of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PoolBundle {
    Made(Digest),
    /// There is none.
    Waits {
        /// For programs.
        reason: &'static str,
        /// For people.
        message: String,
    },
}

impl World {
    /// A Secret is as declared, or gone: the bundles of the pools that name it are others, and no others are.
    pub(super) fn secret_changed(&mut self, tenant: &TenantId, name: &str) {
        for pool in self.pools_of.get(tenant).into_iter().flatten() {
            let key = PoolKey { tenant: tenant.clone(), pool: pool.clone() };
            if self.pools.get(&key).is_some_and(|pool| pool.spec.secrets.contains(name)) {
                self.unbundled.insert(key);
            }
        }
    }

    /// A pool names these Secrets from now on.
    pub(super) fn note_secrets(&mut self, key: &PoolKey, spec: &PoolSpec) {
        if spec.secrets.is_empty() {
            self.bundles.remove(key);
            self.unbundled.remove(key);
        } else if self.pools.get(key).is_none_or(|before| before.spec.secrets != spec.secrets) {
            self.unbundled.insert(key.clone());
        }
    }

    /// The pools of which the bundle may be another one, with the Secrets that they name.
    pub(crate) fn take_unbundled(&mut self) -> Vec<(PoolKey, BTreeSet<String>)> {
        let keys = std::mem::take(&mut self.unbundled).into_iter();
        keys.filter_map(|key| {
            let names = self.pools.get(&key)?.spec.secrets.clone();
            Some((key, names))
        })
        .collect()
    }

    pub(crate) fn set_bundle(&mut self, key: &PoolKey, bundle: PoolBundle) {
        if self.bundles.get(key) != Some(&bundle) {
            self.bundles.insert(key.clone(), bundle);
            self.touched.extend(self.stored.nodes_of(key).cloned());
            self.stale_pools.insert(key.clone());
        }
    }

    /// What the document says of a pool's secrets. While its bundle can't be made that is one that there is not: what runs goes
    /// on, and nothing starts.
    pub(super) fn secrets_hash(&self, key: &PoolKey, spec: &PoolSpec) -> Option<Digest> {
        if spec.secrets.is_empty() {
            return None;
        }
        match self.bundles.get(key) {
            Some(PoolBundle::Made(digest)) => Some(*digest),
            _ => Some(waiting(&key.tenant, &spec.secrets)),
        }
    }

    /// The Secrets that this bundle of a tenant is of, if a pool that has a place on the node names it.
    pub(crate) fn bundle_on(
        &self,
        node: &NodeId,
        tenant: &TenantId,
        digest: &Digest,
    ) -> Option<BTreeSet<String>> {
        if !self.is_managed(node) {
            return None;
        }
        let named = |key: &&PoolKey| {
            key.tenant == *tenant && self.bundles.get(*key) == Some(&PoolBundle::Made(*digest))
        };
        let key = self.on_node(node).map(|(key, _)| key).find(named)?;
        Some(self.pools.get(key)?.spec.secrets.clone())
    }

    /// Why a pool waits for its secrets, if it does.
    pub(super) fn lacks_secrets(&self, key: &PoolKey) -> Option<(&'static str, String)> {
        match self.bundles.get(key)? {
            PoolBundle::Made(_) => None,
            PoolBundle::Waits { reason, message } => Some((reason, message.clone())),
        }
    }
}

/// Told of pools that name Secrets, and of those that did.
pub(super) fn set_secrets_ready(
    conditions: &mut Vec<Condition>,
    lacks: Option<(&'static str, String)>,
    names_any: bool,
    now: Timestamp,
) {
    if !names_any && !conditions.iter().any(|condition| condition.r#type == KIND) {
        return;
    }
    let (status, reason, message) = match lacks {
        Some((reason, message)) => ("False", reason, message),
        None => ("True", "Ready", String::new()),
    };
    let condition = Condition {
        r#type: KIND.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        since: now.to_string(),
    };
    set_condition(conditions, condition);
}

/// The tenant and name of a Secret's object.
pub(super) fn secret_name(object: &Object) -> Option<(&TenantId, &str)> {
    Some((object.metadata.tenant.as_ref()?, object.metadata.name.as_str()))
}
