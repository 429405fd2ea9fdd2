//! What a coordinator asks of this node on behalf of an operator: the same that the agent's own API answers.
//!
//! Asking twice is asking once: telling changes nothing, and an action on an instance that is already there does
//! nothing more.

use std::str::FromStr;

use mvm_proto::ManualAction;
use mvm_proto::moves::MoveStep;
use mvm_proto::named::UnknownName;
use mvm_proto::status::{InstanceStatus, WakeTiming};
use mvm_proto::wire::session::v1::{
    ActOnInstance, GetLogs, Instances, ListInstances, MoveInstance, Moved, PlanDocument, reply, request,
};
use mvm_proto::{DesiredState, Digest, IdError, InstanceId, Phase, PoolId, Problem, TenantId};

use crate::intake::guest_sessions;
use crate::node::Place;
use crate::node::actions::{Manual, override_for};
use crate::node::handle::{DEFAULT_LOG_BYTES, MAX_LOG_BYTES, NodeHandle};
use crate::node::transfer::Ordered;

/// A plan of ten thousand steps is shorter; a frame has room for more.
const MAX_PLAN_BYTES: usize = 3 * 1024 * 1024;
/// Of the name of a move: 32 hexadecimal digits.
const MAX_MOVE_ID_BYTES: usize = 64;

pub(super) async fn answer(
    node: &NodeHandle,
    ask: Option<request::Ask>,
) -> Result<Option<reply::Answer>, Problem> {
    match ask {
        Some(request::Ask::ListInstances(asked)) => list(node, &asked).map(|found| Some(page(found, &asked))),
        Some(request::Ask::Act(asked)) => act(node, &asked).await.map(Some),
        Some(request::Ask::GetLogs(asked)) => logs(node, &asked).await.map(Some),
        Some(request::Ask::Plan(asked)) => plan(node, &asked).map(Some),
        Some(request::Ask::ListSessions(asked)) => {
            let (tenant, pool) = (wanted("tenant_id", &asked.tenant_id)?, wanted("pool_id", &asked.pool_id)?);
            Ok(Some(guest_sessions::list(node, tenant, pool, asked).await))
        }
        Some(request::Ask::DeleteSessions(asked)) => {
            let (tenant, pool) = (id("tenant_id", &asked.tenant_id)?, wanted("pool_id", &asked.pool_id)?);
            if pool.is_none() && asked.session.is_some() {
                return Err(bad("session", &"must be the number of a session of a pool"));
            }
            Ok(Some(guest_sessions::delete(node, tenant, pool, asked).await))
        }
        Some(request::Ask::MoveInstance(asked)) => move_instance(node, asked).await.map(Some),
        Some(request::Ask::Ping(_)) => Ok(None),
        // A tunnel is the session's to open.
        Some(request::Ask::OpenTunnel(_)) | None => Err(unknown_request()),
    }
}

fn instances(instances: Vec<InstanceStatus>, wake: Option<WakeTiming>) -> reply::Answer {
    reply::Answer::Instances(Instances { instances, wake, more: false })
}

/// Those of `found` that were asked for. Coordinators that know no pages set no limit, and get all.
fn page(mut found: Vec<InstanceStatus>, asked: &ListInstances) -> reply::Answer {
    let mut more = false;
    if asked.limit > 0 {
        found.retain(|one| one.instance_id > asked.after);
        found.sort_by(|a, b| a.instance_id.cmp(&b.instance_id));
        let limit = usize::try_from(asked.limit).unwrap_or(usize::MAX);
        more = found.len() > limit;
        found.truncate(limit);
    }
    reply::Answer::Instances(Instances { instances: found, wake: None, more })
}

fn list(node: &NodeHandle, asked: &ListInstances) -> Result<Vec<InstanceStatus>, Problem> {
    let tenant: Option<TenantId> = wanted("tenant_id", &asked.tenant_id)?;
    let pool: Option<PoolId> = wanted("pool_id", &asked.pool_id)?;
    let instance: Option<InstanceId> = wanted("instance_id", &asked.instance_id)?;
    if !asked.phase.is_empty() && asked.phase.parse::<Phase>().is_err() {
        return Err(bad("phase", &"must be a phase of an instance"));
    }
    let mut found = node.instances(tenant.as_ref());
    found.retain(|one| {
        pool.as_ref().is_none_or(|pool| one.pool_id == pool.as_str())
            && instance.as_ref().is_none_or(|id| one.instance_id == id.as_str())
            && (asked.phase.is_empty() || one.phase == asked.phase)
    });
    Ok(found)
}

async fn act(node: &NodeHandle, asked: &ActOnInstance) -> Result<reply::Answer, Problem> {
    let (tenant, pool, instance) = place(&asked.tenant_id, &asked.pool_id, &asked.instance_id)?;
    let action: ManualAction = asked.action.parse().map_err(|rule: UnknownName| bad("action", &rule))?;
    let override_for = override_for(asked.override_seconds)?;
    let by = asked.by.clone();
    let (t, p, i) = (tenant.clone(), pool.clone(), instance.clone());
    let acted = node.act(Manual { tenant, pool, instance, action, override_for, by }).await?;
    Ok(instances(node.find(&t, &p, &i).into_iter().collect(), acted.wake))
}

