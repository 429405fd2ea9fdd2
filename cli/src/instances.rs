//! Instances wherever they are: of one agent that is asked directly, or of all nodes through their coordinator.

use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use mvm_proto::ManualAction;
use mvm_proto::status::{InstanceStatus, WakeTiming};
use mvm_proto::wire::control::v1::{ActOnInstanceRequest, ListInstancesRequest, SilentNode};
use mvm_proto::{InstanceId, Phase, PoolId, Problem, TenantId};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::client::{self, next_within, within};
use crate::endpoint::{EndpointArgs, Session};
use crate::exit::Outcome;
use crate::global::Global;
use crate::progress::Progress;

/// `i-0123abcd`, or `tenant/pool/i-0123abcd`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InstanceName {
    pub(crate) pool: Option<(TenantId, PoolId)>,
    pub(crate) id: InstanceId,
}

impl FromStr for InstanceName {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let id = |text: &str| text.parse::<InstanceId>().map_err(|error| format!("an instance id {error}"));
        match text.split('/').collect::<Vec<_>>()[..] {
            [only] => Ok(Self { pool: None, id: id(only)? }),
            [tenant, pool, last] => {
                let tenant = tenant.parse().map_err(|error| format!("a tenant's id {error}"))?;
                let pool = pool.parse().map_err(|error| format!("a pool's id {error}"))?;
                Ok(Self { pool: Some((tenant, pool)), id: id(last)? })
            }
            _ => Err("must be an instance id such as i-0123abcd, or tenant/pool/i-0123abcd".to_owned()),
        }
    }
}

/// How often an instance is looked at while a long step is under way.
const LOOK_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Instances {
    session: Session,
    /// Empty: all nodes.
    node: String,
    timeout: Duration,
}

/// Which instances; absent is all.
#[derive(Debug, Default)]
pub(crate) struct Filter {
    pub(crate) tenant: Option<TenantId>,
    pub(crate) pool: Option<PoolId>,
    pub(crate) phase: Option<Phase>,
    pub(crate) id: Option<InstanceId>,
}

/// An instance, and the node that has it; empty when an agent was asked directly.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Found {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) node_id: String,
    #[serde(flatten)]
    pub(crate) instance: InstanceStatus,
    /// Where the time went, after a wake.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) wake: Option<WakeTiming>,
}

/// An agent's answer to an action.
#[derive(Deserialize)]
struct Acted {
    #[serde(flatten)]
    instance: InstanceStatus,
    wake: Option<WakeTiming>,
}

impl Found {
    fn order(&self) -> [&str; 4] {
        let InstanceStatus { tenant_id, pool_id, instance_id, .. } = &self.instance;
        [&self.node_id, tenant_id, pool_id, instance_id]
    }

    pub(crate) fn name(&self) -> String {
        format!("{}/{}/{}", self.instance.tenant_id, self.instance.pool_id, self.instance.instance_id)
    }

    /// Its place in an agent's API.
    pub(crate) fn path(&self, rest: &str) -> String {
        let InstanceStatus { tenant_id, pool_id, instance_id, .. } = &self.instance;
        format!("/v1/tenants/{tenant_id}/pools/{pool_id}/instances/{instance_id}{rest}")
    }
}

#[derive(Deserialize)]
struct Listed {
    instances: Vec<InstanceStatus>,
}

fn text<T: ToString>(value: Option<&T>) -> String {
    value.map(ToString::to_string).unwrap_or_default()
}

impl Instances {
    pub(crate) async fn open(global: &Global, endpoint: &EndpointArgs) -> Result<Self, Outcome> {
        let node = text(endpoint.node());
        Ok(Self { session: endpoint.open(global).await?, node, timeout: global.timeout() })
    }

    /// What was found, and of which nodes not all could be asked.
    pub(crate) async fn list(&mut self, filter: &Filter) -> Result<(Vec<Found>, Vec<String>), Outcome> {
        match &mut self.session {
            Session::Agent(agent) => {
                let mut query = Vec::new();
                query.extend(filter.tenant.as_ref().map(|tenant| format!("tenant={tenant}")));
                query.extend(filter.pool.as_ref().map(|pool| format!("pool={pool}")));
                query.extend(filter.phase.map(|phase| format!("phase={phase}")));
                query.extend(filter.id.as_ref().map(|id| format!("id={id}")));
                let listed: Listed = agent.get(&format!("/v1/instances?{}", query.join("&"))).await?;
                let found = listed.instances.into_iter();
                Ok((found.map(|instance| Found { instance, ..Found::default() }).collect(), Vec::new()))
            }
            Session::Coordinator(client) => {
                let request = ListInstancesRequest {
                    node_id: self.node.clone(),
                    tenant_id: text(filter.tenant.as_ref()),
                    pool_id: text(filter.pool.as_ref()),
                    phase: text(filter.phase.as_ref()),
                    instance_id: text(filter.id.as_ref()),
                };
                let mut pages = within(self.timeout, client.stream_instances(request)).await?;
                let (mut found, mut missing) = (Vec::new(), Vec::new());
                while let Some(page) = next_within(self.timeout, &mut pages).await? {
                    found.extend(page.instances.into_iter().map(|one| Found {
                        node_id: one.node_id,
                        instance: one.instance.unwrap_or_default(),
                        wake: None,
                    }));
                    missing.extend(page.silent.into_iter().map(told));
                }
                found.sort_by(|a, b| a.order().cmp(&b.order()));
                missing.sort();
                Ok((found, missing))
            }
        }
    }

