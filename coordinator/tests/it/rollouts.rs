//! A new revision over several nodes: in turn and within limits, stopped or taken back when it fails, through restarts.

use std::collections::BTreeMap;

use mvm_proto::document::Update;
use mvm_proto::envelope::Verified;
use mvm_proto::status::{Capacity, Counts, Feature, Mark, NodeInfo, NodeStatus, PoolStatus};
use mvm_proto::wire::session::v1::{Heartbeat, Stage, agent_frame, coordinator_frame};
use mvm_proto::{Digest, SignedDocument};
use serde_json::{Value, json};

use crate::rest::Rest;
use crate::support::{Node, Running, Session, mark_of, new_cluster, now, soon, wait_until};

pub(crate) const POOL: &str = "/v1/tenants/acme/pools/web";

/// A pool whose revision is told by a variable.
pub(crate) fn pool(revision: u64, update: &Value) -> Value {
    json!({ "spec": {
        "image": { "ref": "builtin:busybox" },
        "resources": { "vcpus": 1, "mem_mib": 64 },
        "workload": { "env": { "REVISION": revision.to_string() } },
        "counts": { "running": 3 },
        "placement": { "max_per_node": 1 },
        "update": update,
    } })
}

/// A node with one instance, which it brings to a revision when it is told to.
pub(crate) struct Simulated {
    node: Node,
    pub(crate) session: Session,
    mark: Option<Mark>,
    /// What its document says: the revision, and how far it may roll to it.
    pub(crate) said: (u64, Option<Update>),
    pub(crate) secrets: Option<Digest>,
    pub(crate) has: (u64, Option<Digest>),
    pub(crate) documents: u32,
}

impl Simulated {
    async fn join(running: &Running, name: &str) -> Self {
        let node = running.enrol(name).await;
        let session = dial(&node, None).await;
        Self { node, session, mark: None, said: (0, None), secrets: None, has: (0, None), documents: 0 }
    }

    pub(crate) async fn come_back(&mut self, running: &Running) {
        self.node.address = running.addresses.quic;
        self.session = dial(&self.node, self.mark.clone()).await;
        self.report("").await;
    }

    /// Accepts whatever was sent to it by now.
    pub(crate) async fn catch_up(&mut self) {
        let mut is_asked = true;
        while std::mem::take(&mut is_asked) {
            let heartbeat = Heartbeat { sequence: 78, info: None };
            self.session.send(agent_frame::Body::Heartbeat(heartbeat)).await;
            loop {
                let body = self.session.next().await;
                match self.session.document_in(body.as_ref()).await {
                    Some(document) => self.take(&document).await,
                    // One that is asked for as a whole comes later.
                    None if matches!(body, Some(coordinator_frame::Body::DocumentDelta(_))) => {
                        is_asked = true;
                    }
                    None => break,
                }
            }
        }
    }

    /// Accepts its next document.
    pub(crate) async fn accept(&mut self) -> (u64, Option<Update>) {
        let document = self.session.document().await;
        self.take(&document).await;
        self.said
    }

    async fn take(&mut self, document: &Verified<SignedDocument>) {
        self.documents += 1;
        self.mark = Some(mark_of(document));
        let pool = &document.get().desired.tenants[0].pools[0];
        let revision = pool.workload.as_ref().unwrap().env["REVISION"].parse().unwrap();
        self.said = (revision, pool.update);
        self.secrets = pool.secrets_hash;
        self.session.ack(mark_of(document), Stage::Accepted).await;
    }

    /// Accepts documents until one names a revision.
    pub(crate) async fn accept_until(&mut self, revision: u64) -> Option<Update> {
        while self.said.0 != revision {
            soon("its turn", self.accept()).await;
        }
        self.said.1
    }

    /// Accepts documents until one names other secrets.
    pub(crate) async fn accept_secrets(&mut self, before: Option<Digest>) -> Option<Update> {
        while self.secrets == before {
            soon("other secrets", self.accept()).await;
        }
        self.said.1
    }

    /// Accepts documents until one lets it replace what it has.
    pub(crate) async fn accept_turn(&mut self) {
        self.catch_up().await;
        while !self.said.1.is_some_and(|update| update.may_roll()) {
            soon("its turn", self.accept()).await;
        }
    }

    pub(crate) async fn roll(&mut self) {
        self.has = (self.said.0, self.secrets);
        self.report("").await;
    }

    pub(crate) async fn report(&mut self, failing: &str) {
        let is_current = u32::from(self.has == (self.said.0, self.secrets));
        let works = u32::from(failing.is_empty());
        let pool = PoolStatus {
            tenant_id: "acme".to_owned(),
            pool_id: "web".to_owned(),
            managed: true,
            actual: Some(Counts { running: 1, ..Counts::default() }),
            current: Some(Counts { running: is_current, ..Counts::default() }),
            serving: works,
            outdated: 1 - is_current,
            failing: failing.to_owned(),
            ..PoolStatus::default()
        };
        let status = NodeStatus {
            node_id: self.node.id.clone(),
            observed_at: now().to_string(),
            accepted: self.mark.clone(),
            converged: self.mark.clone(),
            pools: vec![pool],
            ..NodeStatus::default()
        };
        self.session.send(agent_frame::Body::Status(status)).await;
    }
}

