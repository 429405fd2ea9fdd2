//! What machines are lacking and which are not needed, for people and for autoscalers.

use mvm_proto::Problem;
use mvm_proto::object::{DemandShape, EmptyNode, FleetDemand, kind_named};

use crate::objects::Caller;
use crate::refuse;
use crate::state::State;
use crate::world::World;

/// The same as an answer: for those who may see nodes.
pub(crate) fn demand(state: &State, caller: &Caller) -> Result<FleetDemand, Problem> {
    let nodes = kind_named("nodes").map_err(refuse::bad_request)?;
    if !caller.may_see(nodes, None, "") {
        let detail = format!("{} may not see the cluster's nodes", caller.name);
        return Err(Problem::new(403, "forbidden", detail, "Use a key that is of no tenant."));
    }
    Ok(of(&state.world.lock()))
}

/// What has no place for want of nodes, and the nodes that have nothing.
pub(crate) fn of(world: &World) -> FleetDemand {
    let shapes = world.placer.demand().into_iter().map(|demand| DemandShape {
        vcpus: demand.vcpus,
        mem_mib: demand.mem_mib,
        node_labels: demand.node_labels,
        counts: demand.counts.into(),
    });
    let empty = world.placer.empty_nodes().into_iter();
    FleetDemand {
        unplaced: shapes.collect(),
        empty_nodes: empty.map(|empty| EmptyNode { node: empty.node, cordoned: empty.cordoned }).collect(),
    }
}
