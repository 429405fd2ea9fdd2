//! A request that comes while its instance is being put to rest: the rest is called off as long as it can be.
//!
//! Every call of the driver takes a second here, so that a sleep has stages: it is paused until 1 s, saved until 2 s, and
//! from then on it sleeps, and its VM is ended until 3 s.

use std::path::Path;
use std::time::Duration;

use mvm_agent::execute::Order;
use mvm_agent::execute::recover::{Recovery, recover};
use mvm_agent::node::actions::Manual;
use mvm_planner::Action;
use mvm_proto::ManualAction;
use mvm_proto::status::WakeTiming;
use mvm_proto::{Digest, InstanceId, Phase, Problem};
use mvm_vmm::Driver as _;
use mvm_vmm::fake::{Fault, Manner};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::node::documents::{document, parse, pool, simple, tenant};
use crate::node::subject::Subject;
use crate::node::test_node::TestNode;

const CALL: Duration = Duration::from_secs(1);

/// One that runs, on a driver that takes its time.
async fn running(dir: &Path) -> (TestNode, InstanceId) {
    let node = TestNode::start(dir).await;
    node.want(simple(1, 0, 0));
    node.until_counts(1, 0, 0).await;
    let id = node.ids("running")[0].clone();
    node.driver.faults.set_latency(CALL);
    (node, id)
}

fn wake(node: &TestNode, id: &InstanceId) -> JoinHandle<Result<WakeTiming, Problem>> {
    let (handle, id) = (node.handle.clone(), id.clone());
    let (acme, workers) = ("acme".parse().unwrap(), "workers".parse().unwrap());
    tokio::spawn(async move {
        let woken = handle.wake(&acme, &workers, &id).await;
        woken.map_err(|error| Problem::from(&*error))
    })
}

async fn kind_of_wake(node: &TestNode, id: &InstanceId) -> String {
    wake(node, id).await.unwrap().unwrap().kind
}

/// What became of the instance, as its fake VM wrote it down.
async fn console(node: &TestNode, id: &InstanceId) -> String {
    String::from_utf8(node.driver.console(id, 4096).await.unwrap()).unwrap()
}

