//! kill -9 at any moment loses nothing that was acknowledged and leaves nothing half-applied.
//!
//! The test runs this same binary again as a child that commits and prints what was acknowledged, kills it
//! after a random number of acknowledgements, opens the directory, compares, and goes on in the same directory.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use mvm_store::{Settings, SledStore, Store, Transaction};

const ROUNDS: u64 = 15;
const DIRECTORY: &str = "MVM_TEST_STORE_DIRECTORY";

/// Concurrent committers, so that groups are cut down in the middle.
const WRITERS: u32 = 4;
const SLOTS: u32 = 24;

#[tokio::test]
async fn a_killed_process_loses_nothing_it_acknowledged() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("store");
    let mut random = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos() | 1;
    let mut newest = 0;
    let mut acknowledged = 0;
    for round in 0..ROUNDS {
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        // Every fourth child dies while it opens the directory.
        let lines = if round % 4 == 3 { 1 } else { 2 + random % 150 };
        let (acks, killed_after) = run_and_kill(&directory, lines);
        acknowledged += acks.len();
        let store = SledStore::open(&directory, Settings::default()).await.unwrap();
        newest =
            check(&store, &acks, newest, &format!("round {round}, killed after {killed_after} lines")).await;
        store.close().await;
    }
    assert!(newest > 0);
    println!("{ROUNDS} kills, {acknowledged} acknowledged commits, revision {newest}: nothing lost");
}

/// Slot -> revision of each acknowledged commit, all that reached the pipe before the kill.
fn run_and_kill(directory: &Path, lines: u32) -> (Vec<(String, u64)>, u32) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crash::child_that_commits_until_it_is_killed", "--ignored", "--nocapture"])
        .env(DIRECTORY, directory)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut acks = Vec::new();
    let mut seen = 0;
    for line in BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["ack", slot, revision] => acks.push((slot.to_owned(), revision.parse().unwrap())),
            ["opening"] => {}
            _ => continue,
        }
        seen += 1;
        if seen == lines {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    (acks, seen)
}

async fn check(store: &SledStore, acks: &[(String, u64)], newest: u64, what: &str) -> u64 {
    let all = store.list("").await.unwrap();
    let highest = acks.iter().map(|(_, revision)| *revision).max().unwrap_or(0).max(newest);
    assert!(all.revision >= highest, "{what}: revision {} after {highest}", all.revision);
    let slot = |key: &str| key.split_once('/').map(|(_, slot)| slot.to_owned()).unwrap();
    let side = |prefix: &str| -> BTreeMap<String, (u64, bytes::Bytes)> {
        let of = all.entries.iter().filter(|entry| entry.key.starts_with(prefix));
        of.map(|entry| (slot(&entry.key), (entry.version, entry.value.clone()))).collect()
    };
    let (left, right) = (side("left/"), side("right/"));
    assert!(left == right, "{what}: half a transaction");
    for (slot, revision) in acks {
        let found = left.get(slot).map(|(version, _)| *version);
        assert!(found >= Some(*revision), "{what}: slot {slot} has {found:?}, acknowledged was {revision}");
    }
    all.revision
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the crash test runs it as its child"]
async fn child_that_commits_until_it_is_killed() {
    let directory = std::env::var_os(DIRECTORY).expect("its parent says where");
    // The harness prints the test's name without a line end.
    println!("\nopening");
    let store = SledStore::open(directory, Settings::default()).await.unwrap();
    let writers: Vec<_> =
        (0..WRITERS).map(|writer| tokio::spawn(commit_forever(store.clone(), writer))).collect();
    for writer in writers {
        writer.await.unwrap();
    }
}

async fn commit_forever(store: SledStore, writer: u32) {
    for n in 0_u32.. {
        let slot = format!("{writer}-{}", n % SLOTS);
        // Mostly small, now and then over several pages and segments.
        let size = if n % 29 == 7 { 200_000 } else { 40 + n as usize % 600 };
        let value = [&n.to_be_bytes()[..], &vec![n.to_be_bytes()[3]; size]].concat();
        let pair =
            Transaction::new().put(format!("left/{slot}"), value.clone()).put(format!("right/{slot}"), value);
        let revision = store.commit(pair).await.unwrap().revision;
        println!("ack {slot} {revision}");
    }
}
