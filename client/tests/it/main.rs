//! The client against a server that keeps objects in memory, over TCP.

#![allow(clippy::unwrap_used)] // A test may end at the first surprise.

mod memory;

use std::time::Duration;

use futures::StreamExt as _;
use memory::Server;
use mvm_client::{ApplyOptions, Change, DeleteOptions, Name, Objects, Query, Watch, files};
use mvm_proto::object::{Kind, Object, Outcome, kind_named, read};
use serde_json::{Value, json};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(30);

fn pools() -> &'static Kind {
    kind_named("pools").unwrap()
}

fn name(name: &str) -> Name {
    Name::of(pools(), Some("acme"), name)
}

fn pool(name: &str, running: u32) -> Value {
    json!({
        "api_version": "mvm/v1", "kind": "Pool", "metadata": { "tenant": "acme", "name": name },
        "spec": {
            "image": { "ref": "builtin:busybox" }, "resources": { "vcpus": 1, "mem_mib": 64 },
            "counts": { "running": running },
        },
    })
}

async fn put(objects: &mut Objects, name: &str, running: u32) -> Object {
    objects.apply(&pool(name, running), ApplyOptions::default()).await.unwrap().object
}

async fn next(watch: &mut Watch) -> Change {
    timeout(PATIENCE, watch.next()).await.unwrap().unwrap()
}

fn names(objects: &[Object]) -> Vec<&str> {
    objects.iter().map(|object| object.metadata.name.as_str()).collect()
}

#[test]
fn every_example_is_what_the_server_takes() {
    let folder = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples"));
    let names = |file: &str| {
        let entries = files::read(&[folder.join(file)], files::Tenant::default()).unwrap();
        let declared = entries.iter().map(|entry| read(entry.json.to_string().as_bytes()).unwrap());
        declared.map(|it| format!("{} {}", it.kind.name, it.metadata.name)).collect::<Vec<_>>()
    };
    let objects = ["Tenant acme", "Tenant globex", "Pool workers", "Pool gateway", "Pool web"];
    assert_eq!(names("objects.yaml"), objects);
    let demo = ["Tenant acme", "Tenant globex", "Pool web", "Pool workers", "Pool api"];
    assert_eq!(names("demo.yaml"), demo);
    assert_eq!(names("placement.yaml"), ["Tenant acme", "Node node-a", "Pool trainers"]);
}

#[tokio::test]
async fn what_is_applied_is_there_and_told_by_its_outcome() {
    let server = Server::start();
    let mut objects = server.objects();
    let mut outcome =
        async |running, options| objects.apply(&pool("workers", running), options).await.unwrap().outcome;
    let dry = ApplyOptions { dry_run: true, ..ApplyOptions::default() };
    assert_eq!(outcome(1, dry).await, Outcome::Created);
    assert_eq!(outcome(1, ApplyOptions::default()).await, Outcome::Created);
    assert_eq!(outcome(1, ApplyOptions::default()).await, Outcome::Unchanged);
    assert_eq!(outcome(2, ApplyOptions::default()).await, Outcome::Configured);
    let found = objects.get(&name("workers")).await.unwrap();
    assert_eq!(found.spec["counts"]["running"], 2);
    assert_eq!(found.metadata.resource_version, "2");
    assert!(objects.find(&name("others")).await.unwrap().is_none());
    let refused = objects.get(&name("others")).await.unwrap_err();
    assert!(refused.is_not_found() && refused.problem().unwrap().code == "not_found", "{refused}");
    assert!(refused.to_string().contains("pools/acme/others"), "{refused}");
}

#[tokio::test]
async fn every_page_of_a_list_is_read_and_a_watch_goes_on_from_its_first() {
    let server = Server::start();
    let mut objects = server.objects();
    for n in 0..7 {
        put(&mut objects, &format!("p{n}"), 1).await;
    }
    let listing = objects.list(&Query::all(pools())).await.unwrap();
    assert_eq!(names(&listing.objects), ["p0", "p1", "p2", "p3", "p4", "p5", "p6"]);
    assert_eq!((listing.resource_version.as_str(), server.pages()), ("7", 3));
}

