//! Jails on a directory of the test's own.

use super::*;

fn jail(base: &Path) -> Jail {
    let instance = InstanceId::from_bits(7);
    let root = base.join("firecracker").join(instance.as_str()).join("root");
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    Jail { instance, root, uid, gid }
}

#[test]
fn a_jail_shares_what_is_written_and_is_removed_without_loss() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("vms").join("i-00000007");
    fs::create_dir_all(&run_dir).unwrap();
    fs::write(dir.path().join("kernel"), b"kernel").unwrap();
    let jail = jail(&run_dir);
    let list = [
        JailFile { source: dir.path().join("kernel"), name: "kernel".into(), writable: false },
        JailFile { source: run_dir.join("data.img"), name: "data.img".into(), writable: true },
    ];
    for _ in 0..2 {
        make(&jail, &run_dir, &list).unwrap();
    }
    assert_eq!(fs::read(jail.root.join("kernel")).unwrap(), b"kernel");
    fs::write(jail.root.join("data.img"), b"written in the jail").unwrap();
    fs::create_dir(run_dir.join("snapshot.new")).unwrap();
    let memory = JailFile {
        source: run_dir.join("snapshot.new/mem"),
        name: "snapshot.new.mem".into(),
        writable: true,
    };
    share(&jail, std::slice::from_ref(&memory)).unwrap();
    fs::write(jail.root.join(&memory.name), b"memory").unwrap();
    for _ in 0..2 {
        unshare(&jail, std::slice::from_ref(&memory.name)).unwrap();
    }
    assert!(!jail.root.join(&memory.name).exists());
    assert_eq!(fs::read(&memory.source).unwrap(), b"memory");
    let known = roots(&dir.path().join("vms")).unwrap();
    let meta = fs::metadata(&jail.root).unwrap();
    assert_eq!(known, [((meta.dev(), meta.ino()), jail.instance.clone())]);
    for _ in 0..2 {
        remove(&jail, &run_dir).unwrap();
    }
    assert!(!jail.root.exists() && !run_dir.join(JAIL).exists());
    assert_eq!(fs::read(run_dir.join("data.img")).unwrap(), b"written in the jail");
}

#[test]
fn a_file_that_not_everyone_may_read_is_copied_and_its_owner_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let secret = dir.path().join("kernel");
    fs::write(&secret, b"kernel").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let jail = Jail { uid: u32::MAX - 1, ..jail(dir.path()) };
    fs::create_dir_all(&jail.root).unwrap();
    if rustix::process::geteuid().is_root() {
        lend(&jail, &secret, &jail.root.join("kernel")).unwrap();
        let (kept, lent) = (fs::metadata(&secret).unwrap(), fs::metadata(jail.root.join("kernel")).unwrap());
        assert_ne!(kept.ino(), lent.ino());
        assert_eq!((kept.uid(), lent.uid()), (0, jail.uid));
    }
}

#[test]
fn what_is_not_a_jail_of_the_instance_is_never_removed() {
    let dir = tempfile::tempdir().unwrap();
    for root in [dir.path().to_owned(), dir.path().join("root"), dir.path().join("i-00000008/root")] {
        let wrong = Jail { root, ..jail(dir.path()) };
        assert!(matches!(remove(&wrong, dir.path()), Err(HostError::Refused(_))));
        assert!(matches!(unshare(&wrong, &["kernel".to_owned()]), Err(HostError::Refused(_))));
    }
    for name in ["", "..", "../kernel", "/etc/passwd", "link/passwd"] {
        let refused = unshare(&jail(dir.path()), &[name.to_owned()]);
        assert!(matches!(refused, Err(HostError::Refused(_))), "{name}");
    }
    assert!(dir.path().exists());
}
