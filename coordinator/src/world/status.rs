//! What is told of pools and nodes in their objects' status: a function of the world.

use mvm_planner::fleet::PoolKey;
use mvm_proto::object::{
    NodeCounts, NodeObjectStatus, NodeResources, Object, PoolCounts, PoolObjectStatus, TenantObjectStatus,
    UnplacedCounts,
};
use mvm_proto::status::{Condition, set_condition};
use mvm_proto::{NodeId, TenantId, Timestamp};
use serde_json::Value;

use super::bundles::set_secrets_ready;
use super::division::Lacking;
use super::{World, conditions};
use crate::fleet::Standing;
use crate::records::Numbers;

/// How many nodes the condition names that have less than they need.
const LACKING_SHOWN: usize = 3;

/// Whether nodes have as much of a tenant's quotas and addresses as what is placed on them needs. It is told from the
/// first time on that one does not.
fn set_shares_ready(conditions: &mut Vec<Condition>, lacking: &[Lacking], now: Timestamp) {
    const KIND: &str = "SharesReady";
    if lacking.is_empty() && !conditions.iter().any(|condition| condition.r#type == KIND) {
        return;
    }
    let shown =
        lacking.iter().take(LACKING_SHOWN).map(|lacking| format!("{}: {}", lacking.node, lacking.message));
    let mut message = shown.collect::<Vec<_>>().join("; ");
    if lacking.len() > LACKING_SHOWN {
        message.push_str(&format!(" (and {} more)", lacking.len() - LACKING_SHOWN));
    }
    let condition = Condition {
        r#type: KIND.to_owned(),
        status: if lacking.is_empty() { "True" } else { "False" }.to_owned(),
        reason: lacking.first().map_or("Enough", |lacking| lacking.reason).to_owned(),
        message,
        since: now.to_string(),
    };
    set_condition(conditions, condition);
}

impl World {
    /// The status of a pool.
    pub(crate) fn pool_status(&self, key: &PoolKey, object: &Object, now: Timestamp) -> Option<Value> {
        let entry = self.pools.get(key)?;
        let mut status: PoolObjectStatus = object.status().ok()?;
        let wanted = entry.spec.counts;
        let mut counts = PoolCounts::default();
        let mut down = 0;
        (status.claimable, status.outdated) = (0, 0);
        // What a lost node had is placed elsewhere, and counted there.
        let is_lost =
            |id: &NodeId| self.nodes.get(id).is_some_and(|entry| entry.news.standing == Standing::Lost);
        for (_, news) in self.news_of(key).filter(|(id, _)| !is_lost(id)) {
            counts.running = counts.running.saturating_add(news.actual.running);
            counts.warm = counts.warm.saturating_add(news.actual.warm);
            counts.sleeping = counts.sleeping.saturating_add(news.actual.sleeping);
            down = news.down.saturating_add(down);
            status.claimable = status.claimable.saturating_add(news.claimable);
            status.outdated = status.outdated.saturating_add(news.old.unwrap_or(0));
        }
        let placed = self.stored.get(key).into_iter().flatten().map(|(node, counts)| NodeCounts {
            node: node.clone(),
            wanted: (*counts).into(),
            actual: self.nodes.get(node).and_then(|entry| entry.news.pools.get(key)).map(|news| news.actual),
        });
        status.placed = placed.collect();
        let unplaced = self.placer.unplaced(key);
        status.unplaced = unplaced.map(|unplaced| UnplacedCounts {
            counts: unplaced.counts.into(),
            reason: unplaced.reason.clone(),
        });
        let serving = counts.running.saturating_sub(down);
        status.counts = counts;
        status.ready = format!("{serving}/{}", wanted.running);
        status.observed.observed_generation = entry.object.metadata.generation;
        status.scale = self.scales.status(key);

        let rollout = self.rollout_status(key, now);
        status.rollout = rollout.as_ref().map(|(rollout, _)| rollout.clone());
        let (reason, message) = match &status.unplaced {
            Some(unplaced) => ("Unplaced", unplaced.reason.clone()),
            None => ("AllPlaced", String::new()),
        };
        let kind = |kind: &str, holds: bool, reason: &str, message: String| {
            let status = if holds { "True" } else { "False" };
            Condition {
                r#type: kind.to_owned(),
                status: status.to_owned(),
                reason: reason.to_owned(),
                message,
                since: now.to_string(),
            }
        };
        let conditions = &mut status.observed.conditions;
        set_condition(conditions, kind("Placed", unplaced.is_none(), reason, message.clone()));
        let away: Vec<_> = self
            .stored
            .nodes_of(key)
            .filter(|node| self.nodes.get(*node).is_none_or(|entry| entry.news.standing != Standing::Present))
            .map(NodeId::as_str)
            .collect();
        let lacks_secrets = self.lacks_secrets(key);
        let ready = if unplaced.is_some() {
            kind("Ready", false, "Unplaced", message)
        } else if let Some((reason, message)) = &lacks_secrets {
            kind("Ready", false, reason, message.clone())
        } else if !away.is_empty() {
            let message = format!("not connected: {}", away.join(", "));
            kind("Ready", false, "NodesAway", message)
        } else if serving < wanted.running {
            let message = match down {
                0 => format!("{serving} of {} run", wanted.running),
                down => format!("{serving} of {} run; the programs of {down} do not work", wanted.running),
            };
            kind("Ready", false, "Starting", message)
        } else if counts.warm < wanted.warm || counts.sleeping < wanted.sleeping {
            let message = format!(
                "{} of {} are warm, {} of {} asleep",
                counts.warm, wanted.warm, counts.sleeping, wanted.sleeping
            );
            kind("Ready", false, "Preparing", message)
        } else {
            kind("Ready", true, "AllPlaced", String::new())
        };
        set_condition(conditions, ready);
        for condition in rollout.into_iter().flat_map(|(_, conditions)| conditions) {
            set_condition(conditions, condition);
        }
        if let Some(waits) = self.pool_waits.get(key) {
            set_condition(conditions, waits.condition(now));
        }
        set_shares_ready(conditions, &self.lacking(key), now);
        set_secrets_ready(conditions, lacks_secrets, !entry.spec.secrets.is_empty(), now);
        serde_json::to_value(&status).ok()
    }