async fn dial(node: &Node, mark: Option<Mark>) -> Session {
    let mut session = node.dial().await.unwrap();
    let capacity = Capacity { vcpus: 8, mem_mib: 65_536, disk_mib: 65_536, max_instances: 100 };
    let mut hello = node.hello(mark);
    hello.info = Some(NodeInfo {
        node_id: node.id.clone(),
        capacity: Some(capacity),
        features: vec![Feature::RolloutLimits.to_string()],
        ..NodeInfo::default()
    });
    session.send(agent_frame::Body::Hello(hello)).await;
    session.welcome().await;
    session
}

/// Three nodes without anything, and a tenant.
pub(crate) async fn three_empty(running: &Running) -> BTreeMap<&'static str, Simulated> {
    let mut rest = Rest::operator(running).await;
    let made = rest.put("/v1/tenants/acme", &json!({ "spec": {} })).await;
    assert_eq!(made.status, 201, "{}", made.body);
    let mut nodes = BTreeMap::new();
    for name in ["a", "b", "c"] {
        nodes.insert(name, Simulated::join(running, name).await);
    }
    nodes
}

/// A coordinator, and three nodes with one instance each of the first revision.
pub(crate) async fn three(running: &Running, update: &Value) -> BTreeMap<&'static str, Simulated> {
    let mut nodes = three_empty(running).await;
    begin(running, &mut nodes, &pool(1, update)).await;
    nodes
}

/// The first revision, on all nodes.
pub(crate) async fn begin(running: &Running, nodes: &mut BTreeMap<&'static str, Simulated>, pool: &Value) {
    let made = Rest::operator(running).await.put(POOL, pool).await;
    assert_eq!(made.status, 201, "{}", made.body);
    for node in nodes.values_mut() {
        node.accept_until(1).await;
        node.roll().await;
    }
    phase(running, "done").await;
}

async fn declare(running: &Running, revision: u64, update: &Value) {
    let answer = Rest::operator(running).await.put(POOL, &pool(revision, update)).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
}

pub(crate) async fn shown(running: &Running) -> Value {
    Rest::operator(running).await.get(POOL).await.body
}

pub(crate) async fn phase(running: &Running, phase: &str) -> Value {
    wait_until(phase, async || shown(running).await["status"]["rollout"]["phase"] == phase).await;
    shown(running).await["status"].clone()
}

pub(crate) fn condition(status: &Value, kind: &str) -> (String, String, String) {
    let one = status["conditions"].as_array().unwrap().iter().find(|one| one["type"] == kind).unwrap();
    let text = |field: &str| one[field].as_str().unwrap().to_owned();
    (text("status"), text("reason"), text("message"))
}

pub(crate) const ONE_MISSING: fn() -> Value = || json!({ "max_unavailable": 1, "max_surge": 0 });

#[tokio::test]
async fn a_revision_goes_to_one_node_after_the_other_and_each_gets_one_document() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let update = ONE_MISSING();
    let mut nodes = three(&running, &update).await;
    let before: Vec<_> = nodes.values().map(|node| node.documents).collect();
    declare(&running, 2, &update).await;
    for name in ["a", "b", "c"] {
        let node = nodes.get_mut(name).unwrap();
        let granted = node.accept_until(2).await.unwrap();
        assert_eq!((granted.max_unavailable, granted.max_surge), (1, 0), "{name}");
        for (other, node) in nodes.iter_mut().filter(|(other, _)| **other != name) {
            node.session.expect_quiet().await;
            assert!(node.said.0 == 1 || *other < name, "{other} before {name}");
        }
        // What was accepted and not carried out holds the others up.
        nodes.get_mut(name).unwrap().report("").await;
        nodes.get_mut(name).unwrap().roll().await;
    }
    let status = phase(&running, "done").await;
    assert_eq!((&status["rollout"]["revision"], &status["rollout"]["settled"]), (&json!(2), &json!(2)));
    assert_eq!(condition(&status, "RolledOut").1, "Done");
    let after: Vec<_> = nodes.values().map(|node| node.documents - 1).collect();
    assert_eq!(before, after, "one document each");
    for node in nodes.values_mut() {
        node.session.expect_quiet().await;
    }
}

