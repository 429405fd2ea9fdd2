//! The contract of [`crate::Store`], sentence by sentence, as code that any implementation must pass.
//!
//! Each check gets a fresh, empty store. Leases are waited for on tokio's clock: an embedded store runs the
//! suite on a paused one, a remote store on the real one.

mod leases;
mod transactions;
mod values;
mod watches;

use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

use crate::{Committed, Entry, Event, Store, StoreError, Transaction, Watch};

/// How long any one answer may take before a check gives up.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs every check, each on a fresh empty store from `make`. Panics at the first broken promise.
pub async fn suite<S, F, Fut>(make: F)
where
    S: Store + Clone,
    F: Fn() -> Fut,
    Fut: Future<Output = S>,
{
    transactions::a_fresh_store_is_empty(make().await).await;
    transactions::a_put_is_read_back_with_the_revision_of_its_commit(make().await).await;
    transactions::every_change_raises_the_one_revision_by_one(make().await).await;
    transactions::a_transaction_that_changes_nothing_raises_no_revision(make().await).await;
    transactions::guards_hold_or_the_conflict_names_the_key(make().await).await;
    transactions::a_conflict_writes_nothing_at_all(make().await).await;
    transactions::a_key_deleted_and_made_again_has_a_higher_version(make().await).await;
    transactions::racing_increments_are_all_counted(make().await).await;
    transactions::racing_creators_have_one_winner(make().await).await;
    transactions::readers_never_see_half_a_transaction(make().await).await;
    values::empty_and_large_values_are_kept_exactly(make().await).await;
    values::a_shrinking_value_leaves_nothing_behind(make().await).await;
    values::odd_keys_and_prefixes_are_refused(make().await).await;
    values::transactions_over_the_limits_are_refused_whole(make().await).await;
    values::a_listing_is_sorted_and_ends_where_its_prefix_ends(make().await).await;
    values::clones_are_the_same_store(make().await).await;
    watches::changes_come_in_order_and_without_gaps(make().await).await;
    watches::a_watch_from_the_past_catches_up_and_goes_on(make().await).await;
    watches::a_watch_after_a_listing_misses_and_repeats_nothing(make().await).await;
    watches::a_watch_sees_only_its_prefix(make().await).await;
    watches::a_dropped_wait_loses_no_event(make().await).await;
    watches::all_changes_of_a_transaction_share_its_revision(make().await).await;
    leases::keys_vanish_together_when_their_lease_ends(make().await).await;
    leases::a_lease_kept_alive_does_not_end(make().await).await;
    leases::revoking_deletes_the_keys_at_once(make().await).await;
    leases::an_ended_lease_can_neither_be_used_nor_kept_alive(make().await).await;
    leases::a_key_written_without_the_lease_outlives_it(make().await).await;
    leases::a_key_belongs_to_the_lease_that_wrote_it_last(make().await).await;
    leases::leases_have_names_of_their_own_and_bounded_times(make().await).await;
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: no answer within {PATIENCE:?}"),
    }
}

fn good<T>(what: &str, result: Result<T, StoreError>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{what}: {error}"),
    }
}

fn bad<T: Debug>(what: &str, result: Result<T, StoreError>) -> StoreError {
    match result {
        Ok(value) => panic!("{what}: must be refused, but gave {value:?}"),
        Err(error) => error,
    }
}

async fn commit(store: &impl Store, transaction: Transaction) -> u64 {
    let Committed { revision } = good("commit", within("commit", store.commit(transaction)).await);
    revision
}

async fn put(store: &impl Store, key: &str, value: &str) -> u64 {
    commit(store, Transaction::new().put(key, value.to_owned())).await
}

async fn get(store: &impl Store, key: &str) -> Option<Entry> {
    good("get", within("get", store.get(key)).await)
}

async fn value_of(store: &impl Store, key: &str) -> Option<String> {
    get(store, key).await.map(|entry| String::from_utf8_lossy(&entry.value).into_owned())
}

async fn keys(store: &impl Store, prefix: &str) -> Vec<String> {
    let listing = good("list", within("list", store.list(prefix)).await);
    listing.entries.into_iter().map(|entry| entry.key).collect()
}

async fn next(watch: &mut Watch) -> Event {
    good("watch", within("watch", watch.next()).await)
}

fn entry(key: &str, value: &str, version: u64) -> Entry {
    Entry { key: key.to_owned(), value: value.to_owned().into(), version }
}
