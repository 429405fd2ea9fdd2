//! Values, keys, listings and their limits.

use bytes::Bytes;

use super::{bad, commit, get, good, keys, put, value_of};
use crate::{MAX_CHANGES, MAX_KEY_BYTES, MAX_VALUE_BYTES, Store, StoreError, Transaction};

pub(super) async fn empty_and_large_values_are_kept_exactly(store: impl Store) {
    for size in [0, 1, 4087, 4088, 4089, 65_536, 1_500_000] {
        let value: Bytes = (0..size).map(|at| u8::try_from(at % 251).unwrap_or(0)).collect();
        commit(&store, Transaction::new().put("value", value.clone())).await;
        let found = get(&store, "value").await.expect("the value was put");
        assert!(found.value == value, "{size} bytes differ");
    }
}

pub(super) async fn a_shrinking_value_leaves_nothing_behind(store: impl Store) {
    for size in [500_000, 100, 20_000, 0] {
        commit(&store, Transaction::new().put("value", vec![1; size])).await;
        assert_eq!(get(&store, "value").await.map(|entry| entry.value.len()), Some(size));
    }
    commit(&store, Transaction::new().delete("value")).await;
    assert_eq!(keys(&store, "").await, Vec::<String>::new());
}

pub(super) async fn odd_keys_and_prefixes_are_refused(store: impl Store) {
    let long = "k".repeat(MAX_KEY_BYTES + 1);
    for key in ["", "/", "/a", "a/", "a//b", "a b", "a\n", "a\0b", "\u{e9}", "a/../b", &long] {
        let invalid =
            |error: StoreError| assert!(matches!(error, StoreError::InvalidKey { .. }), "{key:?}: {error}");
        invalid(bad("get", store.get(key).await));
        invalid(bad("put", store.commit(Transaction::new().put(key, "x")).await));
        invalid(bad("delete", store.commit(Transaction::new().delete(key)).await));
        invalid(bad("guard", store.commit(Transaction::new().guard(key, crate::Guard::Absent)).await));
    }
    for prefix in ["/", "a//", "a b", "\0", &long] {
        assert!(matches!(bad("list", store.list(prefix).await), StoreError::InvalidKey { .. }), "{prefix:?}");
        let watched = store.watch(prefix, 0).next().await;
        assert!(matches!(bad("watch", watched), StoreError::InvalidKey { .. }), "{prefix:?}");
    }
    let longest = "k".repeat(MAX_KEY_BYTES);
    put(&store, &longest, "kept").await;
    assert_eq!(value_of(&store, &longest).await.as_deref(), Some("kept"));
}

pub(super) async fn transactions_over_the_limits_are_refused_whole(store: impl Store) {
    let many = |count| (0..count).fold(Transaction::new(), |all, n| all.put(format!("many/{n:04}"), "x"));
    let too_many = bad("too many", store.commit(many(MAX_CHANGES + 1)).await);
    assert!(matches!(too_many, StoreError::InvalidTransaction { .. }), "{too_many}");
    let twice = bad("twice", store.commit(Transaction::new().put("a", "1").put("a", "2")).await);
    assert!(matches!(twice, StoreError::InvalidTransaction { .. }), "{twice}");
    let huge = Transaction::new().put("a", "1").put("b", vec![0; MAX_VALUE_BYTES + 1]);
    assert!(
        matches!(bad("huge", store.commit(huge).await), StoreError::ValueTooLarge { key, .. } if key == "b")
    );
    assert_eq!(keys(&store, "").await, Vec::<String>::new());
    commit(&store, many(MAX_CHANGES)).await;
    assert_eq!(keys(&store, "many/").await.len(), MAX_CHANGES);
}

pub(super) async fn a_listing_is_sorted_and_ends_where_its_prefix_ends(store: impl Store) {
    for key in ["b/2", "a", "b/10", "b", "b0", "c", "b/1/x", "b/~"] {
        put(&store, key, "x").await;
    }
    assert_eq!(keys(&store, "b/").await, ["b/1/x", "b/10", "b/2", "b/~"]);
    assert_eq!(keys(&store, "b/1").await, ["b/1/x", "b/10"]);
    assert_eq!(keys(&store, "").await, ["a", "b", "b/1/x", "b/10", "b/2", "b/~", "b0", "c"]);
    assert_eq!(keys(&store, "z").await, Vec::<String>::new());
}

pub(super) async fn clones_are_the_same_store(store: impl Store + Clone) {
    let other = store.clone();
    let revision = put(&store, "a", "1").await;
    assert_eq!(good("list", other.list("").await).revision, revision);
    assert_eq!(value_of(&other, "a").await.as_deref(), Some("1"));
}
