//! What placement is decided from: declared objects, what is placed, and what nodes said.

mod bundles;
mod conditions;
mod deletion;
mod division;
mod drains;
mod hear;
mod holdings;
mod kind;
mod live;
mod moves;
mod offered;
mod placements;
mod rollouts;
mod scale;
mod sizes;
mod status;
#[cfg(test)]
mod tests;
mod unplaced;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mvm_planner::fleet::{
    AwayGrace, Fleet, FleetNode, FleetPool, FleetTenant, Overcommit, Placed, Placer, PoolKey,
};
use mvm_planner::observation::Capacity;
use mvm_proto::document::DesiredCounts;
use mvm_proto::object::{ManagedBy, NodeSpec, Object, PoolSpec, RESUMED_ANNOTATION, SecretSpec, TenantSpec};
use mvm_proto::{ClusterId, DesiredState, NodeId, PoolId, TenantId, Timestamp};

use crate::fleet::Standing;
use crate::render::{self, PoolShare, RenderedTenant, Share};
use crate::stored::StateError;

pub(crate) use bundles::{Bundles, PoolBundle};
pub(crate) use deletion::Waits;
use division::Division;
use holdings::Divided;
pub(crate) use holdings::{Holding, Holdings};
pub(crate) use kind::{same_kind_of_node, same_kind_of_pool};
pub(crate) use live::{NodeNews, PoolNews, PoolsHeard};
use moves::Adjusted;
pub(crate) use moves::{MoveRecord, Moves, Step};
pub(crate) use offered::{NodeOffers, Offered};
pub(crate) use placements::Placements;
pub(crate) use rollouts::{RolloutRecord, Rollouts};
pub(crate) use scale::SCALE_EVERY;
use scale::Scales;
use sizes::Sizes;

/// The objects as they are declared, the placements, and the news of nodes.
#[derive(Debug, Clone)]
pub(crate) struct World {
    pub(crate) tenants: BTreeMap<TenantId, TenantEntry>,
    pub(crate) pools: BTreeMap<PoolKey, PoolEntry>,
    pub(crate) nodes: BTreeMap<NodeId, NodeEntry>,
    pub(crate) placer: Placer,
    /// What the store has of placements.
    pub(crate) stored: Placements,
    /// What nodes may be following.
    pub(crate) offered: Offered,
    /// What nodes are to have of each tenant's quotas and addresses.
    divisions: BTreeMap<TenantId, Division>,
    /// Tenants of which nodes may have to get something else.
    undivided: BTreeSet<TenantId>,
    /// Nodes that were divided for as lost.
    lost: BTreeSet<NodeId>,
    /// Nodes whose newest document is to be read: it may be another's than this coordinator's objects made.
    pub(crate) unread: BTreeSet<NodeId>,
    /// Nodes of which the store has not what they may be following, and no document will bring it there.
    pub(crate) unsaved: BTreeSet<NodeId>,
    /// A node may have nothing left of a deleted tenant since it was last looked.
    pub(crate) leaving: bool,
    sizes: Sizes,
    /// Which revision of each pool which node is to have.
    pub(crate) rollouts: Rollouts,
    /// How many run of pools that are scaled.
    pub(crate) scales: Scales,
    /// What is on its way from node to node.
    pub(crate) moves: Moves,
    /// Nodes that are being drained.
    drains: BTreeMap<NodeId, drains::Drain>,
    /// The pools that are declared, by tenant.
    pools_of: BTreeMap<TenantId, BTreeSet<PoolId>>,
    /// The nodes that said something of a pool.
    heard_of: BTreeMap<PoolKey, BTreeSet<NodeId>>,
    /// Nobody was heard of before: no node counts as away for longer.
    started_at: Timestamp,
    away_grace: AwayGrace,
    /// Pools, nodes and tenants whose status may have changed.
    pub(crate) stale_pools: BTreeSet<PoolKey>,
    pub(crate) stale_nodes: BTreeSet<NodeId>,
    pub(crate) stale_tenants: BTreeSet<TenantId>,
    /// Which nodes ever had instances of which tenants, as the store has it.
    pub(crate) holdings: Holdings,
    /// Pools of which that is not looked at yet.
    unheld: BTreeSet<PoolKey>,
    /// Tenants that are being deleted with their data.
    removing: BTreeSet<TenantId>,
    /// Which node deletes what of them.
    divided: BTreeMap<TenantId, Divided>,
    /// What the deletions wait for.
    pool_waits: BTreeMap<PoolKey, Waits>,
    tenant_waits: BTreeMap<TenantId, Waits>,
    /// What pools' guests are given of Secrets.
    pub(crate) bundles: Bundles,
    /// Nodes whose document may have changed.
    pub(crate) touched: BTreeSet<NodeId>,
    /// Pools whose stored placement may differ from where they are placed now.
    pub(crate) unsettled: BTreeSet<PoolKey>,
}

