//! A guest that gives memory back on its way to warm: no longer than it may, not while it has work, and before its session
//! is kept. One that never says what it has to give takes all the time that there is.

use std::path::Path;
use std::time::Duration;

use mvm_agent::instance::record::Record;
use mvm_planner::Action;
use mvm_proto::Phase;
use mvm_proto::guest::Readiness;
use mvm_vmm::fake::Manner;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::node::cluster::at;
use crate::node::documents::{document, parse, pool, tenant};
use crate::node::subject::Subject;

const AT_MOST: Duration = Duration::from_secs(3);

async fn running(dir: &Path) -> Subject {
    let mut workers = pool("workers", 1, 0, 0);
    workers["persist"] = json!({ "path": "/session", "store": "local", "every_seconds": 60 });
    let subject = Subject::new(dir, &parse(&document(&[tenant("acme", 3, &[workers])]))).await;
    subject.take(Action::Create).await.unwrap();
    subject.driver.faults.set_manner(None, Manner::HidesMemory);
    subject
}

/// The newest head of the only session in the folder.
fn head(dir: &Path) -> Option<Value> {
    let (mut folders, mut heads) = (vec![dir.join("sessions")], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                heads.extend(serde_json::from_slice::<Value>(&std::fs::read(path).unwrap()));
            }
        }
    }
    heads.into_iter().max_by_key(|head| head["number"].as_u64())
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_does_not_say_what_it_has_to_give_is_warm_in_time_and_its_session_is_kept_after_that() {
    let dir = tempfile::tempdir().unwrap();
    let subject = running(dir.path()).await;
    let begun = Instant::now();
    assert_eq!(subject.take(Action::Warm).await.unwrap(), Phase::Warm);
    let took = begun.elapsed();
    assert!(AT_MOST <= took && took < AT_MOST + Duration::from_millis(100), "{took:?}");
    assert_eq!(head(dir.path()).unwrap()["taken_at"], json!(at(3)), "it ran until then");
}

#[tokio::test(start_paused = true)]
async fn work_that_comes_while_a_guest_gives_memory_back_calls_off_a_rest_by_policy_and_no_other() {
    for (on_demand, phase) in [(true, Phase::Running), (false, Phase::Warm)] {
        let dir = tempfile::tempdir().unwrap();
        let subject = running(dir.path()).await;
        subject.records().set(Record { on_demand, ..subject.record() });
        let mut events = subject.executor.events.subscribe();
        let work = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            subject.driver.guest_says(&subject.id, Readiness::Busy);
        };
        let (rested, ()) = tokio::join!(subject.take(Action::Warm), work);
        assert_eq!((rested.unwrap(), subject.record().phase), (phase, phase));
        let kinds: Vec<_> = std::iter::from_fn(|| events.try_recv().ok()).map(|event| event.kind).collect();
        assert_eq!(kinds.iter().any(|kind| kind == "InstanceBusy"), on_demand, "{kinds:?}");
        let used = on_demand.then(|| at(1));
        assert_eq!(subject.record().last_used_at, used);
    }
}
