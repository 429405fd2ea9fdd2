//! A coordinator ended at every step around what it makes durable and what it sends: nothing that was acknowledged is lost,
//! nothing is done twice, and what is read afterwards is so.
//!
//! For each operation: everything is at rest, a step is armed, the operation is asked for, and the coordinator ends at the
//! step: its runtime is dropped, and from the step on it wrote and sent nothing. Then another one is started on the same
//! store. Steps are counted, so that the table needs no list of them: it is over when the operation is done and its step was
//! not reached. Each step is tried in three [`Round`]s. What must hold is in [`checks`].

mod checks;
mod node;
mod site;

use std::collections::BTreeMap;

use mvm_proto::wire::control::v1::RemoveNodeRequest;
use serde_json::{Value, json};

pub(crate) use self::node::FakeNode;
use self::site::Site;
use crate::rest::Rest;
use crate::support::{Running, document, enrol_body, new_request, post, push_request, wait_until};

/// What is asked of a coordinator while it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    CreateTenant,
    CreatePool,
    CreateKey,
    ChangePool,
    /// Another revision, for one node after the other.
    RollOut,
    ScaleDown,
    ChangeSecret,
    Cordon,
    DeletePool,
    DeleteTenant,
    Push,
    Enrol,
    RemoveNode,
    Status,
}

/// How things go on after the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    /// It is looked at before the client asks again.
    Looked,
    /// The client asks again at once.
    Repeated,
    /// The next coordinator is ended, too, while it starts.
    EndedTwice,
}

/// Where the coordinator ends.
#[derive(Debug, Clone)]
enum At {
    /// The step with this number, counted from when the operation is asked for.
    Nth(u32),
    /// The first step with this name.
    Named(String),
}

/// Each step is tried so often.
const TIMES: u32 = 3;
const ROUNDS: [Round; 3] = [Round::Looked, Round::Repeated, Round::EndedTwice];
/// No operation has as many steps: more are steps that never end.
const MAX_STEPS: u32 = 60;

/// One operation on one object of its own.
#[derive(Debug, Clone)]
struct Case {
    operation: Operation,
    number: u32,
    /// What a node joins with.
    token: String,
}

impl Case {
    fn tenant(&self) -> String {
        match self.operation {
            Operation::CreateTenant | Operation::DeleteTenant => format!("t{}", self.number),
            _ => "acme".to_owned(),
        }
    }

    fn pool(&self) -> String {
        format!("web{}", self.number)
    }

    fn secret(&self) -> String {
        format!("s{}", self.number)
    }

    fn secret_path(&self) -> String {
        format!("{}/secrets/{}", self.tenant_path(), self.secret())
    }

    fn node(&self) -> String {
        format!("n{}", self.number)
    }

    fn tenant_path(&self) -> String {
        format!("/v1/tenants/{}", self.tenant())
    }

    fn pool_path(&self) -> String {
        format!("{}/pools/{}", self.tenant_path(), self.pool())
    }

    /// The object that the operation is about, as the audit log names it; none where it is no object.
    fn object(&self) -> Option<String> {
        match self.operation {
            Operation::CreateTenant | Operation::DeleteTenant => Some(format!("tenant/{}", self.tenant())),
            Operation::CreatePool
            | Operation::ChangePool
            | Operation::RollOut
            | Operation::ScaleDown
            | Operation::DeletePool => Some(format!("pool/{}/{}", self.tenant(), self.pool())),
            Operation::CreateKey => Some(format!("apikey/k{}", self.number)),
            Operation::ChangeSecret => Some(format!("secret/{}/{}", self.tenant(), self.secret())),
            Operation::Cordon => Some("node/a".to_owned()),
            Operation::Push | Operation::Enrol | Operation::RemoveNode | Operation::Status => None,
        }
    }

    /// Brings about what the operation needs.
    async fn prepare(&mut self, site: &mut Site) {
        use Operation::{
            ChangePool, ChangeSecret, DeletePool, DeleteTenant, Enrol, Push, RemoveNode, RollOut, ScaleDown,
        };
        match self.operation {
            ChangePool => site.have(&self.tenant(), &self.pool(), 1).await,
            ScaleDown | DeletePool | RollOut => site.have(&self.tenant(), &self.pool(), 3).await,
            DeleteTenant => {
                site.have_tenant(&self.tenant()).await;
                site.have(&self.tenant(), &self.pool(), 3).await;
            }
            ChangeSecret => {
                site.have_secret(&self.secret_path(), "before").await;
                let mut pool = site::pool(3);
                pool["spec"]["secrets"] = json!([self.secret()]);
                site.have_object(&self.pool_path(), &pool).await;
                let given = async || site.is_given(&self.pool(), &self.secret(), "before");
                wait_until("the nodes to have the secret", given).await;
            }
            Push | RemoveNode => drop(site.running().enrol(&self.node()).await),
            Enrol => self.token = site.running().token(&self.node()).await,
            _ => {}
        }
        site.wait_at_rest().await;
    }