async fn logs(node: &NodeHandle, asked: &GetLogs) -> Result<reply::Answer, Problem> {
    let (tenant, pool, instance) = place(&asked.tenant_id, &asked.pool_id, &asked.instance_id)?;
    node.find(&tenant, &pool, &instance)?;
    let bytes = match asked.bytes {
        0 => DEFAULT_LOG_BYTES,
        bytes => usize::try_from(bytes).unwrap_or(MAX_LOG_BYTES).min(MAX_LOG_BYTES),
    };
    Ok(reply::Answer::Logs(node.console(&instance, bytes).await?))
}

fn plan(node: &NodeHandle, asked: &PlanDocument) -> Result<reply::Answer, Problem> {
    let desired = DesiredState::parse(&asked.document)?;
    // A plan of strings, numbers and lists always serialises.
    let plan = serde_json::to_vec(&node.plan(&desired)).unwrap_or_default();
    if plan.len() > MAX_PLAN_BYTES {
        let detail = format!("the plan has {} bytes, and {MAX_PLAN_BYTES} are the most", plan.len());
        return Err(Problem::new(413, "plan_too_large", detail, "Plan fewer tenants at once."));
    }
    Ok(reply::Answer::Plan(plan))
}

async fn move_instance(node: &NodeHandle, asked: MoveInstance) -> Result<reply::Answer, Problem> {
    let (tenant, pool, instance) = place(&asked.tenant_id, &asked.pool_id, &asked.instance_id)?;
    let step: MoveStep = asked.step.parse().map_err(|rule: UnknownName| bad("step", &rule))?;
    let peer = id("peer_node_id", &asked.peer_node_id)?;
    if asked.move_id.is_empty() || asked.move_id.len() > MAX_MOVE_ID_BYTES {
        return Err(bad("move_id", &"must not be empty, and no longer than 64 bytes"));
    }
    let ticket = match asked.ticket.is_empty() {
        true => None,
        false => Some(asked.ticket[..].try_into().map_err(|_| bad("ticket", &"must have 32 bytes"))?),
    };
    let snapshot = match asked.snapshot.as_str() {
        "" => None,
        digest => Some(digest.parse::<Digest>().map_err(|_| bad("snapshot", &"must be a digest"))?),
    };
    let counts: Phase = asked.phase.parse().map_err(|_| bad("phase", &"must be a phase of an instance"))?;
    let by = "the coordinator".to_owned();
    let place = Place { tenant, pool, instance };
    let moved = node
        .transfer(Ordered { place, step, move_id: asked.move_id, peer, counts, ticket, snapshot, by })
        .await?;
    let snapshot = moved.snapshot.map(|digest| digest.to_string()).unwrap_or_default();
    Ok(reply::Answer::Moved(Moved { snapshot, is_here: moved.is_here }))
}

fn place(tenant: &str, pool: &str, instance: &str) -> Result<(TenantId, PoolId, InstanceId), Problem> {
    Ok((id("tenant_id", tenant)?, id("pool_id", pool)?, id("instance_id", instance)?))
}

fn id<T: FromStr<Err = IdError>>(field: &str, text: &str) -> Result<T, Problem> {
    text.parse().map_err(|rule: IdError| bad(field, &rule))
}

/// An id that need not be given.
fn wanted<T: FromStr<Err = IdError>>(field: &str, text: &str) -> Result<Option<T>, Problem> {
    if text.is_empty() { Ok(None) } else { id(field, text).map(Some) }
}

fn bad(field: &str, rule: &dyn std::fmt::Display) -> Problem {
    Problem::new(400, "bad_id", format!("{field} {rule}"), "Correct it.")
}

fn unknown_request() -> Problem {
    let remediation = "Upgrade the agent, or ask for what its version knows.";
    Problem::new(501, "unknown_request", "this agent does not know that request", remediation)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(answer: reply::Answer) -> (Vec<String>, bool) {
        let reply::Answer::Instances(page) = answer else { panic!("not a list") };
        (page.instances.into_iter().map(|one| one.instance_id).collect(), page.more)
    }

    #[test]
    fn a_list_is_told_in_pages_by_the_order_of_ids() {
        let found: Vec<_> = ["i-3", "i-1", "i-2"]
            .map(|id| InstanceStatus { instance_id: id.to_owned(), ..InstanceStatus::default() })
            .to_vec();
        let asked =
            |after: &str, limit| ListInstances { after: after.to_owned(), limit, ..ListInstances::default() };
        let of = |after, limit| ids(page(found.clone(), &asked(after, limit)));
        assert_eq!(of("", 2), (vec!["i-1".to_owned(), "i-2".to_owned()], true));
        assert_eq!(of("i-2", 2), (vec!["i-3".to_owned()], false));
        assert_eq!(of("i-3", 2), (vec![], false));
        assert_eq!(of("", 0).0.len(), 3, "a coordinator that knows no pages");
    }
}
