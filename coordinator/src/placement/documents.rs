//! Who gives a node its documents: the objects that are declared, or an operator's pushes.

use mvm_proto::object::{ManagedBy, NodeSpec, Object, kind_named};
use mvm_proto::{NodeId, Problem};

use crate::objects::{self, Caller};
use crate::refuse;
use crate::state::State;

/// Makes a node take documents by push from now on, as the first push to it does; one that objects have placed something
/// on is left to them.
pub(crate) async fn take_for_push(state: &State, node: &NodeId, by: &Caller) -> Result<(), Problem> {
    let placed = {
        let world = state.world.lock();
        if !world.is_managed(node) {
            return Ok(());
        }
        world.on_node(node).map(|(key, _)| format!("{}/{}", key.tenant, key.pool)).collect::<Vec<_>>()
    };
    if !placed.is_empty() {
        let detail = format!(
            "node {node} is driven by declared objects, and has instances of {} placed",
            placed.join(", ")
        );
        let advice = format!(
            "Change the objects instead (`mvm apply`), or hand the node over: `mvm node manage {node} --by push`."
        );
        return Err(Problem::new(409, "managed_by_objects", detail, advice));
    }
    let kind = kind_named("nodes").map_err(refuse::bad_request)?;
    objects::change_spec(&state.objects, by, kind, None, node.as_str(), |object: &Object| {
        let mut spec: NodeSpec = object.spec().ok()?;
        spec.managed_by = ManagedBy::Push;
        serde_json::to_value(&spec).ok()
    })
    .await
}
