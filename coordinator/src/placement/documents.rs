//! The documents of nodes that objects drive: rendered from what is placed, and issued when they say something new.

use mvm_proto::object::{ManagedBy, NodeSpec, Object, kind_named};
use mvm_proto::{DesiredState, NodeId, Problem};

use crate::objects;
use crate::refuse;
use crate::state::State;
use crate::stored::now;

/// Issues a node's document if it says something else than its newest one. A node that never had one gets none that is
/// empty: what it has is not ours to take away.
pub(super) async fn issue(state: &State, node: &NodeId, desired: &DesiredState) -> Result<(), Problem> {
    let assigned = state.documents.assigned(node).await?;
    let content = state.documents.content_of(desired);
    match &assigned {
        Some(assigned) if assigned.content == Some(content) => return Ok(()),
        None if desired.tenants.is_empty() => return Ok(()),
        _ => {}
    }
    let stored = state.documents.push(desired, now()).await?;
    let mark = stored.assigned.mark();
    tracing::info!(%node, generation = mark.generation, "issued a document");
    state.fleet.offer(node, &stored, Some(std::time::Instant::now()));
    Ok(())
}

/// Makes a node take documents by push from now on, as the first push to it does; one that objects have placed something
/// on is left to them.
pub(crate) async fn take_for_push(state: &State, node: &NodeId) -> Result<(), Problem> {
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
            "Change the objects instead (`mvm apply`); or hand the node over: set its `spec.managed_by` to `push` (`mvm \
             edit node {node}`)."
        );
        return Err(Problem::new(409, "managed_by_objects", detail, advice));
    }
    let kind = kind_named("nodes").map_err(refuse::bad_request)?;
    objects::change_spec(&state.objects, kind, None, node.as_str(), |object: &Object| {
        let mut spec: NodeSpec = object.spec().ok()?;
        spec.managed_by = ManagedBy::Push;
        serde_json::to_value(&spec).ok()
    })
    .await
}