#[derive(Debug, Clone)]
pub(crate) struct TenantEntry {
    pub(crate) object: Object,
    pub(crate) spec: TenantSpec,
    /// None of a tenant that was never stored.
    pub(crate) rendered: Option<RenderedTenant>,
}

#[derive(Debug, Clone)]
pub(crate) struct PoolEntry {
    pub(crate) object: Object,
    pub(crate) spec: PoolSpec,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct NodeEntry {
    pub(crate) declared: Option<(Object, NodeSpec)>,
    pub(crate) news: NodeNews,
    /// What the placer holds of it.
    fleet: Option<FleetNode>,
}

impl World {
    pub(crate) fn new(started_at: Timestamp, away_grace: AwayGrace) -> Self {
        Self {
            tenants: BTreeMap::new(),
            pools: BTreeMap::new(),
            nodes: BTreeMap::new(),
            placer: Placer::of(&Fleet { elected_at: Some(started_at), away_grace, ..Fleet::default() }),
            stored: Placements::default(),
            offered: Offered::default(),
            divisions: BTreeMap::new(),
            undivided: BTreeSet::new(),
            lost: BTreeSet::new(),
            unread: BTreeSet::new(),
            unsaved: BTreeSet::new(),
            leaving: false,
            sizes: Sizes::default(),
            rollouts: Rollouts::default(),
            scales: Scales::default(),
            moves: Moves::default(),
            drains: BTreeMap::new(),
            pools_of: BTreeMap::new(),
            heard_of: BTreeMap::new(),
            started_at,
            away_grace,
            stale_pools: BTreeSet::new(),
            stale_nodes: BTreeSet::new(),
            stale_tenants: BTreeSet::new(),
            holdings: Holdings::default(),
            unheld: BTreeSet::new(),
            removing: BTreeSet::new(),
            divided: BTreeMap::new(),
            pool_waits: BTreeMap::new(),
            tenant_waits: BTreeMap::new(),
            bundles: Bundles::default(),
            touched: BTreeSet::new(),
            unsettled: BTreeSet::new(),
        }
    }

    /// Whether this version can read what an object says.
    pub(crate) fn check_readable(object: &Object) -> Result<(), StateError> {
        let read = match object.kind.as_str() {
            "Tenant" => object.spec::<TenantSpec>().map(drop),
            "Pool" => object.spec::<PoolSpec>().map(drop),
            "Node" => object.spec::<NodeSpec>().map(drop),
            "Secret" => object.spec::<SecretSpec>().map(drop),
            _ => Ok(()),
        };
        read.map_err(|cause| StateError::Unreadable { key: object.reference(), cause })
    }

    /// An object is as declared. What can't be read is left as it was: it was written by another version.
    pub(crate) fn declare(&mut self, object: &Object) {
        match object.kind.as_str() {
            "Tenant" => self.declare_tenant(object),
            "Pool" => self.declare_pool(object),
            "Node" => self.declare_node(object),
            "Secret" => {
                if let Some((tenant, name)) = bundles::secret_name(object) {
                    self.secret_changed(tenant, name);
                }
            }
            _ => {}
        }
    }

    fn declare_tenant(&mut self, object: &Object) {
        let (Ok(id), Ok(spec)) = (object.metadata.name.parse::<TenantId>(), object.spec::<TenantSpec>())
        else {
            return unreadable(object);
        };
        let rendered = RenderedTenant::of(object);
        let before = self.tenants.get(&id);
        if before.is_none_or(|before| before.spec.quotas != spec.quotas) {
            self.placer.set_tenant(&id, Some(FleetTenant { quotas: spec.quotas.into() }));
        }
        if before.is_none_or(|before| before.rendered != rendered) {
            self.undivided.insert(id.clone());
            for pool in self.pools_of.get(&id).into_iter().flatten() {
                let key = PoolKey { tenant: id.clone(), pool: pool.clone() };
                self.touched.extend(self.stored.nodes_of(&key).cloned());
            }
        }
        let entry = TenantEntry { object: object.clone(), spec, rendered };
        if entry.is_removed_with_data() {
            self.removing.insert(id.clone());
        }
        self.tenants.insert(id, entry);
    }

