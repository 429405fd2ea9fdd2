//! What deletions wait for, and which node is told to delete the data of which tenant: functions of the world.

use std::collections::BTreeMap;

use mvm_planner::fleet::PoolKey;
use mvm_proto::document::RemovedTenant;
use mvm_proto::object::OnDelete;
use mvm_proto::status::{Condition, Feature};
use mvm_proto::{DesiredState, NodeId, TenantId, Timestamp};

use super::holdings::{self, Divided, Holding};
use super::{NodeEntry, TenantEntry, World};
use crate::fleet::Standing;
use crate::records::Numbers;

/// How many nodes or pools a condition names; the others are counted.
const NAMED: usize = 5;

/// What the deletion of an object waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Waits {
    /// For programs.
    reason: &'static str,
    /// For people.
    message: String,
}

impl Waits {
    fn on(reason: &'static str, all: &[String]) -> Self {
        let named = all.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join("; ");
        let rest = all.len().saturating_sub(NAMED);
        let more = if rest > 0 { format!("; and {rest} more") } else { String::new() };
        Self { reason, message: format!("waits for {named}{more}") }
    }

    pub(super) fn condition(&self, now: Timestamp) -> Condition {
        Condition {
            r#type: "Deleting".to_owned(),
            status: "True".to_owned(),
            reason: self.reason.to_owned(),
            message: self.message.clone(),
            since: now.to_string(),
        }
    }
}

impl TenantEntry {
    fn is_deleting(&self) -> bool {
        self.object.metadata.deleting_since.is_some()
    }

    pub(super) fn is_removed_with_data(&self) -> bool {
        self.is_deleting() && self.spec.on_delete == OnDelete::Delete
    }
}

impl NodeEntry {
    /// Whether its agent knows `removed_tenants`; another one would refuse the whole document.
    pub(super) fn can_remove_tenants(&self) -> bool {
        self.news.info.as_ref().is_some_and(|info| info.has(Feature::RemovedTenants))
    }

    fn is_present(&self) -> bool {
        self.news.standing == Standing::Present
    }

    /// Why nothing is to be expected of it now; nothing: it is connected.
    fn away(&self) -> Option<String> {
        let since = || self.news.away_since.map_or_else(String::new, |at| format!(" since {at}"));
        (!self.is_present()).then(|| format!("it is not connected{}", since()))
    }
}

impl World {
    /// What the store has to be told of which nodes have instances of which tenants, for what is placed now.
    pub(crate) fn new_holdings(&self) -> Vec<(TenantId, NodeId, Holding)> {
        let mut grown: BTreeMap<(TenantId, NodeId), Holding> = BTreeMap::new();
        for key in &self.unheld {
            let persist = self.pools.get(key).and_then(|pool| pool.spec.policies.persist.as_deref());
            let store = persist.map(|persist| persist.store.as_str());
            for node in self.stored.nodes_of(key) {
                if let Some(holding) = self.holdings.grown(&key.tenant, node, store) {
                    let all = grown.entry((key.tenant.clone(), node.clone())).or_default();
                    all.session_stores.extend(holding.session_stores);
                }
            }
        }
        grown.into_iter().map(|((tenant, node), holding)| (tenant, node, holding)).collect()
    }

    /// The store has these now, and with them everything that is placed.
    pub(crate) fn note_holdings(&mut self, stored: Vec<(TenantId, NodeId, Holding)>) {
        for (tenant, node, holding) in stored {
            self.holdings.set(&tenant, &node, holding);
        }
        self.unheld.clear();
    }

    /// Which node deletes what of a tenant.
    fn divide_removal(&self, tenant: &TenantId) -> Divided {
        let Some(of_tenant) = self.holdings.get(tenant) else { return Divided::new() };
        let is_in_cluster = |id: &NodeId| self.nodes.get(id).is_some_and(|entry| entry.declared.is_some());
        let able = |present: bool| {
            let nodes = self.nodes.iter().filter(move |(_, entry)| entry.is_present() == present);
            nodes.filter(|(id, entry)| self.is_managed(id) && entry.can_remove_tenants())
        };
        let others = able(true).chain(able(false)).map(|(id, _)| id.clone());
        holdings::divide(of_tenant, is_in_cluster, others)
    }

    /// Divides among nodes what is to be deleted of tenants: their documents change with that.
    pub(super) fn divide_removals(&mut self) {
        let divided: BTreeMap<TenantId, Divided> =
            self.removing.iter().map(|tenant| (tenant.clone(), self.divide_removal(tenant))).collect();
        let before = std::mem::replace(&mut self.divided, divided);
        let none = Divided::new();
        for tenant in before.keys().chain(self.divided.keys()) {
            let was = before.get(tenant).unwrap_or(&none);
            let is = self.divided.get(tenant).unwrap_or(&none);
            let changed = was.keys().chain(is.keys()).filter(|node| was.get(*node) != is.get(*node));
            self.touched.extend(changed.cloned());
        }
    }

