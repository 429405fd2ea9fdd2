//! Images that image keys no longer vouch for: what runs goes on, nothing of them is started again. And what nodes build.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mvm_agent::intake::acceptor::Acceptor;
use mvm_agent::node::actions::Manual;
use mvm_agent::node::assemble::NodeSettings;
use mvm_image::{ImageSettings, Images, NixSettings};
use mvm_planner::Action;
use mvm_proto::ManualAction;
use mvm_proto::{Digest, InstanceId, Phase, Problem};
use mvm_vmm::FakeDriver;
use serde_json::{Value, json};

use crate::node::cluster::{Cluster, payload};
use crate::node::documents::simple;
use crate::node::subject::Subject;
use crate::node::test_node::{TestNode, condition, reason, settings};

fn image() -> Digest {
    Digest::of(b"image")
}

/// A document for one pool of the image, as a director signs it.
fn of_image(generation: u64, flake_ref: &str, counts: [u32; 3]) -> Value {
    let mut document = payload(1, generation);
    let pool = &mut document["tenants"][0]["pools"][0];
    let [running, warm, sleeping] = counts;
    pool["desired_counts"] = json!({ "running": running, "warm": warm, "sleeping": sleeping });
    pool["flake_ref"] = json!(flake_ref);
    pool["image_digest"] = json!(image().to_string());
    document
}

/// A node outside a development cluster.
struct Member {
    cluster: Cluster,
    acceptor: Arc<Acceptor>,
    node: TestNode,
}

impl Member {
    async fn start(dir: &Path) -> Self {
        let cluster = Cluster::production();
        let acceptor = cluster.open();
        let settings = NodeSettings { vouched: acceptor.vouched(), ..settings(dir) };
        let node = TestNode::start_with(dir, settings).await;
        let member = Self { cluster, acceptor, node };
        member.vouch(1, &[image()], &[]).await;
        member
    }

    async fn vouch(&self, version: u64, digests: &[Digest], sources: &[(&str, Digest)]) {
        let statement = self.cluster.statement(version, digests, sources);
        self.acceptor.update_trust(&[], &[statement]).await.unwrap();
    }

    async fn accept(&self, document: &Value) {
        assert!(self.acceptor.accept(&self.cluster.sign(document)).await.unwrap().is_new);
        self.node.desired.send_replace(self.acceptor.current_document().borrow().clone());
    }

    async fn wake(&self, id: &InstanceId) -> Result<(), Problem> {
        let (acme, workers) = ("acme".parse().unwrap(), "workers".parse().unwrap());
        let woken = self.node.handle.wake(&acme, &workers, id).await;
        woken.map(drop).map_err(|error| Problem::from(&*error))
    }

