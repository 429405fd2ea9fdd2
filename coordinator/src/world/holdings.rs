//! Which nodes ever had instances of a tenant, and in which stores their sessions are: the nodes that must confirm when the
//! tenant is deleted with its data, whether they are connected or not.

use std::collections::{BTreeMap, BTreeSet};

use mvm_proto::{NodeId, TenantId};
use serde::{Deserialize, Serialize};

/// What the store has of one tenant and node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holding {
    /// Stores that its pools named for their sessions while they were placed there.
    pub(crate) session_stores: BTreeSet<String>,
}

/// Of one tenant.
pub(crate) type OfTenant = BTreeMap<NodeId, Holding>;

/// Which node deletes what is in which stores.
pub(crate) type Divided = BTreeMap<NodeId, BTreeSet<String>>;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Holdings(BTreeMap<TenantId, OfTenant>);

impl Holdings {
    pub(crate) fn get(&self, tenant: &TenantId) -> Option<&OfTenant> {
        self.0.get(tenant)
    }

    pub(crate) fn nodes_of(&self, tenant: &TenantId) -> impl Iterator<Item = &NodeId> {
        self.0.get(tenant).into_iter().flat_map(BTreeMap::keys)
    }

    pub(crate) fn set(&mut self, tenant: &TenantId, node: &NodeId, holding: Holding) {
        self.0.entry(tenant.clone()).or_default().insert(node.clone(), holding);
    }

    pub(crate) fn forget(&mut self, tenant: &TenantId) {
        self.0.remove(tenant);
    }

    /// What is known of a node once it also has instances with sessions in `store`; nothing: that is known.
    pub(crate) fn grown(&self, tenant: &TenantId, node: &NodeId, store: Option<&str>) -> Option<Holding> {
        let known = self.0.get(tenant).and_then(|nodes| nodes.get(node));
        let has = |holding: &Holding| store.is_none_or(|store| holding.session_stores.contains(store));
        if known.is_some_and(has) {
            return None;
        }
        let mut holding = known.cloned().unwrap_or_default();
        holding.session_stores.extend(store.map(str::to_owned));
        Some(holding)
    }
}

/// Which node deletes what of a tenant: each of its nodes that are still in the cluster what it has itself, with the stores
/// that it used. A bucket that only nodes used that were removed since is left to one of these, else to one of `others`,
/// in their order.
pub(crate) fn divide(
    holdings: &OfTenant,
    is_in_cluster: impl Fn(&NodeId) -> bool,
    mut others: impl Iterator<Item = NodeId>,
) -> Divided {
    let (mut divided, mut orphaned) = (BTreeMap::new(), BTreeSet::new());
    for (node, holding) in holdings {
        if is_in_cluster(node) {
            divided.insert(node.clone(), holding.session_stores.clone());
        } else {
            // What is in a folder of a removed node is out of reach.
            let buckets = holding.session_stores.iter().filter(|store| store.starts_with("s3://"));
            orphaned.extend(buckets.cloned());
        }
    }
    orphaned.retain(|store| !divided.values().any(|stores: &BTreeSet<String>| stores.contains(store)));
    if !orphaned.is_empty()
        && let Some(node) = divided.keys().next().cloned().or_else(|| others.next())
    {
        divided.entry(node).or_default().extend(orphaned);
    }
    divided
}

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_map, btree_set};
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    fn node(at: u8) -> NodeId {
        format!("n{at}").parse().unwrap()
    }

    proptest! {
        #[test]
        fn every_node_of_a_tenant_deletes_its_own_and_no_bucket_is_left_while_there_is_a_node(
            holdings in btree_map(0..6_u8, btree_set(select(vec!["local", "file:///s", "s3://aaa", "s3://bbb"]), 0..4), 0..5),
            removed in btree_set(0..6_u8, 0..5),
            others in btree_set(10..13_u8, 0..3),
        ) {
            let of = |stores: &BTreeSet<&str>| Holding { session_stores: stores.iter().map(|it| (*it).to_owned()).collect() };
            let holdings: OfTenant = holdings.iter().map(|(at, stores)| (node(*at), of(stores))).collect();
            let removed: BTreeSet<NodeId> = removed.into_iter().map(node).collect();
            let others: Vec<NodeId> = others.into_iter().map(node).collect();
            let divided = divide(&holdings, |id| !removed.contains(id), others.iter().cloned());
            for (id, holding) in &holdings {
                match divided.get(id) {
                    Some(stores) => prop_assert!(!removed.contains(id) && stores.is_superset(&holding.session_stores)),
                    None => prop_assert!(removed.contains(id)),
                }
            }
            let there_is_a_node = !divided.is_empty() || !others.is_empty();
            for store in holdings.values().flat_map(|holding| &holding.session_stores) {
                let given = divided.values().any(|stores| stores.contains(store));
                prop_assert!(given || !store.starts_with("s3://") || !there_is_a_node, "{store}");
            }
            // No other node is asked while one of the tenant's own is there.
            let own = divided.keys().any(|id| holdings.contains_key(id));
            prop_assert!(!own || divided.keys().all(|id| holdings.contains_key(id)));
        }
    }
}
