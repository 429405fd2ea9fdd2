//! The embedded store keeps every promise of the trait.

use mvm_store::{Settings, SledStore, conformance};

#[tokio::test(start_paused = true)]
async fn sled_keeps_the_contract_of_a_store() {
    let root = tempfile::tempdir().unwrap();
    let next = std::cell::Cell::new(0);
    conformance::suite(|| {
        next.set(next.get() + 1);
        let path = root.path().join(next.get().to_string());
        async move { SledStore::open(path, Settings::default()).await.unwrap() }
    })
    .await;
}