    fn declare_pool(&mut self, object: &Object) {
        let Some(key) = pool_key(object) else { return unreadable(object) };
        let Ok(spec) = object.spec::<PoolSpec>() else { return unreadable(object) };
        let spec = self.with_scale(&key, spec);
        let before = self.pools.get(&key);
        let deleting = object.metadata.deleting_since.is_some();
        let was_deleting = before.is_some_and(|before| before.object.metadata.deleting_since.is_some());
        let is_other_spec = before.is_none_or(|before| before.spec != spec);
        let resumed = |object: &Object| object.metadata.annotations.get(RESUMED_ANNOTATION).cloned();
        let is_resumed = before.is_none_or(|before| resumed(&before.object) != resumed(object));
        if is_other_spec || deleting != was_deleting {
            self.placer.set_pool(&key, (!deleting).then(|| demand(&spec)));
            self.repool(&key);
        }
        self.note_secrets(&key, &spec);
        if is_other_spec || is_resumed {
            self.rollouts.open(&key);
        }
        self.pools_of.entry(key.tenant.clone()).or_default().insert(key.pool.clone());
        self.pools.insert(key, PoolEntry { object: object.clone(), spec });
    }

    /// All that follows from a pool is to be looked at again.
    fn repool(&mut self, key: &PoolKey) {
        self.touched.extend(self.stored.nodes_of(key).cloned());
        self.stale_pools.insert(key.clone());
        self.unsettled.insert(key.clone());
        self.unheld.insert(key.clone());
        self.undivided.insert(key.tenant.clone());
    }

    fn declare_node(&mut self, object: &Object) {
        let (Ok(id), Ok(spec)) = (object.metadata.name.parse::<NodeId>(), object.spec::<NodeSpec>()) else {
            return unreadable(object);
        };
        let entry = self.nodes.entry(id.clone()).or_default();
        let was_by = entry.declared.as_ref().map(|(_, spec)| spec.managed_by);
        if was_by != Some(spec.managed_by) {
            self.touched.insert(id.clone());
            if spec.managed_by == ManagedBy::Objects {
                self.unread.insert(id.clone());
            }
        }
        // What comes back here of its status alone is what was written of it.
        let version = |object: &Object| (object.metadata.generation, object.metadata.uid.clone());
        let is_news = entry.declared.as_ref().is_none_or(|(before, _)| version(before) != version(object));
        let drained = spec.drain && spec.managed_by == ManagedBy::Objects;
        entry.declared = Some((object.clone(), spec));
        if is_news {
            self.stale_nodes.insert(id.clone());
        }
        if is_news {
            self.set_drain(&id, drained);
        }
        self.update_node(&id);
    }

    /// An object is gone.
    pub(crate) fn forget(&mut self, kind: &str, tenant: Option<&TenantId>, name: &str) {
        match kind {
            "Tenant" => {
                if let Ok(id) = name.parse::<TenantId>() {
                    self.tenants.remove(&id);
                    self.placer.set_tenant(&id, None);
                    self.tenant_waits.remove(&id);
                    self.removing.remove(&id);
                    self.undivided.insert(id);
                    self.leaving = true;
                }
            }
            "Pool" => {
                if let (Some(tenant), Ok(pool)) = (tenant, name.parse()) {
                    let key = PoolKey { tenant: tenant.clone(), pool };
                    self.placer.set_pool(&key, None);
                    self.touched.extend(self.stored.nodes_of(&key).cloned());
                    self.pools.remove(&key);
                    self.bundles.forget(&key);
                    self.forget_rollout(&key);
                    self.scales.forget(&key);
                    self.pool_waits.remove(&key);
                    if let Some(pools) = self.pools_of.get_mut(&key.tenant) {
                        pools.remove(&key.pool);
                        if pools.is_empty() {
                            self.pools_of.remove(&key.tenant);
                        }
                    }
                    self.unsettled.insert(key);
                }
            }
            "Secret" => {
                if let Some(tenant) = tenant {
                    self.secret_changed(tenant, name);
                }
            }
            "Node" => {
                if let Ok(id) = name.parse::<NodeId>() {
                    self.unsettle(&id);
                    self.set_drain(&id, false);
                    self.placer.set_node(&id, None);
                    self.sizes.forget(&id);
                    let changed = self.offered.forget(&id);
                    self.left(&changed);
                    self.undivided.extend(changed);
                    if let Some(entry) = self.nodes.remove(&id) {
                        for key in entry.news.pools.keys() {
                            self.unhear(key, &id);
                        }
                    }
                }
            }
            _ => {}
        }
    }