    async fn until_revoked(&self) {
        self.node.until(|status| reason(status, "ImagesVouched") == "Revoked").await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_runs_a_revoked_image_goes_on_and_is_not_restarted_until_it_is_vouched_for_again() {
    let dir = tempfile::tempdir().unwrap();
    let member = Member::start(dir.path()).await;
    let node = &member.node;
    member.accept(&of_image(1, "builtin:busybox", [2, 0, 0])).await;
    node.until_counts(2, 0, 0).await;
    let ids = node.ids("running");
    let mut events = node.handle.events().subscribe();
    member.vouch(2, &[], &[]).await;
    member.until_revoked().await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!((node.ids("running"), node.vms().await), (ids.clone(), 2), "what runs goes on");
    let told = std::iter::from_fn(|| events.try_recv().ok()).find(|event| event.kind == "ImageRevoked");
    assert_eq!(told.unwrap().subject, image().to_string());

    node.driver.crash(&ids[0]);
    node.handle.trigger();
    node.until(|status| status.pools[0].failed == 1).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!((node.ids("running").len(), node.vms().await), (1, 1), "what crashed stays down");
    let status = node.handle.status().borrow().clone();
    assert_eq!(
        (condition(&status, "ArtifactsReady"), reason(&status, "ArtifactsReady")),
        ("False", "NotVouched")
    );
    let why = format!("no image key vouches for image {}", image());
    assert!(status.pools[0].deferred[0].contains(&why), "{:?}", status.pools[0].deferred);

    member.vouch(3, &[image()], &[]).await;
    node.until_counts(2, 0, 0).await;
    assert_eq!(node.ids("running"), ids);
    assert_eq!(condition(&node.handle.status().borrow(), "ImagesVouched"), "True");
}

#[tokio::test(start_paused = true)]
async fn nothing_that_rests_on_a_revoked_image_is_woken_until_it_is_vouched_for_again() {
    let dir = tempfile::tempdir().unwrap();
    let member = Member::start(dir.path()).await;
    let node = &member.node;
    member.accept(&of_image(1, "builtin:busybox", [0, 1, 1])).await;
    node.until_counts(0, 1, 1).await;
    let resting = [node.ids("sleeping")[0].clone(), node.ids("warm")[0].clone()];
    member.vouch(2, &[], &[]).await;
    for id in &resting {
        // At once: no pass has looked at the new statement yet.
        let refused = member.wake(id).await.unwrap_err();
        assert_eq!(refused.code, "image_not_vouched");
        assert!(
            refused.detail.contains(&format!("no image key vouches for image {}", image())),
            "{refused:?}"
        );
    }
    member.until_revoked().await;
    for id in &resting {
        let by_hand = Manual {
            tenant: "acme".parse().unwrap(),
            pool: "workers".parse().unwrap(),
            instance: id.clone(),
            action: ManualAction::Wake,
            override_for: Duration::ZERO,
            by: "test".to_owned(),
        };
        let refused = Problem::from(node.handle.act(by_hand).await.unwrap_err());
        assert_eq!(refused.code, "image_not_vouched");
    }
    assert_eq!([node.ids("sleeping").len(), node.ids("warm").len()], [1, 1], "they rest as before");

    member.vouch(3, &[image()], &[]).await;
    node.until(|status| condition(status, "ImagesVouched") == "True").await;
    for id in &resting {
        member.wake(id).await.unwrap();
    }
    assert_eq!(node.ids("running").len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_document_names_more_instances_of_an_image_that_was_revoked_since() {
    let dir = tempfile::tempdir().unwrap();
    let member = Member::start(dir.path()).await;
    let node = &member.node;
    member.accept(&of_image(1, "builtin:busybox", [1, 0, 0])).await;
    node.until_counts(1, 0, 0).await;
    member.accept(&of_image(2, "builtin:busybox", [4, 0, 0])).await;
    member.vouch(2, &[], &[]).await;
    member.until_revoked().await;
    let there = node.vms().await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(node.vms().await, there, "neither booted nor forked from its pool's template");
}

/// Below the planner: also where a step was begun just before.
#[tokio::test(start_paused = true)]
async fn no_step_starts_a_revoked_image() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::production();
    let acceptor = cluster.open();
    let mut subject = Subject::sleeping(dir.path()).await;
    subject.executor.images = Images::imagined(acceptor.vouched());
    let refused = subject.take(Action::Wake).await.unwrap_err().to_string();
    assert!(refused.contains("no image key vouches"), "{refused}");
    let record = subject.record();
    assert_eq!((record.phase, record.snapshot.is_some()), (Phase::Sleeping, true), "nothing is lost");
    assert!(subject.take(Action::Replace).await.is_err());
    assert_eq!(subject.record().phase, Phase::Sleeping, "nothing is stopped for what can't start");
    subject.executor.images = Images::imagined(mvm_image::Vouched::unchecked());
    subject.take(Action::Wake).await.unwrap();
    subject.take(Action::Warm).await.unwrap();
    subject.executor.images = Images::imagined(acceptor.vouched());
    assert!(subject.take(Action::Resume).await.is_err());
    assert_eq!(subject.record().phase, Phase::Warm);
}

/// A program in the place of nix that writes down how it is called, and fails.
fn recording_nix(dir: &Path) -> (NixSettings, PathBuf) {
    let (program, calls) = (dir.join("nix"), dir.join("calls"));
    std::fs::write(&program, format!("#!/bin/sh\necho \"$@\" >> '{}'\nexit 1\n", calls.display())).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    (NixSettings { program, ..NixSettings::default() }, calls)
}

#[tokio::test]
async fn a_stolen_director_key_has_nodes_build_nothing_that_no_image_key_names_as_a_source() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::production();
    let acceptor = cluster.open();
    let (nix, calls) = recording_nix(dir.path());
    let settings = NodeSettings { vouched: acceptor.vouched(), ..settings(dir.path()) };
    let images = ImageSettings { nix, vouched: acceptor.vouched(), ..ImageSettings::default() };
    let images = Images::open(&settings.images_dir, images).unwrap();
    let node = TestNode::start_from(dir.path(), settings, FakeDriver::in_memory(), images).await;
    let member = Member { cluster, acceptor, node };
    let good = "github:acme/images?rev=1234";
    member.vouch(1, &[image()], &[(good, image())]).await;

    // The image is vouched for; what it would be built from is the thief's.
    member.accept(&of_image(1, "github:thief/flake", [1, 0, 0])).await;
    let settled = |reason: &str| !matches!(reason, "" | "Ready" | "Building");
    let status = member.node.until(|status| settled(reason(status, "ArtifactsReady"))).await;
    assert_eq!(reason(&status, "ArtifactsReady"), "SourceNotVouched");
    let told = status.conditions.iter().find(|c| c.r#type == "ArtifactsReady").unwrap();
    assert!(told.message.contains("no image key vouches for github:thief/flake as its source"), "{told:?}");
    assert!(!calls.exists(), "{}", std::fs::read_to_string(&calls).unwrap());

    member.accept(&of_image(2, good, [1, 0, 0])).await;
    member.node.until(|status| reason(status, "ArtifactsReady") == "BuildFailed").await;
    let called = std::fs::read_to_string(&calls).unwrap();
    assert!(called.contains(good) && !called.contains("thief"), "{called}");
    assert_eq!(member.node.vms().await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_development_cluster_checks_no_image() {
    let dir = tempfile::tempdir().unwrap();
    let acceptor = Cluster::dev().open();
    let settings = NodeSettings { vouched: acceptor.vouched(), ..settings(dir.path()) };
    let node = TestNode::start_with(dir.path(), settings).await;
    node.want(simple(1, 0, 0));
    node.until_counts(1, 0, 0).await;
}
