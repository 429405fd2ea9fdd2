//! Other values of a Secret over several nodes: all are told at once, what runs is replaced in turn, and health decides. The values of
//! before are nowhere.

use std::collections::BTreeMap;

use mvm_proto::Digest;
use serde_json::{Value, json};

use crate::rest::Rest;
use crate::rollouts::{ONE_MISSING, POOL, Simulated, begin, condition, phase, pool, shown, three_empty};
use crate::support::{Running, new_cluster, soon, wait_until};

const DB: &str = "/v1/tenants/acme/secrets/db";
const CANARY: &str = "canary-5e9d-";

type Nodes = BTreeMap<&'static str, Simulated>;

async fn set(running: &Running, secret: &str, value: &str) {
    let body = json!({ "spec": { "data": { "PASSWORD": format!("{CANARY}{value}") } } });
    let path = format!("/v1/tenants/acme/secrets/{secret}");
    let set = Rest::operator(running).await.put(&path, &body).await;
    assert!([200, 201].contains(&set.status), "{}", set.body);
}

fn naming(revision: u64, update: &Value, secrets: &[&str]) -> Value {
    let mut pool = pool(revision, update);
    pool["spec"]["secrets"] = json!(secrets);
    pool
}

/// Three nodes with an instance each that was given the first value.
async fn three(running: &Running, update: &Value) -> Nodes {
    let mut nodes = three_empty(running).await;
    set(running, "db", "1").await;
    begin(running, &mut nodes, &naming(1, update, &["db"])).await;
    nodes
}

/// Each accepts the document that names other secrets; those that may replace what they have.
async fn all_told(nodes: &mut Nodes, before: Option<Digest>) -> Vec<&'static str> {
    let mut turns = Vec::new();
    for (name, node) in nodes {
        let update = node.accept_secrets(before).await;
        if update.expect("how far it may roll").may_roll() {
            turns.push(*name);
        }
        node.report("").await;
    }
    turns
}

async fn history(running: &Running) -> Vec<Value> {
    let explained = Rest::operator(running).await.get("/v1/explain/pool/acme/web").await.body;
    assert!(!explained.to_string().contains(CANARY), "{explained}");
    explained["rollout"]["history"].as_array().unwrap().clone()
}

async fn in_turn(nodes: &mut Nodes) {
    for name in ["a", "b", "c"] {
        let node = nodes.get_mut(name).unwrap();
        if node.has != (node.said.0, node.secrets) {
            node.accept_turn().await;
            for (id, other) in nodes.iter_mut().filter(|(other, _)| **other > name) {
                other.catch_up().await;
                assert!(!other.said.1.is_some_and(|update| update.may_roll()), "{id} beside {name}");
                other.report("").await;
            }
            nodes.get_mut(name).unwrap().roll().await;
        }
    }
}

#[tokio::test]
async fn all_nodes_are_told_of_other_values_at_once_and_replace_what_runs_in_turn() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut nodes = three(&running, &ONE_MISSING()).await;
    let first = nodes["a"].secrets;
    set(&running, "db", "2").await;
    assert_eq!(all_told(&mut nodes, first).await, ["a"]);
    let second = nodes["a"].secrets;
    assert!(nodes.values().all(|node| node.secrets == second) && second.is_some());
    let status = phase(&running, "progressing").await;
    assert_eq!((&status["rollout"]["revision"], &status["rollout"]["settled"]), (&json!(2), &json!(1)));
    in_turn(&mut nodes).await;
    let status = phase(&running, "done").await;
    assert_eq!((&status["rollout"]["revision"], &status["rollout"]["settled"]), (&json!(2), &json!(2)));
    let told: Vec<_> = history(&running).await.iter().map(|one| one["cause"].clone()).collect();
    assert_eq!(told, [Value::Null, json!("secret db changed")]);
    assert_eq!(history(&running).await[1]["values_changed"], true);
    // The next one after that, although the grants of this one are in the documents still.
    let before: Vec<_> = nodes.values().map(|node| node.documents).collect();
    set(&running, "db", "3").await;
    assert_eq!(all_told(&mut nodes, second).await, ["a"]);
    in_turn(&mut nodes).await;
    phase(&running, "done").await;
    let after: Vec<_> = nodes.values().map(|node| node.documents).collect();
    assert_eq!([after[0] - before[0], after[1] - before[1], after[2] - before[2]], [1, 2, 2]);
}

#[tokio::test]
async fn while_a_pool_is_paused_other_values_replace_nothing() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut nodes = three(&running, &ONE_MISSING()).await;
    let first = nodes["a"].secrets;
    let paused = json!({ "max_unavailable": 1, "max_surge": 0, "paused": true });
    let mut rest = Rest::operator(&running).await;
    assert_eq!(rest.put(POOL, &naming(1, &paused, &["db"])).await.status, 200);
    set(&running, "db", "2").await;
    assert_eq!(all_told(&mut nodes, first).await, Vec::<&str>::new());
    phase(&running, "paused").await;
    for node in nodes.values_mut() {
        node.session.expect_quiet().await;
    }
    assert_eq!(rest.put(POOL, &naming(1, &ONE_MISSING(), &["db"])).await.status, 200);
    in_turn(&mut nodes).await;
    phase(&running, "done").await;
}