#[tokio::test]
async fn a_watch_tells_the_list_then_every_change_in_order() {
    let server = Server::start();
    let mut objects = server.objects();
    put(&mut objects, "a", 1).await;
    let mut watch = objects.watch(Query::all(pools()));
    let Change::Listed(listed) = next(&mut watch).await else { panic!("no list") };
    assert_eq!(names(&listed), ["a"]);
    put(&mut objects, "b", 1).await;
    put(&mut objects, "a", 2).await;
    let deleted = objects.delete(&name("b"), &DeleteOptions::default()).await.unwrap();
    assert!(deleted.gone);
    let told: Vec<_> = watch.into_stream().take(3).map(Result::unwrap).collect().await;
    let told: Vec<_> = told
        .iter()
        .map(|change| match change {
            Change::Listed(_) => panic!("it listed again"),
            Change::Added(object) => format!("added {}", object.metadata.name),
            Change::Modified(object) => format!("modified {}", object.metadata.name),
            Change::Deleted(object) => format!("deleted {}", object.metadata.name),
        })
        .collect();
    assert_eq!(told, ["added b", "modified a", "deleted b"]);
}

#[tokio::test]
async fn a_watch_goes_on_after_a_lost_connection_without_a_gap_and_without_a_list() {
    let mut server = Server::start();
    let mut objects = server.objects();
    put(&mut objects, "a", 1).await;
    let mut watch = objects.watch(Query::all(pools()));
    assert!(matches!(next(&mut watch).await, Change::Listed(_)));
    put(&mut objects, "b", 1).await;
    assert!(matches!(next(&mut watch).await, Change::Added(_)));
    let pages = server.pages();
    server.stop();
    server.change("c");
    server.go_on();
    let Change::Added(object) = next(&mut watch).await else { panic!("not the change in between") };
    assert_eq!((object.metadata.name.as_str(), server.pages()), ("c", pages));
}

#[tokio::test]
async fn a_watch_whose_changes_are_no_longer_kept_lists_again() {
    let mut server = Server::start();
    let mut objects = server.objects();
    put(&mut objects, "a", 1).await;
    let mut watch = objects.watch(Query::all(pools()));
    assert!(matches!(next(&mut watch).await, Change::Listed(_)));
    server.stop();
    server.change("b");
    server.forget_changes();
    server.go_on();
    let Change::Listed(listed) = next(&mut watch).await else { panic!("not a list") };
    assert_eq!(names(&listed), ["a", "b"]);
    put(&mut objects, "c", 1).await;
    assert!(matches!(next(&mut watch).await, Change::Added(object) if object.metadata.name == "c"));
}

#[tokio::test]
async fn a_server_that_is_not_there_at_first_is_an_error_and_no_endless_wait() {
    let told = timeout(PATIENCE, memory::of_no_server().watch(Query::all(pools())).next()).await;
    let Err(error) = told.unwrap() else { panic!("nothing answers there") };
    assert!(error.is_lost());
}

#[tokio::test]
async fn waiting_ends_when_the_condition_holds_or_the_object_is_gone() {
    let server = Server::start();
    let mut objects = server.objects();
    put(&mut objects, "workers", 0).await;
    let (saw, sees) = tokio::sync::oneshot::channel();
    let waiting = tokio::spawn({
        let (objects, mut saw) = (objects.clone(), Some(saw));
        async move {
            let running = |object: Option<&Object>| {
                saw.take().map(|saw| saw.send(()));
                let object = object.expect("it is there, whatever becomes of others");
                object.spec["counts"]["running"] == 3
            };
            objects.wait_for(&name("workers"), running).await
        }
    });
    sees.await.unwrap();
    for running in 1..4 {
        put(&mut objects, "others", 3).await;
        put(&mut objects, "workers", running).await;
    }
    let found = timeout(PATIENCE, waiting).await.unwrap().unwrap().unwrap().unwrap();
    assert_eq!(found.metadata.name, "workers");

    let gone = tokio::spawn({
        let objects = objects.clone();
        async move { objects.wait_for(&name("workers"), |object| object.is_none()).await }
    });
    objects.delete(&name("workers"), &DeleteOptions::default()).await.unwrap();
    assert!(timeout(PATIENCE, gone).await.unwrap().unwrap().unwrap().is_none());
}