    /// Tells the placer of a node, if something changed that it decides by.
    fn update_node(&mut self, id: &NodeId) {
        let started_at = self.started_at;
        let Some(entry) = self.nodes.get_mut(id) else { return };
        let fleet = entry.as_fleet_node(started_at);
        if entry.fleet != fleet {
            entry.fleet.clone_from(&fleet);
            if fleet.is_none() {
                self.unsettle(id);
            }
            self.placer.set_node(id, fleet.map(|fleet| self.with_beyond(id, fleet)));
        }
    }

    /// The node as the placer takes it, with what it may still have beyond what is placed.
    fn with_beyond(&self, id: &NodeId, fleet: FleetNode) -> FleetNode {
        let offers = self.offered.get(id).into_iter();
        let tenants = offers.flat_map(|offers| offers.tenants().filter_map(|id| Some((id, offers.of(id)?))));
        let beyond = tenants.flat_map(|(tenant, offers)| Self::beyond_of(offers, tenant)).collect();
        FleetNode { beyond, ..fleet }
    }

    /// Whether what is placed on a node is placed elsewhere, because it was not heard of for so long.
    fn is_lost(&self, id: &NodeId, now: Timestamp) -> bool {
        let fleet = self.nodes.get(id).and_then(|entry| entry.fleet.as_ref());
        let away_since = fleet.and_then(|fleet| fleet.away_since);
        away_since.is_some_and(|since| now.since(since.max(self.started_at)) >= self.away_grace.0)
    }

    /// What is placed on a node may be taken off it.
    fn unsettle(&mut self, id: &NodeId) {
        self.unsettled.extend(self.stored.pools_on(id).cloned());
    }

    /// Gives the placer what the store has, once all objects are declared.
    pub(crate) fn restore(&mut self) {
        let fleet = Fleet { placed: self.stored.all().clone(), ..self.fleet() };
        self.placer = Placer::of(&fleet);
        self.unsettled = self.stored.keys().chain(self.pools.keys()).cloned().collect();
        self.unheld.clone_from(&self.unsettled);
        self.scales.forget_undeclared();
        self.undivided = self.tenants.keys().cloned().collect();
        self.stale_tenants = self.undivided.clone();
        self.leaving = true;
        // Of the others what they were offered is stored.
        let offered = &self.offered;
        self.unread.retain(|id| offered.get(id).is_none());
        self.restore_rollouts();
    }

    /// Settles what is open: what the store has to be told, by pool, as it was and as it is now.
    fn settle(&mut self, now: Timestamp) -> Vec<(PoolKey, Placed, Placed)> {
        self.unsettled.extend(self.placer.settle(now));
        let mut differences = Vec::new();
        let mut same = Vec::new();
        for key in &self.unsettled {
            let before = self.stored.get(key).cloned().unwrap_or_default();
            let after = match self.pools.get(key) {
                // What it had is known until no node has anything of it.
                Some(pool) if pool.object.metadata.deleting_since.is_some() => {
                    before.keys().map(|node| (node.clone(), DesiredCounts::default())).collect()
                }
                Some(_) => self.placer.placed(key).cloned().unwrap_or_default(),
                None => Placed::new(),
            };
            if before == after {
                same.push(key.clone());
            } else {
                differences.push((key.clone(), before, after));
            }
        }
        self.unsettled.retain(|key| !same.contains(key));
        differences
    }

    /// Settles what is open, and takes it for stored, so that documents are rendered from it: [`World::take_back`] undoes
    /// that if the store does not take it.
    pub(crate) fn settle_and_store(&mut self, now: Timestamp) -> Vec<(PoolKey, Placed, Placed)> {
        self.divide_removals();
        let mut differences = self.settle(now);
        // What begins to move is stored together with where it goes, and with nothing else.
        if differences.is_empty() {
            self.decide_drains(now);
            differences = self.settle(now);
        }
        for (key, before, after) in &differences {
            self.stored(key, before, after.clone());
        }
        self.open_overdue_rollouts(now);
        self.decide_rollouts(now);
        self.divide_all(now);
        differences
    }