#[tokio::test]
async fn values_that_fail_stop_and_others_that_work_take_their_place() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    // There is nothing to go back to.
    let update = json!({ "max_unavailable": 1, "max_surge": 0, "on_failure": "rollback" });
    let mut nodes = three(&running, &update).await;
    let first = nodes["a"].secrets;
    set(&running, "db", "wrong").await;
    all_told(&mut nodes, first).await;
    let a = nodes.get_mut("a").unwrap();
    a.has = (1, a.secrets);
    let wrong = a.secrets;
    a.report("the program of i-00000001 was started again 3 times in a row").await;
    let status = phase(&running, "failed").await;
    let (_, reason, message) = condition(&status, "RolledOut");
    assert_eq!(reason, "InstancesFailing");
    assert!(message.contains("are not kept: set others with `mvm secret set`"), "{message}");
    // The next coordinator leaves it there.
    running.stop().await;
    let running = Running::start(&start.data_dir).await;
    for node in nodes.values_mut() {
        node.come_back(&running).await;
    }
    nodes.get_mut("a").unwrap().report("it fails").await;
    phase(&running, "failed").await;
    for name in ["b", "c"] {
        let node = nodes.get_mut(name).unwrap();
        node.catch_up().await;
        assert!(!node.said.1.is_some_and(|update| update.may_roll()), "{name}: {:?}", node.said);
        assert_eq!(node.has, (1, first), "{name} goes on with what it was started with");
        node.report("").await;
    }
    set(&running, "db", "right").await;
    assert_eq!(all_told(&mut nodes, wrong).await, ["a"]);
    in_turn(&mut nodes).await;
    let status = phase(&running, "done").await;
    assert_eq!(status["rollout"]["settled"], 3);
}

#[tokio::test]
async fn the_next_coordinator_goes_on_where_the_last_one_ended() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut nodes = three(&running, &ONE_MISSING()).await;
    let first = nodes["a"].secrets;
    set(&running, "db", "2").await;
    assert_eq!(all_told(&mut nodes, first).await, ["a"]);
    nodes.get_mut("a").unwrap().roll().await;
    nodes.get_mut("b").unwrap().accept_turn().await;
    running.stop().await;
    let running = Running::start(&start.data_dir).await;
    // As long as the others were not heard nothing more is begun with.
    nodes.get_mut("c").unwrap().come_back(&running).await;
    nodes.get_mut("c").unwrap().session.expect_quiet().await;
    for name in ["a", "b"] {
        nodes.get_mut(name).unwrap().come_back(&running).await;
    }
    nodes.get_mut("c").unwrap().session.expect_quiet().await;
    in_turn(&mut nodes).await;
    phase(&running, "done").await;
    assert_eq!(history(&running).await.len(), 2);
}

#[tokio::test]
async fn a_pool_that_went_back_is_given_other_values_without_its_failed_revision() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let update = json!({ "max_unavailable": 1, "max_surge": 0, "on_failure": "rollback" });
    let mut nodes = three(&running, &update).await;
    let first = nodes["a"].secrets;
    let mut rest = Rest::operator(&running).await;
    assert_eq!(rest.put(POOL, &naming(2, &update, &["db"])).await.status, 200);
    let a = nodes.get_mut("a").unwrap();
    a.accept_until(2).await;
    a.has = (2, first);
    a.report("it failed").await;
    a.accept_until(1).await;
    a.roll().await;
    phase(&running, "rolled_back").await;
    // What else changes of their documents does not bring them what failed.
    let other = naming(1, &update, &[]);
    assert_eq!(rest.put("/v1/tenants/acme/pools/www", &other).await.status, 201);
    for name in ["a", "b", "c"] {
        let node = nodes.get_mut(name).unwrap();
        soon("another document", node.accept()).await;
        node.catch_up().await;
        node.report("").await;
        assert_eq!(node.said.0, 1, "{name}");
    }
    set(&running, "db", "2").await;
    assert_eq!(all_told(&mut nodes, first).await, ["a"]);
    in_turn(&mut nodes).await;
    let is_back = async || {
        let rollout = shown(&running).await["status"]["rollout"].clone();
        rollout["phase"] == "rolled_back" && rollout["nodes_done"] == 3 && rollout["settled"] == 3
    };
    wait_until("it to be back everywhere", is_back).await;
    assert!(nodes.values().all(|node| node.said.0 == 1 && node.secrets != first));
}

/// A revision that needs no Secret any more goes over the fleet while nodes that have the one before start what needs it.
#[tokio::test]
async fn nodes_that_wait_for_a_revision_name_the_secrets_of_the_one_that_they_have() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut nodes = three(&running, &ONE_MISSING()).await;
    set(&running, "other", "x").await;
    let first = nodes["a"].secrets;
    let mut rest = Rest::operator(&running).await;
    assert_eq!(rest.put(POOL, &naming(2, &ONE_MISSING(), &["other"])).await.status, 200);
    nodes.get_mut("a").unwrap().accept_until(2).await;
    assert_ne!(nodes["a"].secrets, first);
    for name in ["b", "c"] {
        nodes.get_mut(name).unwrap().session.expect_quiet().await;
        assert_eq!(nodes[name].secrets, first, "{name}");
    }
    // Changed in the middle, they are told, and wait for their turn.
    set(&running, "db", "2").await;
    for name in ["b", "c"] {
        let node = nodes.get_mut(name).unwrap();
        let update = node.accept_secrets(first).await.unwrap();
        assert!(!update.may_roll() && node.said.0 == 1, "{name}: {update:?}");
        node.report("").await;
    }
    for name in ["a", "b", "c"] {
        let node = nodes.get_mut(name).unwrap();
        node.accept_until(2).await;
        node.roll().await;
    }
    phase(&running, "done").await;
    let names: Vec<_> =
        history(&running).await.iter().map(|one| one["template"]["secrets"].clone()).collect();
    assert_eq!(names, [json!(["db"]), json!(["other"])]);
    // It is in no revision that a node has.
    assert_eq!(rest.call("DELETE", DB, &[], None).await.status, 200);
}
