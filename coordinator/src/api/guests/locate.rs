//! Which instance a stream is for, and which node has it.
//!
//! Nodes are asked, and only those that say that they have something of the pool; all that are connected where none does, or
//! where the caller knows the instance's id alone. Of a pool's instances the one that takes the least to be used is chosen.

use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use mvm_proto::status::InstanceStatus;
use mvm_proto::wire::session::v1::{ListInstances, reply, request};
use mvm_proto::wire::tunnel::v1::Open;
use mvm_proto::{InstanceId, NodeId, Phase, PoolId, Problem, TenantId};

use crate::api::parse;
use crate::enrolment;
use crate::refuse;
use crate::state::State;

/// How long nodes have to say what they have. One that is silent holds up only those who need its instances.
const TELL_WITHIN: Duration = Duration::from_secs(5);
/// Instances asked of a node at once: enough to choose from.
const PAGE: u32 = 512;

/// What a caller wants a stream to.
#[derive(Debug)]
pub(super) struct Wanted {
    tenant: Option<TenantId>,
    pool: Option<PoolId>,
    instance: Option<InstanceId>,
    node: Option<NodeId>,
    /// For a caller of one tenant, to which nodes are nothing.
    conceals_nodes: bool,
}

/// One instance, where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Located {
    pub(super) node: NodeId,
    /// None of an archive that the node is to read: what is in it is known once it comes.
    pub(super) place: Option<Place>,
}

/// One instance by its full name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) tenant: TenantId,
    pub(super) pool: PoolId,
    pub(super) instance: InstanceId,
}

impl Located {
    /// Its name in the audit log.
    pub(super) fn reference(&self) -> String {
        let Self { node, place } = self;
        match place {
            Some(Place { tenant, pool, instance }) => {
                format!("instances/{tenant}/{pool}/{instance} on {node}")
            }
            None => format!("nodes/{node}"),
        }
    }
}

impl Wanted {
    pub(super) fn read(tenant: Option<TenantId>, open: &Open, is_of_tenant: bool) -> Result<Self, Problem> {
        fn wanted<T: std::str::FromStr>(what: &str, text: &str) -> Result<Option<T>, Problem>
        where
            T::Err: std::fmt::Display,
        {
            if text.is_empty() { Ok(None) } else { parse(what, text).map(Some) }
        }
        let wanted = Self {
            tenant,
            pool: wanted("pool_id", &open.pool_id)?,
            instance: wanted("instance_id", &open.instance_id)?,
            node: wanted("node_id", &open.node_id)?,
            conceals_nodes: is_of_tenant,
        };
        if wanted.instance.is_none() && (wanted.tenant.is_none() || wanted.pool.is_none()) {
            return Err(refuse::bad_request("a stream is for an instance, or for a tenant's pool"));
        }
        Ok(wanted)
    }

    /// A node to which something is to be sent.
    pub(super) fn read_node(open: &Open) -> Result<Self, Problem> {
        if open.node_id.is_empty() {
            return Err(refuse::bad_request("an import says which node takes the archive in"));
        }
        let node = Some(parse("node_id", &open.node_id)?);
        Ok(Self { tenant: None, pool: None, instance: None, node, conceals_nodes: false })
    }

    fn is_node_alone(&self) -> bool {
        self.tenant.is_none() && self.pool.is_none() && self.instance.is_none()
    }

    fn ask(&self) -> ListInstances {
        fn text<T: ToString>(id: Option<&T>) -> String {
            id.map(ToString::to_string).unwrap_or_default()
        }
        ListInstances {
            tenant_id: text(self.tenant.as_ref()),
            pool_id: text(self.pool.as_ref()),
            instance_id: text(self.instance.as_ref()),
            limit: PAGE,
            ..ListInstances::default()
        }
    }

