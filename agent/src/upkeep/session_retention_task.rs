//! Deletes guest sessions that were not used for as long as the agent's settings say.
//!
//! One task, woken by time alone. Sessions that instances hold are renewed all the time, so they are never old.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::node::handle::NodeHandle;
use crate::persist::WhichSessions;

/// Sessions grow old over days.
const EVERY: Duration = Duration::from_secs(3600);
/// Who decided, in the audit logs.
const BY: &str = "retention";

/// Runs until `stop`.
pub(crate) async fn session_retention_task(
    node: NodeHandle,
    retention: Option<Duration>,
    stop: CancellationToken,
) {
    let Some(unused_for) = retention else { return stop.cancelled().await };
    let which = WhichSessions { unused_for, ..WhichSessions::default() };
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(EVERY.min(unused_for)) => {}
        }
        let deleted = tokio::select! {
            () = stop.cancelled() => return,
            deleted = node.delete_guest_sessions(&which, BY) => deleted,
        };
        for store in deleted.unreadable {
            tracing::warn!(store, "could not look for sessions that were not used for long");
        }
        for (session, reason) in deleted.kept {
            tracing::info!(session = %session.session, reason, "an old session is kept");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::SystemTime;

    use mvm_image::Vouched;
    use mvm_proto::status::Capacity;
    use mvm_proto::{Digest, Timestamp};
    use mvm_vmm::{DriverKind, VmmSettings};
    use serde_json::json;

    use super::*;
    use crate::clock::Clock;
    use crate::isolation::IsolationSettings;
    use crate::node::assemble::{Node, NodeSettings};
    use crate::persist::SessionLimits;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    async fn node(dir: &Path) -> (Node, NodeHandle) {
        let settings = NodeSettings {
            node_id: "node-a".parse().unwrap(),
            data_dir: dir.to_owned(),
            host: None,
            driver: DriverKind::Fake,
            vmm: VmmSettings::default(),
            images_dir: dir.join("images"),
            vouched: Vouched::unchecked(),
            secrets_dir: dir.join("secrets"),
            sessions_dir: dir.join("sessions"),
            session_limits: SessionLimits::default(),
            sweep_after: Duration::from_secs(60),
            boot_deadline: Duration::from_secs(90),
            capacity: Capacity { vcpus: 8, mem_mib: 8192, disk_mib: 8192, max_instances: 8 },
            isolation: IsolationSettings::NONE,
            interval: Duration::from_secs(30),
            parallel_steps: 4,
            tracer: mvm_telemetry::Tracer::default(),
            clock: Clock::starting_at(Timestamp::from_unix_ms(0)),
        };
        Node::open(settings).await.unwrap()
    }

    /// A session that was last used so long ago.
    fn put_session(store: &Path, slot: u32, age: Duration) {
        let heads = store.join(format!("acme/workers/heads/{slot}"));
        std::fs::create_dir_all(&heads).unwrap();
        let path = heads.join(format!("{:020}", 1));
        let head = json!({
            "version": 1, "number": 1, "holder": null, "index": Digest::of(b"index"), "taken_at": null,
            "every_seconds": 60,
        });
        std::fs::write(&path, head.to_string()).unwrap();
        std::fs::File::open(&path).unwrap().set_modified(SystemTime::now() - age).unwrap();
    }

    async fn left(node: &NodeHandle) -> Vec<String> {
        let found = node.guest_sessions(&WhichSessions::default()).await;
        found.sessions.into_iter().map(|session| session.session).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn sessions_that_were_not_used_for_long_are_deleted_and_none_without_the_setting() {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("sessions");
        for (slot, age) in [(0, 31), (1, 29), (2, 400)] {
            put_session(&store, slot, DAY * age);
        }
        let (_node, handle) = node(dir.path()).await;
        let stop = CancellationToken::new();
        let off = tokio::spawn(session_retention_task(handle.clone(), None, stop.clone()));
        tokio::time::sleep(DAY).await;
        assert_eq!(left(&handle).await.len(), 3);
        let on = tokio::spawn(session_retention_task(handle.clone(), Some(DAY * 30), stop.clone()));
        let gone = async {
            while left(&handle).await.len() > 1 {
                tokio::time::sleep(EVERY).await;
            }
        };
        tokio::time::timeout(DAY, gone).await.unwrap();
        assert_eq!(left(&handle).await, ["acme/workers/1"]);
        stop.cancel();
        off.await.unwrap();
        on.await.unwrap();
    }
}
