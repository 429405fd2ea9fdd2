//! What a pool says in place of its image and its tenant: its workload, its secrets, and the addresses of its node.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use mvm_proto::guest::Words;
use mvm_proto::guest::workload_override::User;
use mvm_proto::status::NodeStatus;
use mvm_proto::{DesiredState, Digest, InstanceId};
use mvm_vmm::FakeDriver;
use mvm_vmm::fake::Manner;
use serde_json::{Value, json};

use crate::node::documents::{document, parse, pool, tenant};
use crate::node::test_node::{TestNode, condition, settings};

fn workload() -> Value {
    json!({ "command": ["/bin/app"], "env": { "MODE": "pool" }, "working_dir": "/srv", "user": "app" })
}

fn want(running: u32, sleeping: u32, workload: Value) -> DesiredState {
    let mut workers = pool("workers", running, 0, sleeping);
    workers["workload"] = workload;
    parse(&document(&[tenant("acme", 3, &[workers])]))
}

async fn forking(dir: &Path) -> TestNode {
    let driver = FakeDriver::open(&dir.join("fake-vms")).unwrap().with_forks();
    TestNode::start_on(dir, settings(dir), driver).await
}

/// What the guest was told, as far as the document above says it.
fn is_told(node: &TestNode, id: &InstanceId) -> bool {
    node.driver.workload_override(id).is_some_and(|told| {
        told.command == Some(Words { words: vec!["/bin/app".to_owned()] })
            && told.args.is_none()
            && told.env.into_iter().eq([("MODE".to_owned(), "pool".to_owned())])
            && (told.directory, told.user) == ("/srv".to_owned(), Some(User::Name("app".to_owned())))
    })
}

