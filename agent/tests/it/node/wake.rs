//! Waking on demand: the request's instance is the request's until it is idle, and no count is filled twice.

use std::time::Duration;

use mvm_agent::node::Place;
use mvm_agent::node::assemble::NodeSettings;
use mvm_proto::status::WakeTiming;
use mvm_proto::{InstanceId, Problem};
use mvm_vmm::{Driver as _, VmState};
use serde_json::json;

use crate::node::documents::{document, parse, pool, simple, tenant};
use crate::node::test_node::{TestNode, condition, settings};

#[tokio::test(start_paused = true)]
async fn a_pool_scales_from_zero_and_back_without_a_sixth_sleeper() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(simple(0, 0, 5));
    node.until_counts(0, 0, 5).await;
    let id = node.ids("sleeping")[2].clone();
    let (acme, workers) = ("acme".parse().unwrap(), "workers".parse().unwrap());
    node.handle.wake(&acme, &workers, &id).await.unwrap();
    node.handle.wake(&acme, &workers, &id).await.unwrap();
    node.until_counts(1, 0, 4).await;
    assert_eq!(node.ids("running"), vec![id]);
    tokio::time::sleep(Duration::from_secs(250)).await;
    node.until_counts(1, 0, 4).await;
    assert_eq!(node.handle.instances(None).len(), 5, "its place in the sleeping count is kept");
    node.until_counts(0, 1, 4).await;
    node.until_counts(0, 0, 5).await;
    assert_eq!(node.handle.instances(None).len(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_for_no_look_and_a_look_older_than_it_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(simple(0, 1, 0));
    node.until_counts(0, 1, 0).await;
    let id = node.ids("warm")[0].clone();
    let age = Duration::from_millis(500);
    node.driver.faults.set_age_of_looks(age);
    node.handle.trigger();
    // The look has begun, and saw it paused.
    tokio::time::sleep(age / 2).await;
    let asked = tokio::time::Instant::now();
    let (acme, workers) = ("acme".parse().unwrap(), "workers".parse().unwrap());
    node.handle.wake(&acme, &workers, &id).await.unwrap();
    assert!(asked.elapsed() < age / 4, "{:?}", asked.elapsed());
    // That look is over, and the next is not.
    tokio::time::sleep(age * 3 / 4).await;
    let found = node.handle.instance(&id).unwrap();
    assert_eq!((found.phase.as_str(), found.reason.as_str()), ("running", "woken on demand"));
}

/// A pool of one sleeper.
async fn one_asleep(dir: &std::path::Path) -> (TestNode, InstanceId) {
    let node = TestNode::start(dir).await;
    node.want(simple(0, 0, 1));
    node.until_counts(0, 0, 1).await;
    let id = node.ids("sleeping")[0].clone();
    (node, id)
}

/// The same, and that one woken.
async fn one_woken(dir: &std::path::Path) -> (TestNode, InstanceId) {
    let (node, id) = one_asleep(dir).await;
    wake_beside(&node, &id).await.unwrap().unwrap();
    node.until_counts(1, 0, 0).await;
    (node, id)
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_says_nothing_is_not_put_back_while_its_vmm_burns_processor_time() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = one_woken(dir.path()).await;
    node.driver.vmm_burns(&id, 50);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(node.ids("running"), std::slice::from_ref(&id), "it works");
    node.driver.vmm_burns(&id, 0);
    tokio::time::sleep(Duration::from_secs(250)).await;
    assert_eq!(node.ids("running"), std::slice::from_ref(&id), "idle, but not for long");
    node.until_counts(0, 1, 0).await;
    node.until_counts(0, 0, 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_vmms_own_load_keeps_nothing_running() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = one_woken(dir.path()).await;
    node.driver.vmm_burns(&id, 1);
    tokio::time::sleep(Duration::from_secs(400)).await;
    node.until_counts(0, 1, 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_begins_the_idle_time_anew_whether_it_finds_the_instance_warm_or_running() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = one_woken(dir.path()).await;
    node.until_counts(0, 1, 0).await;
    for _ in 0..3 {
        wake_beside(&node, &id).await.unwrap().unwrap();
        tokio::time::sleep(Duration::from_secs(250)).await;
        assert_eq!(node.ids("running"), std::slice::from_ref(&id), "used 250 s ago");
    }
    tokio::time::sleep(Duration::from_secs(100)).await;
    node.until_counts(0, 1, 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_wake_under_way_is_taken_for_a_requests_and_puts_no_running_instance_to_rest() {
    for (warm, sleeping, resting) in [(1, 0, "warm"), (0, 1, "sleeping")] {
        let dir = tempfile::tempdir().unwrap();
        let node = TestNode::start(dir.path()).await;
        node.want(simple(1, warm, sleeping));
        node.until_counts(1, warm, sleeping).await;
        // Long enough that no minimum runtime keeps the running one from being put down.
        tokio::time::sleep(Duration::from_secs(120)).await;
        let mut events = node.handle.events().subscribe();
        node.driver.faults.set_latency(Duration::from_secs(1));
        let wake = wake_beside(&node, &node.ids(resting)[0]);
        while !wake.is_finished() {
            tokio::time::sleep(Duration::from_millis(50)).await;
            node.handle.trigger();
        }
        wake.await.unwrap().unwrap();
        node.until_counts(2, 0, 0).await;
        let kinds: Vec<_> = std::iter::from_fn(|| events.try_recv().ok()).map(|event| event.kind).collect();
        assert_eq!(kinds, ["InstanceWoken"], "{resting}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_thousand_requests_for_one_sleeper_are_one_wake() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = one_asleep(dir.path()).await;
    let (acme, workers) = ("acme".parse().unwrap(), "workers".parse().unwrap());
    let mut events = node.handle.events().subscribe();
    let before = node.driver.boots();
    let wakes = (0..1000).map(|_| node.handle.wake(&acme, &workers, &id));
    for woken in futures::future::join_all(wakes).await {
        woken.unwrap();
    }
    assert_eq!(node.driver.boots(), before + 1);
    let mut told = 0;
    while let Ok(event) = events.try_recv() {
        told += usize::from(event.kind == "InstanceWoken");
    }
    assert_eq!(told, 1);
    // The next request is a wake of its own, also after one that failed.
    node.handle.wake(&acme, &workers, &id).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_can_not_be_woken_is_refused_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    let mut small = tenant("acme", 3, &[pool("workers", 1, 0, 1)]);
    small["quotas"]["max_running"] = json!(1);
    node.want(parse(&document(&[small])));
    node.until_counts(1, 0, 1).await;
    let (acme, workers) = ("acme".parse().unwrap(), "workers".parse().unwrap());
    let asleep = node.ids("sleeping")[0].clone();

    let problem = Problem::from(&*node.handle.wake(&acme, &workers, &asleep).await.unwrap_err());
    assert_eq!((problem.status, problem.code.as_str()), (409, "no_room"), "{problem}");
    assert!(problem.detail.contains("max_running"));
    let problem =
        Problem::from(&*node.handle.wake(&acme, &workers, &"i-00000000".parse().unwrap()).await.unwrap_err());
    assert_eq!((problem.status, problem.code.as_str()), (404, "unknown_instance"));
    let foreign = "beta".parse().unwrap();
    let problem = Problem::from(&*node.handle.wake(&foreign, &workers, &asleep).await.unwrap_err());
    assert_eq!(problem.status, 404, "another tenant's instance is not there");
}

#[tokio::test(start_paused = true)]
async fn nothing_of_a_tenant_is_woken_while_its_secrets_are_not_the_documents() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("secrets/acme");
    std::fs::create_dir(dir.path().join("secrets")).unwrap();
    std::fs::write(&bundle, "first").unwrap();
    let node = TestNode::start(dir.path()).await;
    let mut secret = tenant("acme", 3, &[pool("workers", 0, 0, 1)]);
    secret["secrets_hash"] = json!(mvm_proto::Digest::of(b"first").to_string());
    node.want(parse(&document(&[secret])));
    node.until_counts(0, 0, 1).await;
    let (acme, workers) = ("acme".parse().unwrap(), "workers".parse().unwrap());
    let asleep = node.ids("sleeping")[0].clone();

    std::fs::write(&bundle, "another one").unwrap();
    node.handle.trigger();
    node.until(|status| condition(status, "SecretsReady") == "False").await;
    let problem = Problem::from(&*node.handle.wake(&acme, &workers, &asleep).await.unwrap_err());
    assert_eq!((problem.status, problem.code.as_str()), (409, "secrets_changed"), "{problem}");
    assert!(problem.detail.contains("its tenant's secrets changed: the secrets bundle"), "{problem}");
    std::fs::remove_file(&bundle).unwrap();
    let problem = Problem::from(&*node.handle.wake(&acme, &workers, &asleep).await.unwrap_err());
    assert_eq!(problem.code, "secrets_missing", "{problem}");

    std::fs::write(&bundle, "first").unwrap();
    node.handle.trigger();
    node.until(|status| condition(status, "SecretsReady") == "True").await;
    node.handle.wake(&acme, &workers, &asleep).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn one_that_was_started_with_other_secrets_is_not_woken_with_the_documents_new_ones_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("secrets/acme");
    std::fs::create_dir(dir.path().join("secrets")).unwrap();
    std::fs::write(&bundle, "first").unwrap();
    let node = TestNode::start(dir.path()).await;
    let secret = |content: &[u8], critical: bool| {
        let mut pool = pool("workers", 0, 0, 1);
        pool["critical"] = json!(critical);
        let mut tenant = tenant("acme", 3, &[pool]);
        tenant["secrets_hash"] = json!(mvm_proto::Digest::of(content).to_string());
        parse(&document(&[tenant]))
    };
    node.want(secret(b"first", false));
    node.until_counts(0, 0, 1).await;
    let asleep = node.ids("sleeping")[0].clone();

    std::fs::write(&bundle, "second").unwrap();
    // Critical: nothing of the pool is replaced meanwhile.
    node.want(secret(b"second", true));
    node.until(|status| {
        condition(status, "SecretsReady") == "True" && condition(status, "Converged") == "False"
    })
    .await;
    let (acme, workers) = ("acme".parse().unwrap(), "workers".parse().unwrap());
    let problem = Problem::from(&*node.handle.wake(&acme, &workers, &asleep).await.unwrap_err());
    assert_eq!((problem.status, problem.code.as_str()), (409, "secrets_changed"), "{problem}");
    assert_eq!(node.ids("sleeping"), [asleep]);
}

/// Wakes an instance of the only pool while the test goes on.
fn wake_beside(node: &TestNode, id: &InstanceId) -> tokio::task::JoinHandle<Result<WakeTiming, Problem>> {
    let (handle, id) = (node.handle.clone(), id.clone());
    let (acme, workers) = ("acme".parse().unwrap(), "workers".parse().unwrap());
    tokio::spawn(async move {
        let woken = handle.wake(&acme, &workers, &id).await;
        woken.map_err(|error| Problem::from(&*error))
    })
}

#[tokio::test(start_paused = true)]
async fn the_end_of_an_earlier_process_told_late_does_not_end_a_wake() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = one_asleep(dir.path()).await;
    let boots = node.driver.boots();
    let while_it_wakes = Duration::from_secs(2);
    node.driver.faults.set_latency(while_it_wakes);
    let woken = wake_beside(&node, &id);
    for _ in 0..20 {
        tokio::time::sleep(while_it_wakes / 4).await;
        node.driver.tell_earlier_end(&id);
    }
    woken.await.unwrap().unwrap();
    node.driver.faults.clear();
    node.until_counts(1, 0, 0).await;
    assert_eq!(node.driver.boots(), boots + 1, "it was restored, and not started anew");
}

#[tokio::test(start_paused = true)]
async fn a_wake_under_way_is_finished_before_an_orderly_stop_and_keeps_its_memory() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = one_asleep(dir.path()).await;
    let boots = node.driver.boots();
    // What is left to do after the restore takes its time.
    node.driver.faults.set_latency(Duration::from_millis(500));
    let wake = wake_beside(&node, &id);
    while node.driver.boots() == boots {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    node.stop.cancel();
    node.task.await.unwrap();
    wake.await.unwrap().unwrap();
    let vms = node.driver.list().await.unwrap();
    assert_eq!(vms.iter().map(|vm| vm.state).collect::<Vec<_>>(), [VmState::Running]);
    drop((node.driver, node.handle));
    let next = TestNode::start(dir.path()).await;
    assert_eq!(next.ids("running"), [id]);
}

#[tokio::test(start_paused = true)]
async fn a_step_that_waits_for_its_turn_does_not_take_the_room_that_a_wake_was_given() {
    let dir = tempfile::tempdir().unwrap();
    // One step at a time, so that the second start waits for the first.
    let settings = NodeSettings { parallel_steps: 1, ..settings(dir.path()) };
    let node = TestNode::start_with(dir.path(), settings).await;
    let want = |running| {
        let mut small = tenant("acme", 3, &[pool("workers", running, 0, 0), pool("rest", 0, 0, 1)]);
        small["quotas"]["max_running"] = json!(2);
        node.want(parse(&document(&[small])));
    };
    want(0);
    node.until(|status| condition(status, "Converged") == "True").await;
    let asleep = node.ids("sleeping")[0].clone();

    node.driver.faults.set_latency(Duration::from_millis(500));
    want(2);
    while node.handle.instances(None).len() == 1 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // The first start is under way, the second one waits: there is room for one more, which the wake is given.
    node.handle.wake(&"acme".parse().unwrap(), &"rest".parse().unwrap(), &asleep).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let running = node.ids("running");
    assert!(running.contains(&asleep));
    assert_eq!((running.len(), node.vms().await), (2, 2), "max_running is 2");
}

#[tokio::test(start_paused = true)]
async fn a_hundred_wakes_at_once_are_one_restore() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = one_asleep(dir.path()).await;
    let boots = node.driver.boots();
    node.driver.faults.set_latency(Duration::from_millis(50));
    let wakes: Vec<_> = (0..100).map(|_| wake_beside(&node, &id)).collect();
    for wake in wakes {
        wake.await.unwrap().unwrap();
    }
    assert_eq!(node.driver.boots(), boots + 1);
}

#[tokio::test(start_paused = true)]
async fn a_stream_wakes_what_sleeps_where_it_may_and_holds_it_until_it_lets_go() {
    let dir = tempfile::tempdir().unwrap();
    let (node, id) = one_asleep(dir.path()).await;
    let place =
        Place { tenant: "acme".parse().unwrap(), pool: "workers".parse().unwrap(), instance: id.clone() };
    let refused = node.handle.hold(&place, false).await.unwrap_err();
    assert_eq!(Problem::from(&*refused).code, "asleep");
    let held = node.handle.hold(&place, true).await.unwrap();
    assert!(held.woken);
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(node.ids("running"), std::slice::from_ref(&id), "idle for an hour, and held");
    let second = node.handle.hold(&place, false).await.unwrap();
    assert!(!second.woken);
    drop((held, second));
    node.until_counts(0, 0, 1).await;
    let unknown = Place { pool: "others".parse().unwrap(), ..place };
    assert_eq!(Problem::from(&*node.handle.hold(&unknown, true).await.unwrap_err()).code, "unknown_instance");
}
