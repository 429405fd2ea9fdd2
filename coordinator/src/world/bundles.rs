//! What pools' guests are given of their tenants' Secrets: which bundle each pool names, and what it waits for. The values are not
//! here; which bundle they make is worked out beside ([`crate::placement`]).

use std::collections::{BTreeMap, BTreeSet};

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

/// What pools' guests are given of Secrets.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bundles {
    /// By the Secrets that are named: those of a pool's spec, and those of revisions that nodes may have.
    made: BTreeMap<PoolKey, BTreeMap<BTreeSet<String>, PoolBundle>>,
    /// Pools of which bundles are to be worked out.
    open: BTreeSet<PoolKey>,
    /// Secrets that changed since the bundles of a pool did last.
    changed: BTreeMap<PoolKey, BTreeSet<String>>,
}

impl Bundles {
    pub(crate) fn open(&mut self, keys: impl IntoIterator<Item = PoolKey>) {
        self.open.extend(keys);
    }

    pub(super) fn forget(&mut self, key: &PoolKey) {
        self.made.remove(key);
        self.open.remove(key);
        self.changed.remove(key);
    }

    /// Which Secrets changed, for people.
    pub(super) fn take_changed(&mut self, key: &PoolKey) -> String {
        let names: Vec<String> = self.changed.remove(key).into_iter().flatten().collect();
        match names.as_slice() {
            [] => "values of secrets changed".to_owned(),
            [name] => format!("secret {name} changed"),
            names => format!("secrets {} changed", names.join(", ")),
        }
    }
}

impl World {
    /// A Secret is as declared, or gone: the bundles of the pools that name it are others, and no others are.
    pub(super) fn secret_changed(&mut self, tenant: &TenantId, name: &str) {
        for pool in self.pools_of.get(tenant).into_iter().flatten() {
            let key = PoolKey { tenant: tenant.clone(), pool: pool.clone() };
            if self.named_secrets(&key).iter().any(|names| names.contains(name)) {
                self.bundles.changed.entry(key.clone()).or_default().insert(name.to_owned());
                self.bundles.open.insert(key);
            }
        }
    }

    /// A pool names these Secrets from now on.
    pub(super) fn note_secrets(&mut self, key: &PoolKey, spec: &PoolSpec) {
        if self.pools.get(key).map(|before| &before.spec.secrets) != Some(&spec.secrets) {
            self.bundles.open.insert(key.clone());
        }
    }

    /// What a pool's spec names, and each of its revisions that nodes may have.
    fn named_secrets(&self, key: &PoolKey) -> BTreeSet<BTreeSet<String>> {
        let declared = self.pools.get(key).map(|pool| &pool.spec.secrets);
        let declared = declared.filter(|names| !names.is_empty());
        declared.into_iter().chain(self.rollouts.secrets_of(key)).cloned().collect()
    }

    /// The bundles that may be others, each with the Secrets that it is of.
    pub(crate) fn take_unbundled(&mut self) -> Vec<(PoolKey, BTreeSet<String>)> {
        let mut all = Vec::new();
        for key in std::mem::take(&mut self.bundles.open) {
            let named = self.named_secrets(&key);
            if let Some(made) = self.bundles.made.get_mut(&key) {
                made.retain(|names, _| named.contains(names));
            }
            all.extend(named.into_iter().map(|names| (key.clone(), names)));
        }
        all
    }

    pub(crate) fn set_bundle(&mut self, key: &PoolKey, names: &BTreeSet<String>, bundle: PoolBundle) {
        let made = self.bundles.made.entry(key.clone()).or_default();
        if made.get(names) != Some(&bundle) {
            made.insert(names.clone(), bundle);
            self.touched.extend(self.stored.nodes_of(key).cloned());
            self.stale_pools.insert(key.clone());
            self.rollouts.open(key);
        }
    }

    fn bundle(&self, key: &PoolKey, names: &BTreeSet<String>) -> Option<&PoolBundle> {
        self.bundles.made.get(key)?.get(names)
    }

    /// The bundle of these Secrets of a pool, if it can be had.
    pub(super) fn bundle_digest(&self, key: &PoolKey, names: &BTreeSet<String>) -> Option<Digest> {
        match self.bundle(key, names) {
            Some(PoolBundle::Made(digest)) => Some(*digest),
            _ => None,
        }
    }

    /// Whether what is to be given can be had.
    pub(super) fn has_bundle(&self, key: &PoolKey, names: &BTreeSet<String>) -> bool {
        names.is_empty() || self.bundle_digest(key, names).is_some()
    }

    /// What documents are to say of these Secrets. While their bundle can't be made that is one that there is not: what runs goes
    /// on, and nothing starts.
    pub(super) fn secrets_now(&self, key: &PoolKey, names: &BTreeSet<String>) -> Option<Digest> {
        let waits = || (!names.is_empty()).then(|| waiting(&key.tenant, names));
        self.bundle_digest(key, names).or_else(waits)
    }

    /// What the document of a node says of a pool's secrets. A node that is not known to keep to grants is told of other values when
    /// it is its turn.
    pub(super) fn secrets_on(&self, key: &PoolKey, node: &NodeId, spec: &PoolSpec) -> Option<Digest> {
        let before = || self.offer_of(key, node).filter(|_| !self.can_roll(node))?.secrets;
        let named = self.rollouts.named(key, node).map_or_else(before, |named| named.secrets);
        named.or_else(|| self.secrets_now(key, &spec.secrets))
    }

    /// The Secrets that this bundle of a tenant is of, if the document of the node names it for a pool that has a place there.
    pub(crate) fn bundle_on(
        &self,
        node: &NodeId,
        tenant: &TenantId,
        digest: &Digest,
    ) -> Option<BTreeSet<String>> {
        if !self.is_managed(node) {
            return None;
        }
        let named = |key: &PoolKey| {
            let pool = self.pools.get(key)?;
            let (spec, _) = self.rollouts.spec_for(key, node, &pool.spec);
            let is_it = self.bundle_digest(key, &spec.secrets) == Some(*digest)
                && self.secrets_on(key, node, &spec) == Some(*digest);
            is_it.then(|| spec.secrets.clone())
        };
        self.on_node(node).map(|(key, _)| key).filter(|key| key.tenant == *tenant).find_map(named)
    }

    /// Why a pool waits for its secrets, if it does.
    pub(super) fn lacks_secrets(&self, key: &PoolKey) -> Option<(&'static str, String)> {
        match self.bundle(key, &self.pools.get(key)?.spec.secrets)? {
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
