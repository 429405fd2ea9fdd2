//! A disk that fills up: said with its name and by how much, and nothing is left of what was begun. Needs root, for a
//! small file system in a mount namespace of its own.

use std::path::Path;
use std::process::Command;

use mvm_host::{Dir, HostError, free_space};
use mvm_needs::{Need, can_run};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

/// Set for the copy of this test that runs inside the namespace.
const INSIDE: &str = "MVM_TEST_FILES_FULL_DIR";

#[test]
fn a_full_disk_is_named_and_nothing_half_written_stays() {
    if let Some(dir) = std::env::var_os(INSIDE) {
        return on_a_full_disk(Path::new(&dir));
    }
    if !can_run(&[Need::Root, Need::Mounts]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "files::full::a_full_disk_is_named_and_nothing_half_written_stays", "--nocapture"])
        .env(INSIDE, dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn on_a_full_disk(path: &Path) {
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
    mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some("size=1m,mode=700")).unwrap();
    let dir = Dir::open_root(path).unwrap();
    dir.replace("kept", &[1; 600 << 10], 0o600).unwrap();
    let (listed, free) = (dir.list().unwrap(), free_space(&dir).unwrap());
    let full = |what: &str, error: HostError| {
        let text = error.to_string();
        assert!(text.contains(&format!("the disk of {} is full", path.display())), "{what}: {text}");
        assert!(text.contains("are missing"), "{what}: {text}");
        let cause = std::io::Error::from(error);
        assert_eq!(cause.kind(), std::io::ErrorKind::StorageFull, "{what}");
        assert_eq!(dir.list().unwrap(), listed, "{what}");
        assert_eq!(free_space(&dir).unwrap(), free, "{what}");
    };
    let large = vec![1; 800 << 10];
    full("replace", dir.replace("kept", &large, 0o600).unwrap_err());
    full("write", dir.write_atomic("new", &large, 0o600).unwrap_err());
    full("disk", dir.make_disk("data.img", 4096).unwrap_err());
    // Names need no space there; what fits still goes through.
    dir.replace("small", b"small", 0o600).unwrap();
}
