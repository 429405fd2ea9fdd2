//! Transactions: all or nothing, guarded, counted.

use super::{bad, commit, entry, get, good, put, value_of, within};
use crate::{Guard, Store, StoreError, Transaction};

pub(super) async fn a_fresh_store_is_empty(store: impl Store) {
    assert_eq!(get(&store, "a").await, None);
    let listing = good("list", store.list("").await);
    assert!(listing.entries.is_empty());
}

pub(super) async fn a_put_is_read_back_with_the_revision_of_its_commit(store: impl Store) {
    let revision = put(&store, "nodes/n-1", "up").await;
    assert_eq!(get(&store, "nodes/n-1").await, Some(entry("nodes/n-1", "up", revision)));
    let listing = good("list", store.list("nodes/").await);
    assert_eq!(listing.entries, [entry("nodes/n-1", "up", revision)]);
    assert_eq!(listing.revision, revision);
}

pub(super) async fn every_change_raises_the_one_revision_by_one(store: impl Store) {
    let first = put(&store, "a", "1").await;
    let second = put(&store, "b", "1").await;
    let third = commit(&store, Transaction::new().put("a", "2").delete("b").put("c", "1")).await;
    let fourth = put(&store, "a", "2").await;
    assert_eq!([second, third, fourth], [first + 1, first + 2, first + 3]);
    assert_eq!(get(&store, "c").await.map(|entry| entry.version), Some(third));
    assert_eq!(get(&store, "a").await.map(|entry| entry.version), Some(fourth));
}

pub(super) async fn a_transaction_that_changes_nothing_raises_no_revision(store: impl Store) {
    let revision = put(&store, "a", "1").await;
    assert_eq!(commit(&store, Transaction::new()).await, revision);
    assert_eq!(commit(&store, Transaction::new().guard("a", Guard::Exists)).await, revision);
    assert_eq!(commit(&store, Transaction::new().delete("absent")).await, revision);
    assert_eq!(put(&store, "b", "1").await, revision + 1);
}

pub(super) async fn guards_hold_or_the_conflict_names_the_key(store: impl Store) {
    let version = put(&store, "a", "1").await;
    let cases = [
        ("a", Guard::Absent, false),
        ("a", Guard::Exists, true),
        ("a", Guard::Version(version), true),
        ("a", Guard::Version(version + 1), false),
        ("a", Guard::Version(0), false),
        ("none", Guard::Absent, true),
        ("none", Guard::Exists, false),
        ("none", Guard::Version(version), false),
    ];
    for (key, guard, holds) in cases {
        // A guard that holds comes first, so that the conflict must be about the second.
        let transaction = Transaction::new().guard("other", Guard::Absent).guard(key, guard);
        match within("commit", store.commit(transaction)).await {
            Ok(_) => assert!(holds, "{guard:?} of {key} held"),
            Err(StoreError::Conflict { key: named }) => {
                assert!(!holds, "{guard:?} of {key} did not hold");
                assert_eq!(named, key);
            }
            Err(error) => panic!("{guard:?} of {key}: {error}"),
        }
    }
}

pub(super) async fn a_conflict_writes_nothing_at_all(store: impl Store) {
    let revision = put(&store, "a", "1").await;
    let refused = Transaction::new()
        .guard("a", Guard::Version(revision))
        .guard("b", Guard::Exists)
        .put("a", "2")
        .put("c", "1");
    assert!(matches!(bad("commit", store.commit(refused).await), StoreError::Conflict { key } if key == "b"));
    let listing = good("list", store.list("").await);
    assert_eq!(listing.entries, [entry("a", "1", revision)]);
    assert_eq!(listing.revision, revision);
}

pub(super) async fn a_key_deleted_and_made_again_has_a_higher_version(store: impl Store) {
    let first = put(&store, "a", "1").await;
    let deleted = commit(&store, Transaction::new().delete("a")).await;
    assert_eq!(get(&store, "a").await, None);
    let again = commit(&store, Transaction::new().guard("a", Guard::Absent).put("a", "1")).await;
    assert!(first < deleted && deleted < again);
    let stale = Transaction::new().guard("a", Guard::Version(first)).put("a", "2");
    assert!(matches!(bad("commit", store.commit(stale).await), StoreError::Conflict { .. }));
}

pub(super) async fn racing_increments_are_all_counted(store: impl Store + Clone) {
    const TASKS: u64 = 16;
    const INCREMENTS: u64 = 100;
    put(&store, "count", "0").await;
    let tasks: Vec<_> = (0..TASKS).map(|_| tokio::spawn(increment(store.clone(), INCREMENTS))).collect();
    for task in tasks {
        assert!(task.await.is_ok(), "an incrementing task panicked");
    }
    assert_eq!(value_of(&store, "count").await, Some((TASKS * INCREMENTS).to_string()));
}

async fn increment(store: impl Store, times: u64) {
    let mut done = 0;
    while done < times {
        let found = get(&store, "count").await.expect("the counter exists");
        let count: u64 = String::from_utf8_lossy(&found.value).parse().expect("the counter is a number");
        let next = Transaction::new()
            .guard("count", Guard::Version(found.version))
            .put("count", (count + 1).to_string());
        match store.commit(next).await {
            Ok(_) => done += 1,
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => panic!("increment: {error}"),
        }
    }
}

pub(super) async fn racing_creators_have_one_winner(store: impl Store + Clone) {
    let create = |name: usize| {
        let store = store.clone();
        let transaction = Transaction::new().guard("leader", Guard::Absent).put("leader", name.to_string());
        tokio::spawn(async move { (name, store.commit(transaction).await) })
    };
    let mut winners = Vec::new();
    for task in (0..32).map(create).collect::<Vec<_>>() {
        let (name, result) = task.await.expect("a creating task panicked");
        match result {
            Ok(_) => winners.push(name.to_string()),
            Err(error) => assert!(matches!(error, StoreError::Conflict { .. }), "{error}"),
        }
    }
    assert_eq!(winners.len(), 1, "{winners:?}");
    assert_eq!(value_of(&store, "leader").await, winners.pop());
}

pub(super) async fn readers_never_see_half_a_transaction(store: impl Store + Clone) {
    const ROUNDS: u64 = 50;
    let writer = {
        let store = store.clone();
        tokio::spawn(async move {
            for round in 1..=ROUNDS {
                let all = ["p/a", "p/b", "p/c"]
                    .into_iter()
                    .fold(Transaction::new(), |all, key| all.put(key, round.to_string()));
                commit(&store, all).await;
            }
        })
    };
    while !writer.is_finished() {
        let listing = good("list", store.list("p/").await);
        let versions: Vec<_> = listing.entries.iter().map(|entry| entry.version).collect();
        assert!(versions.is_empty() || versions.len() == 3, "{versions:?}");
        assert!(versions.windows(2).all(|pair| pair[0] == pair[1]), "{versions:?}");
        assert!(versions.iter().all(|version| *version <= listing.revision));
        tokio::task::yield_now().await;
    }
    assert!(writer.await.is_ok(), "the writer panicked");
}