#[tokio::test(start_paused = true)]
async fn a_pools_workload_reaches_guests_that_boot_fork_and_wake_also_under_another_agent() {
    let dir = tempfile::tempdir().unwrap();
    let node = forking(dir.path()).await;
    node.want(want(2, 0, workload()));
    node.until_counts(2, 0, 0).await;
    let ids = node.ids("running");
    assert!(ids.iter().all(|id| is_told(&node, id)), "forks");
    node.want(want(0, 2, workload()));
    node.until_counts(0, 0, 2).await;
    node.kill().await;
    let node = forking(dir.path()).await;
    node.want(want(2, 0, workload()));
    node.until_counts(2, 0, 0).await;
    assert!(ids.iter().all(|id| is_told(&node, id)), "woken");

    // Without templates.
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    node.want(want(1, 0, workload()));
    node.until_counts(1, 0, 0).await;
    let id = node.ids("running").remove(0);
    assert!(is_told(&node, &id), "booted");
    // Another one is another revision: another guest of the same name.
    let boots = node.driver.boots();
    let mut events = node.handle.events().subscribe();
    node.want(want(1, 0, json!({ "user": 7 })));
    let replaced = async { while events.recv().await.unwrap().kind != "InstanceReplaced" {} };
    tokio::time::timeout(std::time::Duration::from_secs(3600), replaced).await.unwrap();
    node.until_counts(1, 0, 0).await;
    assert_eq!((node.ids("running"), node.driver.boots() > boots), (vec![id.clone()], true));
    assert_eq!(node.driver.workload_override(&id).unwrap().user, Some(User::Id(7)));
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_does_not_know_the_feature_is_not_started_and_that_is_told() {
    for (forks, manner) in
        [(false, Manner::WithoutFeatures), (true, Manner::WithoutFeatures), (false, Manner::Old)]
    {
        let dir = tempfile::tempdir().unwrap();
        let driver = FakeDriver::open(&dir.path().join("fake-vms")).unwrap();
        let driver = if forks { driver.with_forks() } else { driver };
        driver.faults.set_manner(None, manner);
        let node = TestNode::start_on(dir.path(), settings(dir.path()), driver).await;
        let mut events = node.handle.events().subscribe();
        node.want(want(1, 0, workload()));
        let outdated = async {
            loop {
                let event = events.recv().await.unwrap();
                if event.kind == "GuestOutdated" {
                    return event;
                }
            }
        };
        let told = tokio::time::timeout(std::time::Duration::from_secs(3600), outdated).await.unwrap();
        assert!(told.message.contains("too old to know `workload`"), "{}", told.message);
        let status = node.until(|status| condition(status, "Converged") == "False").await;
        let failing = || node.handle.instances(None).iter().any(|i| i.reason.contains("too old to know"));
        node.until(|_| failing()).await;
        assert_eq!(status.pools[0].actual.unwrap().running, 0);
        // Without the override the same image runs as before.
        node.want(parse(&document(&[tenant("acme", 3, &[pool("workers", 1, 0, 0)])])));
        node.until_counts(1, 0, 0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_pool_with_secrets_of_its_own_waits_for_them_alone() {
    let dir = tempfile::tempdir().unwrap();
    let secrets = dir.path().join("secrets");
    fs::create_dir(&secrets).unwrap();
    fs::write(secrets.join("acme"), b"whole").unwrap();
    let node = TestNode::start(dir.path()).await;
    let desired = |running: u32| {
        let mut own = pool("own", running, 0, 1 - running);
        own["secrets_hash"] = json!(Digest::of(b"own").to_string());
        let mut acme = tenant("acme", 3, &[own, pool("shared", 1, 0, 0)]);
        acme["secrets_hash"] = json!(Digest::of(b"whole").to_string());
        parse(&document(&[acme]))
    };
    let given = async |pool: &str| {
        let instances = node.handle.instances(None);
        let one = instances.iter().find(|i| i.pool_id == pool && i.phase == "running").unwrap();
        let id = one.instance_id.parse().unwrap();
        node.handle.guests().read_file(&id, "/run/mvm/secrets/bundle", 1 << 20).await.unwrap()
    };
    let until = async |running: usize| {
        let there = || node.ids("running").len() == running;
        node.until(|status| there() && condition(status, "Converged") == "True").await
    };
    node.want(desired(1));
    let missing = |status: &NodeStatus| condition(status, "SecretsReady") == "False";
    let status = node.until(|status| missing(status) && node.ids("running").len() == 1).await;
    assert_eq!(given("shared").await, b"whole");
    let message = &status.conditions.iter().find(|c| c.r#type == "SecretsReady").unwrap().message;
    assert!(
        message.starts_with("acme/own: there is no secrets bundle ") && message.ends_with("pool.acme.own"),
        "{message}"
    );
    fs::write(secrets.join("pool.acme.own"), b"own").unwrap();
    until(2).await;
    assert_eq!((given("own").await, given("shared").await), (b"own".to_vec(), b"whole".to_vec()));
    // What it slept with it gets again; the tenant's is nothing to it.
    node.want(desired(0));
    until(1).await;
    assert_eq!(node.ids("sleeping").len(), 1);
    fs::write(secrets.join("acme"), b"another").unwrap();
    node.want(desired(1));
    let status = node.until(|status| missing(status) && node.ids("running").len() == 2).await;
    assert_eq!(given("own").await, b"own");
    let message = &status.conditions.iter().find(|c| c.r#type == "SecretsReady").unwrap().message;
    assert!(message.starts_with("acme/shared: ") && message.contains("not sha256:"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn addresses_are_given_from_the_nodes_blocks_and_one_from_elsewhere_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let node = TestNode::start(dir.path()).await;
    let want = |running: u32, blocks: Value| {
        let mut acme = tenant("acme", 3, &[pool("workers", running, 0, 0)]);
        acme["network"]["address_blocks"] = blocks;
        acme["network"]["reserved_offsets"] = json!([33]);
        parse(&document(&[acme]))
    };
    let offsets = || -> BTreeSet<u8> {
        let last = |address: &str| address.rsplit('.').next().unwrap().parse::<u8>().unwrap();
        node.handle.instances(None).iter().map(|instance| last(&instance.address)).collect()
    };
    node.want(want(2, json!([0])));
    node.until_counts(2, 0, 0).await;
    assert_eq!(offsets(), BTreeSet::from([3, 4]));
    node.want(want(5, json!([2])));
    node.until_counts(5, 0, 0).await;
    assert_eq!(offsets(), BTreeSet::from([3, 4, 32, 34, 35]));
    // They go on with it, also when they start anew.
    let ids = node.ids("running");
    let mut anew = want(5, json!([2]));
    anew.tenants[0].pools[0].instance_resources.mem_mib = 256;
    node.want(anew);
    let revised = |status: &NodeStatus| {
        let now = status.pools.first().map(|pool| pool.revision.clone());
        node.handle.instances(None).iter().all(|i| Some(&i.revision) == now.as_ref())
            && condition(status, "Converged") == "True"
    };
    node.until(revised).await;
    assert_eq!((node.ids("running"), offsets()), (ids, BTreeSet::from([3, 4, 32, 34, 35])));
}
