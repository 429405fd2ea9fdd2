//! One instance: everything asked about it goes to the node that has it, down its session.

use std::time::Duration;

use mvm_pki::Identity;
use mvm_proto::wire::control::v1::{
    ActOnInstanceRequest, ActOnInstanceResponse, GetLogsRequest, GetLogsResponse,
};
use mvm_proto::wire::session::v1::{ActOnInstance, GetLogs, reply, request};
use mvm_proto::{InstanceId, NodeId, PoolId, Problem, TenantId};

use super::parse;
use crate::enrolment;
use crate::state::State;

/// The longest a node may take to act on an instance: a boot on a loaded host without KVM.
const ACT_WAIT: Duration = Duration::from_secs(120);
/// The longest a node may take to tell something.
pub(super) const TELL_WAIT: Duration = Duration::from_secs(10);

pub(super) async fn act(
    state: &State,
    asked: &ActOnInstanceRequest,
    by: &Identity,
) -> Result<ActOnInstanceResponse, Problem> {
    let instance =
        InstanceRef::read(state, &asked.node_id, &asked.tenant_id, &asked.pool_id, &asked.instance_id)
            .await?;
    let act = ActOnInstance {
        tenant_id: instance.tenant.to_string(),
        pool_id: instance.pool.to_string(),
        instance_id: instance.instance.to_string(),
        action: asked.action.clone(),
        override_seconds: asked.override_seconds,
        by: by.to_string(),
    };
    match state.fleet.ask(&instance.node, request::Ask::Act(act), ACT_WAIT).await? {
        Some(reply::Answer::Instances(listed)) => {
            Ok(ActOnInstanceResponse { instance: listed.instances.into_iter().next(), wake: listed.wake })
        }
        _ => Err(other_answer(&instance.node)),
    }
}

pub(super) async fn logs(state: &State, asked: &GetLogsRequest) -> Result<GetLogsResponse, Problem> {
    let instance =
        InstanceRef::read(state, &asked.node_id, &asked.tenant_id, &asked.pool_id, &asked.instance_id)
            .await?;
    let logs = GetLogs {
        tenant_id: instance.tenant.to_string(),
        pool_id: instance.pool.to_string(),
        instance_id: instance.instance.to_string(),
        bytes: asked.bytes,
    };
    match state.fleet.ask(&instance.node, request::Ask::GetLogs(logs), TELL_WAIT).await? {
        Some(reply::Answer::Logs(data)) => Ok(GetLogsResponse { data }),
        _ => Err(other_answer(&instance.node)),
    }
}

/// Which instance, on which node of this cluster.
struct InstanceRef {
    node: NodeId,
    tenant: TenantId,
    pool: PoolId,
    instance: InstanceId,
}

impl InstanceRef {
    async fn read(
        state: &State,
        node: &str,
        tenant: &str,
        pool: &str,
        instance: &str,
    ) -> Result<Self, Problem> {
        let instance = Self {
            node: parse("node_id", node)?,
            tenant: parse("tenant_id", tenant)?,
            pool: parse("pool_id", pool)?,
            instance: parse("instance_id", instance)?,
        };
        enrolment::registered(state, &instance.node).await?;
        Ok(instance)
    }
}

pub(super) fn other_answer(node: &NodeId) -> Problem {
    let detail = format!("the answer of node {node} does not match the request");
    Problem::new(502, "node_answer_unreadable", detail, "Upgrade the agent.")
}