    /// What a node answered that is really what was asked for: it speaks for itself, and is not believed.
    fn matches(&self, node: &NodeId, found: &InstanceStatus) -> Option<Located> {
        let place = Place {
            tenant: found.tenant_id.parse().ok()?,
            pool: found.pool_id.parse().ok()?,
            instance: found.instance_id.parse().ok()?,
        };
        let is_wanted = self.tenant.as_ref().is_none_or(|tenant| *tenant == place.tenant)
            && self.pool.as_ref().is_none_or(|pool| *pool == place.pool)
            && self.instance.as_ref().is_none_or(|instance| *instance == place.instance);
        is_wanted.then(|| Located { node: node.clone(), place: Some(place) })
    }

    fn unknown(&self, silent: &[NodeId]) -> Problem {
        let of = match (&self.instance, &self.tenant, &self.pool) {
            (Some(instance), Some(tenant), _) => {
                format!("there is no instance {instance} of tenant {tenant}")
            }
            (Some(instance), ..) => format!("there is no instance {instance}"),
            (None, Some(tenant), Some(pool)) => {
                format!("pool {tenant}/{pool} has no instance that could be used")
            }
            _ => "there is no such instance".to_owned(),
        };
        if silent.is_empty() {
            return Problem::new(404, "unknown_instance", of, "List what there is: `mvm instance list`.");
        }
        let names: Vec<_> = silent.iter().take(8).map(ToString::to_string).collect();
        let detail = match self.conceals_nodes {
            true => format!("{of} on the nodes that answered; others were silent"),
            false => format!("{of} on the nodes that answered; silent: {}", names.join(", ")),
        };
        Problem::new(503, "instance_not_found_yet", detail, "Try again once these nodes are connected.")
    }
}

/// The instance that a stream is to be opened to.
pub(super) async fn locate(state: &State, wanted: &Wanted) -> Result<Located, Problem> {
    // A node speaks for itself: one that was given nothing of the tenant has none of its instances, whatever it says.
    let may_have = |node: &NodeId, tenant: Option<&TenantId>| {
        tenant.is_none_or(|tenant| state.world.lock().may_have(node, tenant))
    };
    if let Some(node) = &wanted.node {
        let registered = enrolment::registered(state, node).await;
        if wanted.conceals_nodes && registered.is_err() || !may_have(node, wanted.tenant.as_ref()) {
            return Err(wanted.unknown(&[]));
        }
        registered?;
        // The node checks that the instance is there, and whose it is.
        if let (Some(tenant), Some(pool), Some(instance)) = (&wanted.tenant, &wanted.pool, &wanted.instance) {
            let place = Place { tenant: tenant.clone(), pool: pool.clone(), instance: instance.clone() };
            return Ok(Located { node: node.clone(), place: Some(place) });
        }
        if wanted.is_node_alone() {
            return Ok(Located { node: node.clone(), place: None });
        }
        return match ask(state, wanted, vec![node.clone()]).await {
            (Some(found), _) => Ok(found),
            (None, mut silent) => {
                Err(silent.pop().map_or_else(|| wanted.unknown(&[]), |(_, problem)| problem))
            }
        };
    }
    let mut connected = state.fleet.connected_nodes();
    connected.retain(|node| may_have(node, wanted.tenant.as_ref()));
    let near = match (&wanted.tenant, &wanted.pool) {
        (Some(tenant), Some(pool)) => nodes_of(state, tenant, pool),
        _ => Vec::new(),
    };
    let near: Vec<_> = near.into_iter().filter(|node| connected.contains(node)).collect();
    let far: Vec<_> = connected.into_iter().filter(|node| !near.contains(node)).collect();
    let mut silent = Vec::new();
    for nodes in [near, far] {
        let (found, unheard) = ask(state, wanted, nodes).await;
        if let Some(found) = found {
            return Ok(found);
        }
        silent.extend(unheard.into_iter().map(|(node, _)| node));
    }
    Err(wanted.unknown(&silent))
}

/// The connected nodes that say that they have instances of a pool.
fn nodes_of(state: &State, tenant: &TenantId, pool: &PoolId) -> Vec<NodeId> {
    let mut nodes = Vec::new();
    state.fleet.for_each_connected(|live| {
        let Some(status) = live.status() else { return };
        let names = |told: &&mvm_proto::status::PoolStatus| {
            told.tenant_id == tenant.as_str() && told.pool_id == pool.as_str()
        };
        if status.pools.iter().any(|told| names(&told)) {
            nodes.extend(status.node_id.parse::<NodeId>().ok());
        }
    });
    nodes
}