#[tokio::test]
async fn a_revision_that_fails_stops_with_the_others_as_they_were_and_undo_takes_it_back() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let update = ONE_MISSING();
    let mut nodes = three(&running, &update).await;
    declare(&running, 2, &update).await;
    let a = nodes.get_mut("a").unwrap();
    a.accept_until(2).await;
    a.has = (2, None);
    a.report("the program of i-00000001 was started again 3 times in a row").await;
    let status = phase(&running, "failed").await;
    let (rolled_out, reason, message) = condition(&status, "RolledOut");
    assert_eq!((rolled_out.as_str(), reason.as_str()), ("False", "InstancesFailing"));
    assert!(message.contains("a: the program of i-00000001"), "{message}");
    for name in ["b", "c"] {
        let node = nodes.get_mut(name).unwrap();
        node.session.expect_quiet().await;
        assert_eq!(node.said.0, 1, "{name}");
    }
    // The next coordinator knows, and so does its history.
    running.stop().await;
    let running = Running::start(&start.data_dir).await;
    for node in nodes.values_mut() {
        node.come_back(&running).await;
    }
    phase(&running, "failed").await;
    let explained = Rest::operator(&running).await.get("/v1/explain/pool/acme/web").await.body;
    let history = explained["rollout"]["history"].as_array().unwrap();
    let values: Vec<_> =
        history.iter().map(|one| one["template"]["workload"]["env"]["REVISION"].clone()).collect();
    assert_eq!(values, [json!("1"), json!("2")]);
    declare(&running, 1, &update).await;
    let a = nodes.get_mut("a").unwrap();
    a.accept_until(1).await;
    a.roll().await;
    let status = phase(&running, "done").await;
    assert_eq!(status["rollout"]["revision"], 3);
}

#[tokio::test]
async fn a_revision_that_fails_goes_back_by_itself_where_the_pool_says_so() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let update = json!({ "max_unavailable": 1, "max_surge": 0, "on_failure": "rollback" });
    let mut nodes = three(&running, &update).await;
    declare(&running, 2, &update).await;
    let a = nodes.get_mut("a").unwrap();
    a.accept_until(2).await;
    a.has = (2, None);
    a.report("it failed").await;
    a.accept_until(1).await;
    a.report("").await;
    a.roll().await;
    let status = phase(&running, "rolled_back").await;
    assert_eq!((&status["rollout"]["revision"], &status["rollout"]["settled"]), (&json!(2), &json!(1)));
    assert_eq!(condition(&status, "RolledOut").0, "False");
    // The object is its user's.
    assert_eq!(shown(&running).await["spec"]["workload"]["env"]["REVISION"], "2");
}

#[tokio::test]
async fn a_rollout_that_comes_no_further_is_told_after_its_deadline_and_goes_on_when_it_is_resumed() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let update = json!({ "max_unavailable": 1, "max_surge": 0, "progress_deadline_seconds": 1, "min_ready_seconds": 0 });
    let mut nodes = three(&running, &update).await;
    let slow = |deadline: u64, annotations: Value| {
        let mut pool = pool(2, &update);
        pool["spec"]["update"]["progress_deadline_seconds"] = json!(deadline);
        pool["spec"]["runtime_policy"] = json!({ "min_running_seconds": 0, "min_warm_seconds": 0 });
        pool["metadata"] = json!({ "tenant": "acme", "name": "web", "annotations": annotations });
        pool
    };
    let mut rest = Rest::operator(&running).await;
    rest.put(POOL, &slow(1, json!({}))).await;
    nodes.get_mut("a").unwrap().accept_until(2).await;
    let status = phase(&running, "failed").await;
    assert_eq!(condition(&status, "Progressing").1, "ProgressDeadlineExceeded");
    rest.put(POOL, &slow(600, json!({ "rollout.mvm/resumed": "now" }))).await;
    let a = nodes.get_mut("a").unwrap();
    // First that it may do nothing, then that it may go on.
    soon("another document", a.accept()).await;
    while a.said.1.is_none_or(|update| update.max_unavailable == 0) {
        soon("its grant", a.accept()).await;
    }
    for name in ["a", "b", "c"] {
        let node = nodes.get_mut(name).unwrap();
        node.accept_until(2).await;
        node.roll().await;
    }
    phase(&running, "done").await;
}

#[tokio::test]
async fn a_paused_rollout_begins_with_nothing_and_a_plan_tells_what_it_would_do() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut nodes = three(&running, &ONE_MISSING()).await;
    let mut rest = Rest::operator(&running).await;
    let mut declared = pool(2, &ONE_MISSING());
    declared["kind"] = json!("Pool");
    declared["api_version"] = json!("mvm/v1");
    declared["metadata"] = json!({ "tenant": "acme", "name": "web" });
    let planned = rest.call("POST", "/v1/plan", &[], Some(&json!({ "objects": [declared] }))).await.body;
    let expected =
        json!([{ "pool": "acme/web", "nodes": 3, "running": 3, "max_unavailable": 1, "max_surge": 0 }]);
    assert_eq!(planned["rollouts"], expected, "{planned}");
    let paused = json!({ "max_unavailable": 1, "max_surge": 0, "paused": true });
    declare(&running, 2, &paused).await;
    phase(&running, "paused").await;
    for node in nodes.values_mut() {
        node.session.expect_quiet().await;
    }
    declare(&running, 2, &ONE_MISSING()).await;
    nodes.get_mut("a").unwrap().accept_until(2).await;
    phase(&running, "progressing").await;
    // A change in the middle goes on from there: the node that was begun with is the first again.
    declare(&running, 3, &ONE_MISSING()).await;
    for name in ["a", "b", "c"] {
        let node = nodes.get_mut(name).unwrap();
        node.accept_until(3).await;
        node.roll().await;
    }
    phase(&running, "done").await;
}
