//! A full disk while a document is recorded. Needs root: a tiny file system in a mount namespace of its own.

use std::path::Path;
use std::process::Command;

use mvm_needs::{Need, can_run};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use crate::node::cluster::{Cluster, payload};
use serde_json::json;

/// Set for the copy of this test that runs inside the namespace.
const INSIDE: &str = "MVM_TEST_FULL_DISK_DIR";

#[test]
fn a_full_disk_while_recording_is_said_and_the_last_good_state_kept() {
    if let Some(dir) = std::env::var_os(INSIDE) {
        return on_a_full_disk(Path::new(&dir));
    }
    if !can_run(&[Need::Root, Need::Mounts]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let name = "node::full_disk::a_full_disk_while_recording_is_said_and_the_last_good_state_kept";
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(INSIDE, dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn on_a_full_disk(dir: &Path) {
    // The thread that leaves the namespace does all the work: blocking work would run on another one.
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
    mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::empty(), Some("size=256k")).unwrap();
    // Started after the namespace was left, the runtime's threads are inside it too.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let cluster = Cluster::in_dir(dir, true);
        let acceptor = cluster.open();
        acceptor.accept(&cluster.sign(&payload(1, 1))).await.unwrap();
        let good = std::fs::read(cluster.ledger()).unwrap();

        let filler = dir.join("filler");
        let mut size = 256 * 1024;
        while size > 0 {
            // The last write takes what is left.
            if std::fs::write(&filler, vec![1; size]).is_ok() {
                break;
            }
            size -= 1024;
        }
        let mut large = payload(1, 2);
        large["tenants"][0]["pools"][0]["flake_ref"] = json!(format!("github:org/{}", "x".repeat(400)));
        let problem = acceptor.accept(&cluster.sign(&large)).await.unwrap_err();
        assert_eq!((problem.code.as_str(), problem.status), ("storage_full", 507), "{problem}");
        assert_eq!(acceptor.high_water().unwrap().generation, 1);
        assert_eq!(std::fs::read(cluster.ledger()).unwrap(), good);
        let current_document = acceptor.current_document().borrow().clone().unwrap();
        assert_eq!(current_document.mark.as_ref().unwrap().generation, 1);
        let left: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.len(), 3, "no temporary file is left behind: {left:?}");

        std::fs::remove_file(&filler).unwrap();
        assert!(acceptor.accept(&cluster.sign(&large)).await.unwrap().is_new);
        assert_eq!(cluster.open().high_water().unwrap().generation, 2);
    });
}