    /// The one instance of this name.
    pub(crate) async fn find(&mut self, name: &InstanceName) -> Result<Found, Outcome> {
        let (tenant, pool) = name.pool.clone().unzip();
        let filter = Filter { tenant, pool, id: Some(name.id.clone()), ..Filter::default() };
        let (mut found, silent) = self.list(&filter).await?;
        match found.len() {
            1 => Ok(found.remove(0)),
            0 => {
                let asked =
                    if silent.is_empty() { String::new() } else { format!("\n{}", silent.join("\n")) };
                Err(Outcome::Failed(anyhow!(
                    "there is no instance {}{asked}\nsee which there are with: mvm instance list",
                    match &name.pool {
                        Some((tenant, pool)) => format!("{tenant}/{pool}/{}", name.id),
                        None => name.id.to_string(),
                    }
                )))
            }
            _ => {
                let nodes: Vec<_> = found.iter().map(|one| one.node_id.as_str()).collect();
                let nodes = nodes.join(", ");
                let id = &name.id;
                Err(Outcome::Failed(anyhow!("{id} is on several nodes: {nodes}\nsay which with --node")))
            }
        }
    }

    /// Acts, and answers how the instance is then; absent: it is gone.
    pub(crate) async fn act(
        &mut self,
        found: &Found,
        action: ManualAction,
        override_seconds: u64,
        progress: Progress,
    ) -> Result<Option<Found>, Outcome> {
        let begun = Instant::now();
        match self.ask(found, action, override_seconds).await {
            // The node goes on with what takes longer than one answer may.
            Err(Outcome::Failed(error)) if is_unfinished(&error) => {
                progress.say(format!("{} {action} goes on ...", found.name()));
                self.follow(found, action, begun, progress).await
            }
            done => done,
        }
    }

    async fn ask(
        &mut self,
        found: &Found,
        action: ManualAction,
        override_seconds: u64,
    ) -> Result<Option<Found>, Outcome> {
        match &mut self.session {
            Session::Agent(agent) => {
                let body = json!({ "override_seconds": override_seconds });
                let (_, answer) = agent.post(&found.path(&format!("/{action}")), &body).await?;
                if answer.is_empty() {
                    return Ok(None);
                }
                let read: Acted =
                    serde_json::from_slice(&answer).context("could not read the agent's answer")?;
                Ok(Some(Found { instance: read.instance, wake: read.wake, ..found.clone() }))
            }
            Session::Coordinator(client) => {
                let request = ActOnInstanceRequest {
                    node_id: found.node_id.clone(),
                    tenant_id: found.instance.tenant_id.clone(),
                    pool_id: found.instance.pool_id.clone(),
                    instance_id: found.instance.instance_id.clone(),
                    action: action.to_string(),
                    override_seconds: Some(override_seconds),
                };
                let answer = within(self.timeout, client.act_on_instance(request)).await?;
                let wake = answer.wake;
                Ok(answer.instance.map(|instance| Found { instance, wake, ..found.clone() }))
            }
        }
    }

    /// Looks until the instance is where it was meant to go, or failed on the way.
    async fn follow(
        &mut self,
        found: &Found,
        action: ManualAction,
        begun: Instant,
        progress: Progress,
    ) -> Result<Option<Found>, Outcome> {
        let name = InstanceName {
            pool: None,
            id: found.instance.instance_id.parse().map_err(|error| anyhow!("the node's id {error}"))?,
        };
        let mut last = found.instance.phase.clone();
        while begun.elapsed() < self.timeout {
            tokio::time::sleep(LOOK_EVERY).await;
            let filter = Filter { id: Some(name.id.clone()), ..Filter::default() };
            let Some(now) = self.list(&filter).await?.0.into_iter().next() else { return Ok(None) };
            let phase = now.instance.phase.clone();
            if phase != last {
                progress.say(format!("{} is {phase}", now.name()));
                last.clone_from(&phase);
            }
            if phase == action.leads_to().as_str() || phase == Phase::Failed.as_str() {
                return Ok(Some(now));
            }
        }
        let limit = humantime::format_duration(self.timeout);
        Err(Outcome::TimedOut(anyhow!(
            "{} is still {last} after {limit}; the node goes on\nlook again with: mvm instance get {}",
            found.name(),
            name.id
        )))
    }
}

/// Why the instances of a node are not listed, or not all.
fn told(node: SilentNode) -> String {
    let SilentNode { node_id, reason, last_seen_at, instances } = node;
    match last_seen_at.as_str() {
        "" => format!("{node_id} is not told whole: {reason}"),
        at => {
            let its = if instances == 1 {
                "its 1 instance is".into()
            } else {
                format!("its {instances} instances are")
            };
            client::not_connected(&node_id, at, &format!("{its} not listed"))
        }
    }
}

fn is_unfinished(error: &anyhow::Error) -> bool {
    let codes = ["timed_out", "node_silent"];
    error.downcast_ref::<Problem>().is_some_and(|problem| codes.contains(&problem.code.as_str()))
}