    /// The status of a tenant: what it lacks, and what its deletion waits for.
    pub(crate) fn tenant_status(&self, tenant: &TenantId, object: &Object, now: Timestamp) -> Option<Value> {
        let mut status: TenantObjectStatus = object.status().ok()?;
        status.observed.observed_generation = object.metadata.generation;
        let conditions = &mut status.observed.conditions;
        set_shares_ready(conditions, &self.tenant_lacking(tenant), now);
        if let Some(waits) = self.tenant_waits.get(tenant) {
            set_condition(conditions, waits.condition(now));
        }
        serde_json::to_value(&status).ok()
    }

    /// Images of declared pools that a node says it has, by their digests.
    fn images_on(&self, id: &NodeId) -> Vec<String> {
        let pools = self.nodes.get(id).into_iter().flat_map(|entry| &entry.news.pools);
        let here = pools.filter(|(_, news)| news.has_image);
        let digests = here.filter_map(|(key, _)| self.pools.get(key)?.spec.image.digest);
        let digests: std::collections::BTreeSet<_> = digests.map(|digest| digest.to_string()).collect();
        digests.into_iter().collect()
    }

    /// The status of a node.
    pub(crate) fn node_status(&self, id: &NodeId, object: &Object, now: Timestamp) -> Option<Value> {
        let entry = self.nodes.get(id)?;
        let mut status: NodeObjectStatus = object.status().ok()?;
        let news = &entry.news;
        if let Some(info) = &news.info {
            let capacity = info.capacity.unwrap_or_default();
            status.capacity = NodeResources {
                vcpus: capacity.vcpus,
                mem_mib: capacity.mem_mib,
                disk_mib: capacity.disk_mib,
                instances: capacity.max_instances,
            };
            status.driver.clone_from(&info.driver);
            status.accelerator.clone_from(&info.accelerator);
            status.version.clone_from(&info.version);
            status.kernel.clone_from(&info.kernel);
            status.arch.clone_from(&info.arch);
        }
        status.images = self.images_on(id);
        status.allocated = NodeResources::default();
        for (key, counts) in self.stored.counts_on(id) {
            if let Some(pool) = self.pools.get(key) {
                status
                    .allocated
                    .add(&pool.spec.resources.into(), counts.running + counts.warm + counts.sleeping);
            }
        }
        let (state, holds, reason, message) = match (news.standing, &news.ready) {
            (Standing::Lost, _) => (
                "NotReady",
                "False",
                "Lost",
                "it was away for so long that its instances are placed elsewhere",
            ),
            (Standing::Unknown, _) => (
                "Unknown",
                "Unknown",
                "NotConnected",
                "it has no session to this coordinator, or lost several and has not stayed for long enough since",
            ),
            (Standing::Present, Some((false, message))) => {
                ("NotReady", "False", "AgentNotReady", message.as_str())
            }
            (Standing::Present, _) if news.refused.is_some() => {
                ("NotReady", "False", "DocumentRefused", news.refused.as_deref().unwrap_or_default())
            }
            (Standing::Present, _) => ("Ready", "True", "Connected", ""),
        };
        status.state = state.to_owned();
        status.observed.observed_generation = object.metadata.generation;
        let condition = Condition {
            r#type: "Ready".to_owned(),
            status: holds.to_owned(),
            reason: reason.to_owned(),
            message: message.to_owned(),
            since: now.to_string(),
        };
        set_condition(&mut status.observed.conditions, condition);
        let drain = self.drain_status(id);
        conditions::update(
            &mut status.observed.conditions,
            news,
            drain.as_ref().map(|(_, drained)| *drained),
            now,
        );
        status.drain = drain.map(|(drain, _)| drain);
        serde_json::to_value(&status).ok()
    }

    /// Nodes that may still have instances of a pool that is being deleted: they had some placed, and have not made a
    /// document true since that does not name it. `newest` is of each node the document that it is to follow.
    pub(crate) fn still_has(
        &self,
        key: &PoolKey,
        newest: impl Fn(&NodeId) -> Option<Numbers>,
    ) -> Vec<NodeId> {
        let had = self.stored.nodes_of(key);
        let lists = |id: &NodeId| self.nodes.get(id).is_some_and(|entry| entry.news.pools.contains_key(key));
        let behind = |id: &NodeId| {
            let Some(entry) = self.nodes.get(id) else { return false };
            entry.news.converged < newest(id)
        };
        let mut still: Vec<_> = had.filter(|id| lists(id) || behind(id)).cloned().collect();
        let others = self.news_of(key).filter(|(id, news)| self.is_managed(id) && news.instances > 0);
        still.extend(others.map(|(id, _)| id.clone()));
        still.sort();
        still.dedup();
        // A node that was removed from the cluster has nothing of ours.
        still.retain(|id| self.nodes.get(id).is_some_and(|entry| entry.declared.is_some()));
        still
    }
}
