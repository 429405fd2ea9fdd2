//! A disk that fills up: a clear error, the last good state kept, and work goes on once there is space.
//!
//! Needs root, for a file system of 4 MiB in a mount namespace of its own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use mvm_needs::{Need, can_run};
use mvm_store::{Settings, SledStore, Store, StoreError, Transaction};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

const DIRECTORY: &str = "MVM_TEST_STORE_DIRECTORY";

fn run_in_child(test: &str) {
    if !can_run(&[Need::Root, Need::Mounts]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(DIRECTORY, directory.path())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    println!("{}", text(&output.stdout));
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    assert!(text(&output.stdout).contains("1 passed"), "no test is named {test}");
}

/// The small file system, with 1 MiB of ballast that can be thrown out.
fn small_disk() -> (PathBuf, PathBuf) {
    let directory = PathBuf::from(std::env::var_os(DIRECTORY).expect("its parent says where"));
    unshare(CloneFlags::CLONE_NEWNS)
        .and_then(|()| {
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        })
        .and_then(|()| mount(Some("tmpfs"), &directory, Some("tmpfs"), MsFlags::empty(), Some("size=4m")))
        .unwrap();
    let ballast = directory.join("ballast");
    std::fs::write(&ballast, vec![1; 1 << 20]).unwrap();
    (directory.join("store"), ballast)
}

fn in_runtime<F: Future>(future: F) -> F::Output {
    // Made after the mount, so that its threads are in the same namespace.
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Commits pairs until refused. What was acknowledged, and the refusal.
async fn fill(store: &SledStore) -> (BTreeMap<String, u64>, StoreError) {
    let mut acknowledged = BTreeMap::new();
    for n in 0..100_000_u32 {
        let value = vec![n.to_be_bytes()[3]; 20_000];
        let (left, right) = (format!("left/{}", n % 30), format!("right/{}", n % 30));
        match store.commit(Transaction::new().put(&left, value.clone()).put(&right, value)).await {
            Ok(committed) => {
                acknowledged.insert(left, committed.revision);
                acknowledged.insert(right, committed.revision);
            }
            Err(error) => return (acknowledged, error),
        }
    }
    panic!("the disk never filled up");
}

async fn versions(store: &SledStore) -> BTreeMap<String, u64> {
    store.list("").await.unwrap().entries.into_iter().map(|entry| (entry.key, entry.version)).collect()
}

async fn open(path: &Path, reserve_bytes: u64) -> SledStore {
    SledStore::open(path, Settings { reserve_bytes, ..Settings::default() }).await.unwrap()
}

#[test]
fn with_a_reserve_commits_are_refused_in_time_and_work_again_with_space() {
    run_in_child("full_disk::child_with_a_reserve");
}

#[test]
#[ignore = "run by the test above, as its child"]
fn child_with_a_reserve() {
    let (path, ballast) = small_disk();
    in_runtime(async {
        let store = open(&path, 512 * 1024).await;
        let (acknowledged, error) = fill(&store).await;
        println!("{} keys, then: {error}", acknowledged.len());
        assert!(matches!(error, StoreError::NoSpace { .. }), "{error:?}");
        assert_eq!(versions(&store).await, acknowledged);
        std::fs::remove_file(ballast).unwrap();
        store.commit(Transaction::new().put("after", "x")).await.unwrap();
        store.close().await;
        assert_eq!(versions(&open(&path, 0).await).await.len(), acknowledged.len() + 1);
    });
}

#[test]
fn without_a_reserve_the_store_fails_and_its_last_good_state_stays() {
    run_in_child("full_disk::child_without_a_reserve");
}

#[test]
#[ignore = "run by the test above, as its child"]
fn child_without_a_reserve() {
    let (path, ballast) = small_disk();
    in_runtime(async {
        let store = open(&path, 0).await;
        let (acknowledged, error) = fill(&store).await;
        println!("{} keys, then: {error}", acknowledged.len());
        assert!(matches!(error, StoreError::Failed { .. }), "{error:?}");
        assert_eq!(versions(&store).await, acknowledged, "reads show what is durable, and only that");
        let again = store.commit(Transaction::new().put("b", "x")).await.unwrap_err();
        assert!(matches!(again, StoreError::Failed { .. }), "{again:?}");
        store.close().await;
        std::fs::remove_file(ballast).unwrap();
        let store = open(&path, 0).await;
        let found = versions(&store).await;
        for (key, version) in &acknowledged {
            assert!(found.get(key) >= Some(version), "{key}: {:?} after {version}", found.get(key));
        }
        for (key, version) in &found {
            assert_eq!(found.get(&key.replace("left/", "right/")), Some(version), "half a transaction");
        }
        store.commit(Transaction::new().put("after", "x")).await.unwrap();
        store.close().await;
    });
}