    /// The store may not have these placements.
    pub(crate) fn take_back(&mut self, differences: &[(PoolKey, Placed, Placed)]) {
        for (key, before, _) in differences {
            self.stored.set(key, before.clone());
            self.unsettled.insert(key.clone());
            self.undivided.insert(key.tenant.clone());
            self.rollouts.open(key);
        }
    }

    /// The store has this placement now.
    fn stored(&mut self, key: &PoolKey, before: &Placed, after: Placed) {
        for node in before.keys().chain(after.keys()).filter(|node| before.get(*node) != after.get(*node)) {
            self.touched.insert(node.clone());
            self.stale_nodes.insert(node.clone());
        }
        self.stale_pools.insert(key.clone());
        self.unheld.insert(key.clone());
        self.undivided.insert(key.tenant.clone());
        self.unsettled.remove(key);
        self.rollouts.open(key);
        self.stored.set(key, after);
    }

    /// Since when the node is away that is away for the longest among those whose grace is not over.
    pub(crate) fn grace_ends(&self, now: Timestamp) -> Option<Duration> {
        let away = self.nodes.values().filter_map(|entry| entry.fleet.as_ref()?.away_since);
        away.map(|since| self.away_grace.0.saturating_sub(now.since(since)))
            .filter(|left| !left.is_zero())
            .min()
    }

    /// The tenants and the pools that are being deleted.
    pub(crate) fn deleting(&self) -> (Vec<Object>, Vec<(PoolKey, Object)>) {
        let is_deleting = |object: &Object| object.metadata.deleting_since.is_some();
        let tenants = self.tenants.values().filter(|entry| is_deleting(&entry.object));
        let pools = self.pools.iter().filter(|(_, entry)| is_deleting(&entry.object));
        (
            tenants.map(|entry| entry.object.clone()).collect(),
            pools.map(|(key, entry)| (key.clone(), entry.object.clone())).collect(),
        )
    }

    /// What is declared, as the planner takes it, with what is placed now.
    pub(crate) fn fleet(&self) -> Fleet {
        let nodes = self
            .nodes
            .iter()
            .filter_map(|(id, entry)| Some((id.clone(), self.with_beyond(id, entry.fleet.clone()?))));
        let tenants = self.tenants.iter();
        let live = self.pools.iter().filter(|(_, pool)| pool.object.metadata.deleting_since.is_none());
        Fleet {
            nodes: nodes.collect(),
            tenants: tenants
                .map(|(id, entry)| (id.clone(), FleetTenant { quotas: entry.spec.quotas.into() }))
                .collect(),
            pools: live.map(|(key, entry)| (key.clone(), demand(&entry.spec))).collect(),
            placed: self.placer.plan().placed,
            elected_at: Some(self.started_at),
            away_grace: self.away_grace,
        }
    }

    /// Whether a node gets its documents from here.
    pub(crate) fn is_managed(&self, id: &NodeId) -> bool {
        let declared = self.nodes.get(id).and_then(|entry| entry.declared.as_ref());
        declared.is_some_and(|(_, spec)| spec.managed_by == ManagedBy::Objects)
    }
}

impl World {
    /// What a node is to have; none where it gets its documents from elsewhere.
    pub(crate) fn render(&self, cluster: &ClusterId, node: &NodeId) -> Option<DesiredState> {
        if !self.is_managed(node) {
            return None;
        }
        let mut shares: BTreeMap<TenantId, Share<'_>> = BTreeMap::new();
        for (key, counts) in self.asked_of(node) {
            let key = &*key;
            let (Some(pool), Some(tenant)) = (self.pools.get(key), self.tenants.get(&key.tenant)) else {
                continue;
            };
            let Some(rendered) = &tenant.rendered else { continue };
            let division = self.divisions.get(&key.tenant).and_then(|division| division.of(node));
            let Some((quotas, blocks)) = division else { continue };
            let share = shares.entry(key.tenant.clone()).or_insert_with(|| Share {
                tenant: rendered,
                quotas: *quotas,
                network: Self::network(rendered, blocks),
                pools: BTreeMap::<PoolId, _>::new(),
            });
            let (spec, grant) = self.rollouts.spec_for(key, node, &pool.spec);
            let secrets = self.secrets_on(key, node, &spec);
            let update = self.update_of(key, node, grant);
            share.pools.insert(key.pool.clone(), PoolShare { spec, counts, update, secrets });
        }
        shares.values_mut().for_each(Share::fit);
        let mut document = render::document(cluster, node, &shares);
        document.removed_tenants = self.removed_on(node, &document);
        Some(document)
    }