/// Asks nodes at the same time: the best of what they have, and those that did not say.
async fn ask(
    state: &State,
    wanted: &Wanted,
    nodes: Vec<NodeId>,
) -> (Option<Located>, Vec<(NodeId, Problem)>) {
    let asked = wanted.ask();
    let mut answers: FuturesUnordered<_> = nodes
        .into_iter()
        .map(|node| {
            let ask = request::Ask::ListInstances(asked.clone());
            async move {
                let answer = state.fleet.ask(&node, ask, TELL_WITHIN).await;
                (node, answer)
            }
        })
        .collect();
    let (mut best, mut silent) = (None, Vec::new());
    while let Some((node, answer)) = answers.next().await {
        let listed = match answer {
            Ok(Some(reply::Answer::Instances(listed))) => listed,
            Ok(_) => continue,
            Err(problem) => {
                silent.push((node, problem));
                continue;
            }
        };
        for found in &listed.instances {
            let Some(located) = wanted.matches(&node, found) else { continue };
            let of = located.place.as_ref().map(|place| &place.tenant);
            if let Some(tenant) = of.filter(|tenant| !state.world.lock().may_have(&node, tenant)) {
                tracing::warn!(%node, %tenant, "a node says that it has what it was not given");
                continue;
            }
            // An id names one instance: there is nothing to choose.
            if wanted.instance.is_some() {
                return (Some(located), silent);
            }
            let Some(rank) = rank(&found.phase) else { continue };
            let key = (rank, located.place.as_ref().map(|place| place.instance.clone()));
            if best.as_ref().is_none_or(|(known, _)| key < *known) {
                best = Some((key, located));
            }
        }
    }
    (best.map(|(_, located)| located), silent)
}

/// What takes least to be used comes first; what has to be started by hand, never.
fn rank(phase: &str) -> Option<u8> {
    match phase.parse() {
        Ok(Phase::Running) => Some(0),
        Ok(Phase::Warm) => Some(1),
        Ok(Phase::Sleeping) => Some(2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(instance: &str, tenant: &str) -> InstanceStatus {
        InstanceStatus {
            tenant_id: tenant.to_owned(),
            pool_id: "web".to_owned(),
            instance_id: instance.to_owned(),
            phase: "running".to_owned(),
            ..InstanceStatus::default()
        }
    }

    #[test]
    fn a_node_that_answers_with_another_tenants_instance_is_not_believed() {
        let open = Open { pool_id: "web".into(), ..Open::default() };
        let wanted = Wanted::read(Some("acme".parse().unwrap()), &open, true).unwrap();
        let node: NodeId = "n1".parse().unwrap();
        assert!(wanted.matches(&node, &status("i-00000001", "acme")).is_some());
        assert_eq!(wanted.matches(&node, &status("i-00000001", "zeta")), None);
        assert_eq!(wanted.matches(&node, &status("nonsense", "acme")), None);
    }

    #[test]
    fn a_stream_is_for_an_instance_or_for_a_pool_of_a_tenant() {
        let of = |tenant: Option<&str>, pool: &str, instance: &str| {
            let open = Open { pool_id: pool.into(), instance_id: instance.into(), ..Open::default() };
            Wanted::read(tenant.map(|tenant| tenant.parse().unwrap()), &open, false).map(drop)
        };
        assert!(of(Some("acme"), "web", "").is_ok() && of(None, "", "i-00000001").is_ok());
        assert!(of(None, "web", "").is_err() && of(Some("acme"), "", "").is_err());
        assert!(of(Some("acme"), "web", "../x").is_err());
    }

    #[test]
    fn of_a_pools_instances_those_that_run_come_first_and_those_that_do_not_never() {
        assert!(rank("running") < rank("warm") && rank("warm") < rank("sleeping"));
        assert_eq!((rank("stopped"), rank("failed"), rank("other")), (None, None, None));
    }
}