    /// Asks for the operation; whether it was acknowledged.
    async fn ask(&self, running: &Running) -> bool {
        let (tenant, pool) = (&self.tenant(), &self.pool());
        let key = format!("case-{}", self.number);
        match self.operation {
            Operation::CreateTenant => {
                let mut body = site::tenant();
                body["metadata"] = json!({ "name": tenant });
                rest(running, "POST", "/v1/tenants", &key, Some(body)).await
            }
            Operation::CreatePool => {
                let mut body = site::pool(3);
                body["metadata"] = json!({ "name": pool, "labels": { "made": "once" } });
                rest(running, "POST", &format!("{}/pools", self.tenant_path()), &key, Some(body)).await
            }
            Operation::CreateKey => {
                let body = json!({ "metadata": { "name": format!("k{}", self.number) }, "spec": { "role": "viewer" } });
                rest(running, "POST", "/v1/api-keys", &key, Some(body)).await
            }
            Operation::ChangePool => rest(running, "PUT", &self.pool_path(), "", Some(site::pool(3))).await,
            Operation::ChangeSecret => {
                rest(running, "PUT", &self.secret_path(), "", Some(site::secret("after"))).await
            }
            Operation::RollOut => {
                rest(running, "PUT", &self.pool_path(), "", Some(site::larger_pool(3))).await
            }
            Operation::ScaleDown => rest(running, "PUT", &self.pool_path(), "", Some(site::pool(1))).await,
            Operation::Cordon => {
                let cordoned = self.number.is_multiple_of(2);
                let body = json!({ "spec": { "cordoned": cordoned, "labels": { "case": self.number.to_string() } } });
                rest(running, "PUT", "/v1/nodes/a", "", Some(body)).await
            }
            Operation::DeletePool => rest(running, "DELETE", &self.pool_path(), "", None).await,
            Operation::DeleteTenant => rest(running, "DELETE", &self.tenant_path(), "", None).await,
            Operation::Push => {
                let request = push_request(&document(&self.node(), 1 + self.number % 5), 0);
                let Ok(stream) = running.operator().await.push(request).await else { return false };
                let mut stream = stream.into_inner();
                while let Ok(Some(stage)) = stream.message().await {
                    if stage.stage == "stored" {
                        return true;
                    }
                }
                false
            }
            Operation::Enrol => {
                let client = running.http(None).await;
                let (_, csr) = new_request();
                let body = enrol_body(&self.token, &csr, &self.node());
                let answer = tokio::spawn(async move { post(&client, "/v1/enrol", &body).await }).await;
                match answer {
                    Ok(Ok(_)) => true,
                    // Its certificate was lost on the way; the node is of the cluster.
                    Ok(Err(problem)) => problem.code == "token_used",
                    Err(_) => false,
                }
            }
            Operation::RemoveNode => {
                let request = RemoveNodeRequest { node_id: self.node() };
                match running.operator().await.remove_node(request).await {
                    Ok(_) => true,
                    Err(status) => {
                        mvm_client::problem_of(&status).is_some_and(|problem| problem.code == "node_removed")
                    }
                }
            }
            Operation::Status => true,
        }
    }

    /// Whether what was asked for has come about.
    async fn is_done(&self, site: &Site) -> bool {
        let mut rest = Rest::operator(site.running()).await;
        match self.operation {
            Operation::DeletePool => rest.get(&self.pool_path()).await.status == 404,
            Operation::DeleteTenant => rest.get(&self.tenant_path()).await.status == 404,
            // What is told of a pool is written later, and has its steps, too.
            Operation::CreatePool => {
                let shown = rest.get(&self.pool_path()).await.body;
                shown["status"]["ready"] == "3/3" && shown["status"]["observed_generation"] == 1
            }
            Operation::ChangeSecret => {
                is_rolled_out(&mut rest, &self.pool_path()).await
                    && site.is_given(&self.pool(), &self.secret(), "after")
            }
            Operation::RollOut => is_rolled_out(&mut rest, &self.pool_path()).await,
            Operation::Status => {
                let passed = site.points.passed();
                passed.iter().any(|step| step == "after.status") && site.told_of_the_node(self.number).await
            }
            _ => true,
        }
    }
}

/// Whether all nodes have a pool's second revision.
async fn is_rolled_out(rest: &mut Rest, pool: &str) -> bool {
    let rollout = rest.get(pool).await.body["status"]["rollout"].clone();
    rollout["phase"] == "done" && rollout["settled"] == 2
}