    /// The tenants whose data a node is to delete, beside what its document wants.
    pub(super) fn removed_on(&self, node: &NodeId, document: &DesiredState) -> Vec<RemovedTenant> {
        if !self.nodes.get(node).is_some_and(NodeEntry::can_remove_tenants) {
            return Vec::new();
        }
        let wanted = |tenant: &TenantId| document.tenants.iter().any(|it| it.tenant_id == *tenant);
        let removed =
            self.divided.iter().filter(|(tenant, _)| !wanted(tenant)).filter_map(|(tenant, divided)| {
                let session_stores = divided.get(node)?.iter();
                let uid = self.tenants.get(tenant)?.object.metadata.uid.clone();
                let session_stores = session_stores.filter(|store| *store != "local").cloned().collect();
                Some(RemovedTenant { tenant_id: tenant.clone(), uid, session_stores })
            });
        removed.collect()
    }

    /// What the deletion of a tenant waits for; nothing: it can go.
    pub(crate) fn tenant_waits(&self, tenant: &TenantId) -> Option<Waits> {
        if let Some(pools) = self.pools_of.get(tenant) {
            let pools: Vec<_> = pools.iter().map(|pool| format!("pool {tenant}/{pool}")).collect();
            return Some(Waits::on("WaitsForPools", &pools));
        }
        let entry = self.tenants.get(tenant).filter(|entry| entry.is_removed_with_data())?;
        let uid = &entry.object.metadata.uid;
        let (mut left, mut too_old) = (Vec::new(), false);
        for id in self.divided.get(tenant).into_iter().flat_map(Divided::keys) {
            let Some(node) = self.nodes.get(id) else { continue };
            let told = node.news.removals.get(&(tenant.clone(), uid.clone()));
            if told.is_some_and(|told| told.done) {
                continue;
            }
            let why = if !self.is_managed(id) {
                "it takes its documents by push, and may still have data of the tenant".to_owned()
            } else if let Some(away) = node.away() {
                format!("{away}, and may still have data of the tenant")
            } else if !node.can_remove_tenants() {
                too_old = true;
                let version = node.news.info.as_ref().map_or("", |info| info.version.as_str());
                format!("its agent ({version}) is too old to delete the data of tenants: upgrade it")
            } else {
                told.map(|told| told.waits_for.as_str()).filter(|why| !why.is_empty()).map_or_else(
                    || "it has not said yet that the data of the tenant is deleted".to_owned(),
                    str::to_owned,
                )
            };
            left.push(format!("node {id}: {why}"));
        }
        let reason = if too_old { "AgentTooOld" } else { "WaitsForNodes" };
        (!left.is_empty()).then(|| Waits::on(reason, &left))
    }

    /// What the deletion of a pool waits for: the nodes that may still have instances of it. Nothing: it can go.
    pub(crate) fn pool_waits(
        &self,
        key: &PoolKey,
        newest: impl Fn(&NodeId) -> Option<Numbers>,
    ) -> Option<Waits> {
        let left = self.still_has(key, newest).into_iter().map(|id| {
            let node = self.nodes.get(&id);
            let has = node.and_then(|node| node.news.pools.get(key)).map_or(0, |news| news.instances);
            let last = match has {
                0 => "may still have instances of it".to_owned(),
                1 => "last had 1 instance of it".to_owned(),
                has => format!("last had {has} instances of it"),
            };
            match node.and_then(NodeEntry::away) {
                Some(away) => format!("node {id}: {away}, and {last}"),
                None if has > 0 => format!("node {id}: it {last}"),
                None => format!("node {id}: it has not made its newest document true yet"),
            }
        });
        let left: Vec<String> = left.collect();
        (!left.is_empty()).then(|| Waits::on("WaitsForNodes", &left))
    }

    /// Keeps what a deletion waits for, for the status of its object.
    pub(crate) fn set_pool_waits(&mut self, key: &PoolKey, waits: Option<Waits>) {
        let changed = self.pool_waits.get(key) != waits.as_ref();
        match waits {
            Some(waits) => drop(self.pool_waits.insert(key.clone(), waits)),
            None => drop(self.pool_waits.remove(key)),
        }
        if changed {
            self.stale_pools.insert(key.clone());
        }
    }

    /// The same of a tenant.
    pub(crate) fn set_tenant_waits(&mut self, tenant: &TenantId, waits: Option<Waits>) {
        let changed = self.tenant_waits.get(tenant) != waits.as_ref();
        match waits {
            Some(waits) => drop(self.tenant_waits.insert(tenant.clone(), waits)),
            None => drop(self.tenant_waits.remove(tenant)),
        }
        if changed {
            self.stale_tenants.insert(tenant.clone());
        }
    }

    /// The stores that a node used for a tenant's sessions.
    pub(crate) fn session_stores(&self, tenant: &TenantId, node: &NodeId) -> Vec<String> {
        let holding = self.holdings.get(tenant).and_then(|nodes| nodes.get(node));
        holding.into_iter().flat_map(|holding| &holding.session_stores).cloned().collect()
    }

    /// Nothing of a tenant is left on any node.
    pub(crate) fn forget_holdings(&mut self, tenant: &TenantId) {
        self.holdings.forget(tenant);
    }
}
