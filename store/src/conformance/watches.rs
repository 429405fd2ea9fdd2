//! Watches: every change once, in order, from any kept revision on.

use std::time::Duration;

use super::{commit, entry, good, next, put};
use crate::{Event, Store, Transaction};

pub(super) async fn changes_come_in_order_and_without_gaps(store: impl Store + Clone) {
    const CHANGES: u64 = 200;
    let start = put(&store, "w/first", "x").await;
    let mut watch = store.watch("w/", start);
    let writer = {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 0..CHANGES {
                put(&store, "w/key", &n.to_string()).await;
            }
        })
    };
    for n in 0..CHANGES {
        assert_eq!(next(&mut watch).await, Event::Put(entry("w/key", &n.to_string(), start + 1 + n)));
    }
    assert!(writer.await.is_ok(), "the writer panicked");
}

pub(super) async fn a_watch_from_the_past_catches_up_and_goes_on(store: impl Store) {
    let first = put(&store, "a", "1").await;
    let second = put(&store, "a", "2").await;
    let third = commit(&store, Transaction::new().delete("a")).await;
    let mut watch = store.watch("", first);
    assert_eq!(next(&mut watch).await, Event::Put(entry("a", "2", second)));
    assert_eq!(next(&mut watch).await, Event::Delete { key: "a".into(), version: third });
    let fourth = put(&store, "a", "4").await;
    assert_eq!(next(&mut watch).await, Event::Put(entry("a", "4", fourth)));
}

pub(super) async fn a_watch_after_a_listing_misses_and_repeats_nothing(store: impl Store + Clone) {
    const CHANGES: u64 = 100;
    let writer = {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 0..CHANGES {
                put(&store, &format!("n/{n:03}"), "x").await;
            }
        })
    };
    let mut seen = 0;
    while seen < CHANGES / 4 {
        seen = good("list", store.list("n/").await).entries.len() as u64;
        tokio::task::yield_now().await;
    }
    let listing = good("list", store.list("n/").await);
    let mut watch = store.watch("n/", listing.revision);
    for n in listing.entries.len() as u64..CHANGES {
        assert_eq!(next(&mut watch).await.key(), format!("n/{n:03}"));
    }
    assert!(writer.await.is_ok(), "the writer panicked");
}

pub(super) async fn a_watch_sees_only_its_prefix(store: impl Store) {
    let start = put(&store, "a/1", "x").await;
    let mut watch = store.watch("b/", start);
    put(&store, "a/2", "x").await;
    put(&store, "b", "x").await;
    let version = commit(&store, Transaction::new().put("a/3", "x").put("b/1", "x")).await;
    assert_eq!(next(&mut watch).await, Event::Put(entry("b/1", "x", version)));
}

pub(super) async fn a_dropped_wait_loses_no_event(store: impl Store) {
    let start = put(&store, "a", "0").await;
    let mut watch = store.watch("", start);
    let waited = tokio::time::timeout(Duration::from_millis(20), watch.next()).await;
    assert!(waited.is_err(), "{waited:?}");
    let version = put(&store, "a", "1").await;
    assert_eq!(next(&mut watch).await, Event::Put(entry("a", "1", version)));
}

pub(super) async fn all_changes_of_a_transaction_share_its_revision(store: impl Store) {
    let start = put(&store, "t/gone", "x").await;
    let mut watch = store.watch("t/", start);
    let version = commit(&store, Transaction::new().put("t/a", "1").delete("t/gone").put("t/b", "2")).await;
    let mut events = [next(&mut watch).await, next(&mut watch).await, next(&mut watch).await];
    events.sort_by(|a, b| a.key().cmp(b.key()));
    let expected = [
        Event::Put(entry("t/a", "1", version)),
        Event::Put(entry("t/b", "2", version)),
        Event::Delete { key: "t/gone".into(), version },
    ];
    assert_eq!(events, expected);
}