/// It runs and is not put to rest again before it has been idle; then it goes where it was meant to go.
async fn is_the_requests_until_idle(node: &TestNode, id: &InstanceId, (warm, sleeping): (u32, u32)) {
    node.driver.faults.set_latency(Duration::ZERO);
    for _ in 0..20 {
        node.handle.trigger();
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(node.ids("running"), std::slice::from_ref(id), "used a moment ago");
    }
    assert_eq!(node.handle.instances(None).len(), 1, "its place in the count is kept");
    node.until_counts(0, warm, sleeping).await;
    assert_eq!(node.handle.instances(None).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_sleep_is_called_off_in_each_of_its_stages() {
    for (stage, after_ms) in [("pausing", 500), ("saving", 1500), ("saved in this very moment", 1999)] {
        let dir = tempfile::tempdir().unwrap();
        let (node, id) = running(dir.path()).await;
        let mut events = node.handle.events().subscribe();
        let boots = node.driver.boots();
        node.want(simple(0, 0, 1));
        tokio::time::sleep(Duration::from_millis(after_ms)).await;
        let timing = wake(&node, &id).await.unwrap().unwrap();
        assert_eq!(timing.kind, "kept", "{stage}: {timing:?}");
        // Not the rest of the sleep and then a wake: what was begun is taken back.
        assert!(timing.total_ms <= 4000.0, "{stage}: {timing:?}");
        assert_eq!(node.driver.boots(), boots, "{stage}: it went on in its own VM");
        assert_eq!(node.ids("running"), std::slice::from_ref(&id), "{stage}");
        let kinds: Vec<_> = std::iter::from_fn(|| events.try_recv().ok()).map(|event| event.kind).collect();
        assert!(!kinds.iter().any(|kind| kind == "InstanceSlept"), "{stage}: {kinds:?}");
        is_the_requests_until_idle(&node, &id, (0, 1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_is_called_off_at_once() {
    for (warm, sleeping) in [(0, 1), (1, 0)] {
        let dir = tempfile::tempdir().unwrap();
        let (node, id) = running(dir.path()).await;
        node.driver.faults.set_manner(None, Manner::IgnoresSleep);
        node.want(simple(0, warm, sleeping));
        tokio::time::sleep(Duration::from_secs(5)).await;
        let timing = wake(&node, &id).await.unwrap().unwrap();
        assert_eq!(timing.kind, "kept");
        assert!(timing.total_ms <= 2100.0, "no more than the driver's word that it runs, twice: {timing:?}");
        node.driver.faults.set_manner(None, Manner::Good);
        is_the_requests_until_idle(&node, &id, (warm, sleeping)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_pause_is_called_off_until_it_is_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = running(dir.path()).await;
    node.want(simple(0, 1, 0));
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(kind_of_wake(&node, &id).await, "kept");
    is_the_requests_until_idle(&node, &id, (1, 0)).await;
    node.driver.faults.set_latency(CALL);
    assert_eq!(kind_of_wake(&node, &id).await, "resumed", "what rests is woken");
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_hangs_is_stopped_and_nothing_of_it_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = running(dir.path()).await;
    node.driver.faults.set_latency(Duration::ZERO);
    // Written, and the word that it is done never comes.
    node.driver.faults.plan("snapshot", Some(&id), 1, Fault::HangAfter);
    node.want(simple(0, 0, 1));
    while node.driver.faults.hits() == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(kind_of_wake(&node, &id).await, "kept");
    let file = dir.path().join(format!("fake-vms/{id}.json"));
    let entry: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert!(entry["snapshot"].is_null() && entry["vm"]["state"] == "running", "{entry}");
}

#[tokio::test(start_paused = true)]
async fn past_its_point_of_no_return_a_sleep_ends_and_then_the_instance_is_woken() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = running(dir.path()).await;
    let boots = node.driver.boots();
    node.want(simple(0, 0, 1));
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(node.ids("sleeping"), std::slice::from_ref(&id), "its VM is being ended");
    let timing = wake(&node, &id).await.unwrap().unwrap();
    assert_eq!(timing.kind, "woken");
    assert!((400.0..600.0).contains(&timing.queued_ms), "{timing:?}");
    assert_eq!(node.driver.boots(), boots + 1);
}

#[tokio::test(start_paused = true)]
async fn two_requests_and_a_sleep_at_once_are_one_wake() {
    for after_ms in [0, 500, 1000, 1500, 2000, 2500, 3000] {
        let dir = tempfile::tempdir().unwrap();
        let (node, id) = running(dir.path()).await;
        node.want(simple(0, 0, 1));
        tokio::time::sleep(Duration::from_millis(after_ms)).await;
        let (one, two) = (wake(&node, &id), wake(&node, &id));
        let (one, two) = (one.await.unwrap().unwrap(), two.await.unwrap().unwrap());
        assert_eq!((one.kind.as_str(), one.joined || two.joined), (two.kind.as_str(), true), "{after_ms}");
        assert_eq!(node.ids("running"), std::slice::from_ref(&id), "{after_ms}");
        assert_eq!(node.vms().await, 1, "{after_ms}");
        node.driver.faults.set_latency(Duration::ZERO);
        tokio::time::sleep(Duration::from_secs(100)).await;
        assert_eq!(node.ids("running"), [id], "{after_ms}: used 100 s ago");
    }
}

#[tokio::test(start_paused = true)]
async fn a_persons_sleep_is_not_called_off() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = running(dir.path()).await;
    let manual = Manual {
        tenant: "acme".parse().unwrap(),
        pool: "workers".parse().unwrap(),
        instance: id.clone(),
        action: ManualAction::Sleep,
        override_for: Duration::from_secs(600),
        by: "a test".to_owned(),
    };
    let handle = node.handle.clone();
    let sleep = tokio::spawn(async move { handle.act(manual).await });
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let timing = wake(&node, &id).await.unwrap().unwrap();
    assert_eq!(timing.kind, "woken", "{timing:?}");
    assert_eq!(sleep.await.unwrap().unwrap().phase, Phase::Sleeping);
    assert_eq!(console(&node, &id).await, "booted\nsaved\nrestored\n");
}

#[tokio::test(start_paused = true)]
async fn a_rest_whose_place_is_taken_is_not_called_off() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    let want = |workers: [u32; 2], others| {
        let workers = pool("workers", workers[0], 0, workers[1]);
        let mut small = tenant("acme", 3, &[workers, pool("others", others, 0, 0)]);
        small["quotas"]["max_running"] = json!(1);
        node.want(parse(&document(&[small])));
    };
    want([1, 0], 0);
    node.until(|status| crate::node::test_node::condition(status, "Converged") == "True").await;
    let id = node.ids("running")[0].clone();
    node.driver.faults.set_latency(CALL);
    want([0, 1], 1);
    // It is paused by now: another may have its place among those that run.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    node.handle.trigger();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(node.handle.instances(None).len(), 2, "the other one is being started");
    let problem = wake(&node, &id).await.unwrap().unwrap_err();
    assert_eq!(problem.code, "no_room", "{problem}");
    assert_eq!(node.ids("sleeping"), [id], "it went to sleep first");
}

#[tokio::test(start_paused = true)]
async fn secrets_that_were_wiped_for_the_sleep_are_back_when_the_request_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("secrets")).unwrap();
    std::fs::write(dir.path().join("secrets/acme"), "TOKEN=hunter2").unwrap();
    let node = TestNode::start(dir.path()).await;
    let want = |running, sleeping| {
        let mut acme = tenant("acme", 3, &[pool("workers", running, 0, sleeping)]);
        acme["secrets_hash"] = json!(Digest::of(b"TOKEN=hunter2").to_string());
        node.want(parse(&document(&[acme])));
    };
    want(1, 0);
    node.until_counts(1, 0, 0).await;
    let id = node.ids("running")[0].clone();
    node.driver.faults.set_latency(CALL);
    want(0, 1);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(kind_of_wake(&node, &id).await, "kept");
    let bundle = node.handle.guests().read_file(&id, "/run/mvm/secrets/bundle", 1 << 20).await;
    assert_eq!(bundle.unwrap(), b"TOKEN=hunter2");
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_ends_while_it_calls_a_sleep_off_leaves_what_is_true() {
    let cases = [
        ("discard the snapshot of", Fault::HangBefore, Phase::Warm),
        ("discard the snapshot of", Fault::HangAfter, Phase::Warm),
        ("resume", Fault::HangBefore, Phase::Warm),
        ("resume", Fault::HangAfter, Phase::Running),
    ];
    for (call, fault, phase) in cases {
        let dir = tempfile::tempdir().unwrap();
        let subject = Subject::running(dir.path()).await;
        let (faults, id) = (&subject.driver.faults, &subject.id);
        faults.plan("snapshot", Some(id), 1, Fault::HangAfter);
        faults.plan(call, Some(id), 1, fault);
        let hits = async |number: u64| {
            while faults.hits() < number {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let request = async {
            hits(1).await;
            assert!(subject.records().cancel_rest(id), "its snapshot is not recorded yet");
            hits(2).await;
        };
        let lease = subject.records().lease_to_rest(id, Phase::Sleeping).unwrap();
        let order = Order {
            action: Action::Sleep,
            staging: None,
            reason: "the test asks".to_owned(),
            spec: None,
            on_demand: false,
            asked_by: None,
            for_move: false,
        };
        tokio::select! {
            ended = subject.executor.execute(&lease, &order) => panic!("{call} {fault:?}: {ended:?}"),
            () = request => {}
        }
        drop(lease);

        let (driver, now) = (&*subject.executor.driver, subject.executor.clock.now());
        let recovered = recover(driver, subject.records(), Recovery::Act, now).await;
        assert_eq!((recovered.resolved, recovered.unfinished), (1, Vec::new()), "{call} {fault:?}");
        let record = subject.record();
        let left = (record.phase, record.snapshot.is_some(), record.intent.is_some());
        assert_eq!(left, (phase, false, false), "{call} {fault:?}");
        subject.take(Action::Sleep).await.unwrap();
        subject.take(Action::Wake).await.unwrap();
        assert_eq!(subject.record().phase, Phase::Running, "{call} {fault:?}");
    }
}
