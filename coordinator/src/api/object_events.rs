//! Events of objects for callers of the API: of those that they may see, or of one of them.

use mvm_planner::fleet::PoolKey;
use mvm_proto::object::{EventType, Kind, ObjectEvent, kind_named};
use mvm_proto::{Problem, TenantId, Timestamp};

use crate::objects::{self, Caller, Uids};
use crate::refuse;
use crate::state::State;

/// Which events are asked for.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// Of one object alone.
    pub(crate) object: Option<(&'static Kind, Option<TenantId>, String)>,
    pub(crate) tenant: Option<TenantId>,
}

/// Events of the objects that the caller may see. Of one pool also what nodes that it is placed on said of its instances.
///
/// A name may be another customer's by now: of what belonged to a tenant that is gone nothing is told.
pub(crate) async fn list(
    state: &State,
    caller: &Caller,
    asked: &Asked,
    now: Timestamp,
) -> Result<Vec<ObjectEvent>, Problem> {
    if let Some((kind, tenant, name)) = &asked.object
        && !caller.may_see(kind, tenant.as_ref(), name)
    {
        return Err(refuse::no_object(kind, tenant.as_ref(), name));
    }
    let wanted = |event: &ObjectEvent| {
        let of = |(kind, tenant, name): &(&'static Kind, Option<TenantId>, String)| {
            event.kind == kind.name && event.tenant == *tenant && event.name == *name
        };
        asked.object.as_ref().is_none_or(of)
            && asked.tenant.as_ref().is_none_or(|tenant| event.tenant.as_ref() == Some(tenant))
            && sees(caller, event)
    };
    let mut uids = Uids::new(&state.store);
    let mut events = Vec::new();
    for event in state.events.kept(wanted, now) {
        if is_of_what_is_there(&mut uids, &event).await? {
            events.push(event);
        }
    }
    if let Some((kind, Some(tenant), name)) = &asked.object
        && kind.name == "Pool"
    {
        events.extend(said_by_nodes(state, tenant, name).await?);
        events.sort_by_key(|event| event.last_at);
    }
    Ok(events)
}

/// Whether it happened to the object that has the name now, or to one that is gone of a tenant that is there.
async fn is_of_what_is_there(uids: &mut Uids<'_>, event: &ObjectEvent) -> Result<bool, Problem> {
    let Ok(kind) = kind_named(&event.kind) else { return Ok(false) };
    let now = uids.of(kind, event.tenant.as_ref(), &event.name).await?;
    if now.as_ref().is_some_and(|uid| *uid != event.uid) {
        return Ok(false);
    }
    match &event.tenant {
        Some(tenant) => Ok(uids.of_tenant(tenant).await?.as_ref() == Some(&event.tenant_uid)),
        // A tenant's own events are those of an object that is there.
        None => Ok(now.is_some() || kind.name != "Tenant"),
    }
}

fn sees(caller: &Caller, event: &ObjectEvent) -> bool {
    kind_named(&event.kind).is_ok_and(|kind| caller.may_see(kind, event.tenant.as_ref(), &event.name))
}

/// What nodes said lately of a pool's instances: only of nodes that the pool is placed on, and only since it was made. Nodes know
/// pools by their names, and go on telling what happened to one of the name before.
async fn said_by_nodes(state: &State, tenant: &TenantId, pool: &str) -> Result<Vec<ObjectEvent>, Problem> {
    let Ok(key) = pool.parse().map(|pool| PoolKey { tenant: tenant.clone(), pool }) else {
        return Ok(Vec::new());
    };
    let kind = kind_named("pools").map_err(refuse::bad_request)?;
    let Some(object) = objects::current(&state.store, kind, Some(tenant), pool).await? else {
        return Ok(Vec::new());
    };
    let made_at = object.metadata.created_at;
    let nodes: Vec<_> = state.world.lock().stored.nodes_of(&key).cloned().collect();
    let prefix = format!("{tenant}/{pool}");
    let mut said = Vec::new();
    for node in nodes {
        let Some(live) = state.fleet.get(&node) else { continue };
        for event in &live.lock().events {
            let rest = event.subject.strip_prefix(&prefix);
            let Some(rest) = rest.filter(|rest| rest.is_empty() || rest.starts_with('/')) else { continue };
            let Some(at) = event.at.parse::<Timestamp>().ok().filter(|at| Some(*at) >= made_at) else {
                continue;
            };
            let failed = event.kind.contains("Failed") || event.kind == "ExecTimeout";
            let of = format!("{node}{rest}");
            said.push(ObjectEvent {
                kind: "Pool".to_owned(),
                tenant: Some(tenant.clone()),
                name: pool.to_owned(),
                uid: object.metadata.uid.clone(),
                tenant_uid: String::new(),
                r#type: if failed { EventType::Warning } else { EventType::Normal },
                reason: event.kind.clone(),
                message: format!("{of}: {}", event.message),
                count: 1,
                first_at: at,
                last_at: at,
            });
        }
    }
    Ok(said)
}
