//! Once an agent waits for the last step to end, nothing new begins on its node.

use mvm_agent::instance::records::StateError;

use crate::node::subject::Subject;

#[tokio::test(start_paused = true)]
async fn an_agent_that_shuts_down_has_no_place_for_new_instances() {
    let dir = tempfile::tempdir().unwrap();
    let subject = Subject::sleeping(dir.path()).await;
    let (records, record) = (subject.records(), subject.record());
    records.wait_idle().await;
    let now = subject.executor.clock.now();
    let reserved = records.reserve(&record.tenant, &record.pool, &subject.spec, None, now);
    assert!(matches!(reserved, Err(StateError::Closing)), "{reserved:?}");
    // Not that it is there already, which is true as well and no reason to look for it.
    let admitted = records.admit(record);
    assert!(matches!(admitted, Err(StateError::Closing)), "{admitted:?}");
}
