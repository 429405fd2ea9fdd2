//! Leases: keys that exist only as long as their lease is kept alive.

use std::time::Duration;

use super::{bad, commit, good, keys, next, put, value_of, within};
use crate::{Event, LeaseId, Store, StoreError, Transaction};

/// Short, because a remote store runs this suite on the real clock.
const TTL: Duration = Duration::from_secs(2);

async fn grant(store: &impl Store) -> LeaseId {
    good("grant", within("grant", store.grant_lease(TTL)).await)
}

async fn wait_for_delete(store: &impl Store, key: &str, after: u64) -> u64 {
    let mut watch = store.watch(key, after);
    loop {
        if let Event::Delete { version, .. } = next(&mut watch).await {
            return version;
        }
    }
}

pub(super) async fn keys_vanish_together_when_their_lease_ends(store: impl Store) {
    let lease = grant(&store).await;
    let first = commit(&store, Transaction::new().put_leased("l/a", "1", lease).put("l/kept", "1")).await;
    let second = commit(&store, Transaction::new().put_leased("l/b", "1", lease)).await;
    assert_eq!(keys(&store, "l/").await, ["l/a", "l/b", "l/kept"]);
    let gone = wait_for_delete(&store, "l/a", first).await;
    assert_eq!(wait_for_delete(&store, "l/b", second).await, gone);
    assert_eq!(keys(&store, "l/").await, ["l/kept"]);
}

pub(super) async fn a_lease_kept_alive_does_not_end(store: impl Store) {
    let lease = grant(&store).await;
    let version = commit(&store, Transaction::new().put_leased("leader", "me", lease)).await;
    for _ in 0..5 {
        tokio::time::sleep(TTL / 2).await;
        good("keep alive", store.keep_alive(lease).await);
    }
    assert_eq!(value_of(&store, "leader").await.as_deref(), Some("me"));
    wait_for_delete(&store, "leader", version).await;
}

pub(super) async fn revoking_deletes_the_keys_at_once(store: impl Store) {
    let lease = grant(&store).await;
    commit(&store, Transaction::new().put_leased("a", "1", lease).put_leased("b", "1", lease)).await;
    good("revoke", within("revoke", store.revoke(lease)).await);
    assert_eq!(keys(&store, "").await, Vec::<String>::new());
}

pub(super) async fn an_ended_lease_can_neither_be_used_nor_kept_alive(store: impl Store) {
    let lease = grant(&store).await;
    good("revoke", store.revoke(lease).await);
    let ended =
        |error: StoreError| assert!(matches!(error, StoreError::LeaseNotFound { lease: l } if l == lease));
    ended(bad("keep alive", store.keep_alive(lease).await));
    ended(bad("revoke again", store.revoke(lease).await));
    let late = Transaction::new().put("a", "1").put_leased("b", "1", lease);
    ended(bad("put", store.commit(late).await));
    assert_eq!(keys(&store, "").await, Vec::<String>::new());
}

pub(super) async fn a_key_written_without_the_lease_outlives_it(store: impl Store) {
    let lease = grant(&store).await;
    commit(&store, Transaction::new().put_leased("a", "1", lease).put_leased("b", "1", lease)).await;
    put(&store, "a", "2").await;
    good("revoke", store.revoke(lease).await);
    assert_eq!(keys(&store, "").await, ["a"]);
}

pub(super) async fn a_key_belongs_to_the_lease_that_wrote_it_last(store: impl Store) {
    let (old, new) = (grant(&store).await, grant(&store).await);
    commit(&store, Transaction::new().put_leased("a", "1", old)).await;
    commit(&store, Transaction::new().put_leased("a", "2", new)).await;
    good("revoke", store.revoke(old).await);
    assert_eq!(value_of(&store, "a").await.as_deref(), Some("2"));
    good("revoke", store.revoke(new).await);
    assert_eq!(value_of(&store, "a").await, None);
}

pub(super) async fn leases_have_names_of_their_own_and_bounded_times(store: impl Store) {
    assert_ne!(grant(&store).await, grant(&store).await);
    let refused = bad("no time", store.grant_lease(Duration::ZERO).await);
    assert!(matches!(refused, StoreError::InvalidTtl { .. }), "{refused}");
}