/// A request whose answer may never come; whether it was acknowledged. One that was made before is, too.
async fn rest(running: &Running, method: &str, path: &str, key: &str, body: Option<Value>) -> bool {
    let mut rest = Rest::operator(running).await;
    let headers: Vec<_> = (!key.is_empty()).then_some(("idempotency-key", key)).into_iter().collect();
    let answer = rest.try_send(method, path, &headers, body.as_ref()).await;
    let status = answer.map_or(0, |answer| answer.status().as_u16());
    // What was deleted before is gone.
    matches!(status, 200 | 201) || (method == "DELETE" && status == 404)
}

/// Not one that writes what is said of nodes, pools and tenants, which is written together with what else changed meanwhile. What
/// an operation writes has its entry of the audit log or what belongs to the object beside it.
fn is_of_the_operation(step: &str) -> bool {
    let (_, what) = step.split_once('.').unwrap();
    let told = ["objects/nodes", "objects/pools", "objects/tenants", "status"];
    !what.split('+').all(|kind| told.contains(&kind))
}

/// Goes through the table of an operation.
#[allow(clippy::print_stdout, reason = "the figures of the docs")]
async fn table(operation: Operation) {
    let mut site = Site::start().await;
    let mut ends: BTreeMap<String, u32> = BTreeMap::new();
    let mut number = 0;
    for round in ROUNDS {
        let mut ended = 0;
        for step in 1.. {
            assert!(step < MAX_STEPS, "{operation:?} has no end: {:?}", site.points.passed());
            number += 1;
            let mut case = Case { operation, number, token: String::new() };
            case.prepare(&mut site).await;
            let Some(name) = site.end_at(&case, &At::Nth(step), round).await else { break };
            *ends.entry(name).or_default() += 1;
            ended += 1;
        }
        assert!(ended >= 2, "{operation:?} passes a step before and after it");
    }
    // What else is written meanwhile shifts the count of steps: those that were missed are tried by their names.
    let missed: Vec<_> =
        ends.iter().filter(|(name, _)| is_of_the_operation(name)).map(|(name, _)| name.clone()).collect();
    for name in missed {
        while ends[&name] < TIMES {
            number += 1;
            let mut case = Case { operation, number, token: String::new() };
            case.prepare(&mut site).await;
            let round = ROUNDS[number as usize % ROUNDS.len()];
            let ended = site.end_at(&case, &At::Named(name.clone()), round).await;
            assert_eq!(ended.as_ref(), Some(&name), "{operation:?} passes it each time");
            *ends.entry(name.clone()).or_default() += 1;
        }
    }
    let total: u32 = ends.values().sum();
    println!("{operation:?}: ended {total} times at {} steps", ends.len());
    for (step, times) in ends {
        println!("  {times:3}  {step}");
    }
}

#[tokio::test]
async fn a_tenant_is_created_once_wherever_the_coordinator_ends() {
    table(Operation::CreateTenant).await;
}

#[tokio::test]
async fn a_pool_is_created_and_placed_once_wherever_the_coordinator_ends() {
    table(Operation::CreatePool).await;
}

#[tokio::test]
async fn a_key_is_created_once_wherever_the_coordinator_ends() {
    table(Operation::CreateKey).await;
}

#[tokio::test]
async fn a_pool_is_changed_once_wherever_the_coordinator_ends() {
    table(Operation::ChangePool).await;
}

#[tokio::test]
async fn a_revision_is_rolled_out_everywhere_wherever_the_coordinator_ends() {
    table(Operation::RollOut).await;
}

#[tokio::test]
async fn a_pool_is_scaled_down_wherever_the_coordinator_ends() {
    table(Operation::ScaleDown).await;
}

#[tokio::test]
async fn a_secret_is_changed_once_and_its_nodes_have_it_wherever_the_coordinator_ends() {
    table(Operation::ChangeSecret).await;
}

#[tokio::test]
async fn a_node_is_cordoned_once_wherever_the_coordinator_ends() {
    table(Operation::Cordon).await;
}

#[tokio::test]
async fn a_pool_with_instances_is_deleted_wherever_the_coordinator_ends() {
    table(Operation::DeletePool).await;
}

#[tokio::test]
async fn a_tenant_with_instances_is_deleted_wherever_the_coordinator_ends() {
    table(Operation::DeleteTenant).await;
}

#[tokio::test]
async fn a_push_is_stored_wherever_the_coordinator_ends() {
    table(Operation::Push).await;
}

#[tokio::test]
async fn a_node_joins_once_and_has_its_object_wherever_the_coordinator_ends() {
    table(Operation::Enrol).await;
}

#[tokio::test]
async fn a_removed_node_leaves_no_object_wherever_the_coordinator_ends() {
    table(Operation::RemoveNode).await;
}

#[tokio::test]
async fn what_a_node_says_is_told_wherever_the_coordinator_ends() {
    table(Operation::Status).await;
}