    /// The pools that a node's document names, with what it is asked for: what is placed there, but for what moves.
    fn asked_of<'a>(&'a self, node: &'a NodeId) -> Vec<(Cow<'a, PoolKey>, DesiredCounts)> {
        let placed = self.on_node(node);
        let kept = self.kept_on(node);
        if kept.is_empty() {
            return placed.map(|(key, counts)| (Cow::Borrowed(key), counts)).collect();
        }
        let mut all: BTreeMap<Cow<'a, PoolKey>, DesiredCounts> =
            placed.map(|(key, counts)| (Cow::Borrowed(key), counts)).collect();
        for key in kept {
            all.entry(Cow::Owned(key)).or_default();
        }
        let adjusted = |(key, counts): (Cow<'a, PoolKey>, DesiredCounts)| {
            let counts = self.moves.adjust(&key, node, counts, Adjusted::Counts);
            (key, counts)
        };
        all.into_iter().map(adjusted).collect()
    }

    /// The pools that have instances placed on a node.
    pub(crate) fn on_node<'a>(
        &'a self,
        node: &'a NodeId,
    ) -> impl Iterator<Item = (&'a PoolKey, DesiredCounts)> {
        self.stored.counts_on(node).filter(|(_, counts)| *counts != DesiredCounts::default())
    }
}

/// What a node has that has not said it to this coordinator, nor in time to one before it. It counts as away, so it takes nothing
/// new; what is placed on it stays.
const UNKNOWN_CAPACITY: Capacity =
    Capacity { vcpus: u32::MAX, mem_mib: 1 << 40, disk_mib: 1 << 40, max_instances: u32::MAX };

impl NodeEntry {
    /// None of a node that nothing is placed on: one that is driven by pushes.
    fn as_fleet_node(&self, started_at: Timestamp) -> Option<FleetNode> {
        let (object, spec) = self.declared.as_ref()?;
        if spec.managed_by != ManagedBy::Objects {
            return None;
        }
        let capacity = self.news.info.as_ref().and_then(|info| info.capacity);
        let is_unknown = capacity.is_none();
        let capacity = capacity.map_or(UNKNOWN_CAPACITY, |capacity| Capacity {
            vcpus: capacity.vcpus,
            mem_mib: capacity.mem_mib,
            disk_mib: capacity.disk_mib,
            max_instances: capacity.max_instances,
        });
        let mut labels = object.metadata.labels.clone();
        labels.extend(spec.labels.clone());
        // What was before the start is not held against a node.
        let away_since = (is_unknown || self.news.standing != Standing::Present)
            .then(|| self.news.away_since.unwrap_or(started_at).max(started_at));
        Some(FleetNode {
            labels,
            taints: spec.taints.iter().cloned().collect(),
            cordoned: spec.cordoned || spec.drain || object.metadata.deleting_since.is_some(),
            away_since,
            capacity,
            overcommit: overcommit(spec),
            images: BTreeSet::new(),
            beyond: BTreeMap::new(),
        })
    }
}

fn overcommit(spec: &NodeSpec) -> Overcommit {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0.1 to 100 times a thousand")]
    let permille = |factor: f64| (factor * 1000.0).round() as u32;
    Overcommit {
        vcpus_permille: permille(spec.overcommit.vcpus),
        mem_permille: permille(spec.overcommit.mem),
    }
}

pub(crate) fn demand(spec: &PoolSpec) -> FleetPool {
    FleetPool {
        resources: spec.resources.into(),
        counts: spec.counts.into(),
        image: spec.image.digest,
        role: spec.policies.role,
        critical: spec.policies.critical,
        placement: spec.placement.clone(),
    }
}

pub(crate) fn pool_key(object: &Object) -> Option<PoolKey> {
    Some(PoolKey { tenant: object.metadata.tenant.clone()?, pool: object.metadata.name.parse().ok()? })
}

fn unreadable(object: &Object) {
    tracing::error!(object = %object.reference(), "can't read a stored object; it is left as it was");
}
