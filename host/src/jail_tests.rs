//! Jails on a directory of the test's own.

use std::os::unix::fs::{PermissionsExt as _, symlink};

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
    let (jail, data) = (jail(&run_dir), DataDir::named(dir.path()));
    let list = [
        JailFile { source: dir.path().join("kernel"), name: "kernel".into(), writable: false },
        JailFile { source: run_dir.join("data.img"), name: "data.img".into(), writable: true },
    ];
    for _ in 0..2 {
        make(&jail, &data, &Images::Named, &list).unwrap();
    }
    assert_eq!(fs::read(jail.root.join("kernel")).unwrap(), b"kernel");
    fs::write(jail.root.join("data.img"), b"written in the jail").unwrap();
    fs::create_dir(run_dir.join("snapshot.new")).unwrap();
    let memory = JailFile {
        source: run_dir.join("snapshot.new/mem"),
        name: "snapshot.new.mem".into(),
        writable: true,
    };
    share(&jail, &data, &Images::Named, std::slice::from_ref(&memory)).unwrap();
    fs::write(jail.root.join(&memory.name), b"memory").unwrap();
    for _ in 0..2 {
        unshare(&jail, &data, std::slice::from_ref(&memory.name)).unwrap();
    }
    assert!(!jail.root.join(&memory.name).exists());
    assert_eq!(fs::read(&memory.source).unwrap(), b"memory");
    let known = roots(&data).unwrap();
    let meta = fs::metadata(&jail.root).unwrap();
    assert_eq!(known, [((meta.dev(), meta.ino()), jail.instance.clone())]);
    assert_eq!(recorded_jail(&data, &jail.instance).as_ref(), Some(&jail.root));
    for _ in 0..2 {
        remove(&jail, &data).unwrap();
    }
    assert!(!jail.root.exists() && recorded_jail(&data, &jail.instance).is_none());
    assert_eq!(fs::read(run_dir.join("data.img")).unwrap(), b"written in the jail");
}

#[test]
fn a_file_that_not_everyone_may_read_is_copied_and_its_owner_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let secret = dir.path().join("kernel");
    fs::write(&secret, b"kernel").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let run_dir = dir.path().join("vms").join("i-00000007");
    fs::create_dir_all(&run_dir).unwrap();
    let (jail, data) = (Jail { uid: u32::MAX - 1, ..jail(&run_dir) }, DataDir::named(dir.path()));
    if mvm_needs::can_run(&[mvm_needs::Need::Root]) {
        let list = [JailFile { source: secret.clone(), name: "kernel".into(), writable: false }];
        make(&jail, &data, &Images::Named, &list).unwrap();
        let (kept, lent) = (fs::metadata(&secret).unwrap(), fs::metadata(jail.root.join("kernel")).unwrap());
        assert_ne!(kept.ino(), lent.ino());
        assert_eq!((kept.uid(), lent.uid()), (0, jail.uid));
    }
}

#[test]
fn a_vmm_is_given_nothing_but_what_is_its_instance_s() {
    let dir = tempfile::tempdir().unwrap();
    let (run_dir, other) = (dir.path().join("vms/i-00000007"), dir.path().join("vms/i-00000008"));
    for made in [&run_dir, &other] {
        fs::create_dir_all(made).unwrap();
    }
    fs::write(dir.path().join("outside"), b"outside").unwrap();
    fs::write(other.join("data.img"), b"another's").unwrap();
    fs::hard_link(dir.path().join("outside"), run_dir.join("linked")).unwrap();
    symlink(dir.path().join("outside"), run_dir.join("led")).unwrap();
    symlink(&other, run_dir.join("snapshot")).unwrap();
    let (jail, data) = (jail(&run_dir), DataDir::named(dir.path()));
    make(&jail, &data, &Images::Named, &[]).unwrap();
    let wrong = [
        ("its own name for a file elsewhere", run_dir.join("linked"), true),
        ("a link out", run_dir.join("led"), true),
        ("a directory that leads out", run_dir.join("snapshot/data.img"), true),
        ("a file elsewhere", dir.path().join("outside"), true),
        ("another's disk", other.join("data.img"), true),
        ("another's disk to read", other.join("data.img"), false),
        ("its own name for a file elsewhere, to read", run_dir.join("linked"), false),
        ("a link out, to read", run_dir.join("led"), false),
        ("a directory", dir.path().to_owned(), false),
    ];
    for (what, source, writable) in wrong {
        let file = JailFile { source, name: "x".into(), writable };
        share(&jail, &data, &Images::Named, &[file]).expect_err(what);
        assert!(!jail.root.join("x").exists(), "{what}");
    }
    // A link of the same name as the jail's own was a way to make the agent believe in another jail.
    symlink(&other, run_dir.join("jail")).unwrap();
    assert_eq!(roots(&data).unwrap().len(), 1);
    remove(&jail, &data).unwrap();
    assert_eq!(roots(&data).unwrap(), []);
    assert_eq!(fs::read(other.join("data.img")).unwrap(), b"another's");
}

#[test]
fn a_jail_that_was_made_elsewhere_is_removed_with_the_one_that_is_made_now() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("vms").join("i-00000007");
    fs::create_dir_all(&run_dir).unwrap();
    fs::write(run_dir.join("data.img"), b"disk").unwrap();
    let list = [JailFile { source: run_dir.join("data.img"), name: "data.img".into(), writable: true }];
    let (before, now) = (jail(&dir.path().join("srv")), jail(&run_dir));
    let data = DataDir::named(dir.path());
    make(&before, &data, &Images::Named, &list).unwrap();
    make(&now, &data, &Images::Named, &list).unwrap();
    assert!(!before.root.exists() && now.root.join("data.img").exists());
}

#[test]
fn what_is_not_a_jail_of_the_instance_is_never_removed() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = &dir.path().join("vms").join("i-00000007");
    let data = DataDir::named(dir.path());
    for root in [dir.path().to_owned(), dir.path().join("root"), dir.path().join("i-00000008/root")] {
        let wrong = Jail { root, ..jail(dir.path()) };
        assert!(matches!(remove(&wrong, &data), Err(HostError::Refused(_))));
        assert!(matches!(unshare(&wrong, &data, &["kernel".to_owned()]), Err(HostError::Refused(_))));
    }
    for name in ["", "..", "../kernel", "/etc/passwd", "link/passwd"] {
        let refused = unshare(&jail(run_dir), &data, &[name.to_owned()]);
        assert!(matches!(refused, Err(HostError::Refused(_))), "{name}");
    }
    assert!(dir.path().exists());
}

#[test]
fn a_jail_leaves_the_control_group_of_its_instance_alone() {
    use nix::mount::{MsFlags, mount};

    if !mvm_needs::can_run(&[mvm_needs::Need::Root]) {
        return;
    }
    // Mounts of this thread's own, so that what lies where control groups are is the test's.
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
    mount(Some("none"), "/sys/fs/cgroup", Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    let group = Path::new("/sys/fs/cgroup/mvm/acme/web/i-00000007");
    fs::create_dir_all(group).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("vms").join("i-00000007");
    fs::create_dir_all(&run_dir).unwrap();
    let (jail, data) = (jail(&run_dir), DataDir::named(dir.path()));
    make(&jail, &data, &Images::Named, &[]).unwrap();
    assert!(group.exists(), "it was made before the jail, and the VMM is to be born in it");
    remove(&jail, &data).unwrap();
    assert!(group.exists());
}

#[test]
fn a_template_s_file_is_lent_by_name_only_once_it_was_taken_from_its_vmm() {
    if !mvm_needs::can_run(&[mvm_needs::Need::Root]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (run_dir, template) = (dir.path().join("vms/i-00000007"), dir.path().join("vms/i-00000008"));
    fs::create_dir_all(&run_dir).unwrap();
    fs::create_dir_all(template.join("snapshot-1")).unwrap();
    let memory = template.join("snapshot-1/mem");
    fs::write(&memory, b"memory").unwrap();
    fs::set_permissions(&memory, fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::chown(&memory, Some(61_000), Some(61_000)).unwrap();
    let data = DataDir::named(dir.path());
    let lent = |uid: u32| {
        let jail = Jail { uid, gid: uid, ..jail(&run_dir) };
        let file = JailFile { source: memory.clone(), name: "mem".into(), writable: false };
        make(&jail, &data, &Images::Named, &[file]).map(|()| fs::metadata(jail.root.join("mem")).unwrap())
    };
    let kept = || fs::metadata(&memory).unwrap();
    for user in [61_000, 61_001] {
        let copy = lent(user).unwrap();
        assert!(copy.ino() != kept().ino() && copy.uid() == user, "one that its VMM could write is copied");
    }
    let template = data.run(&InstanceId::from_bits(8)).unwrap();
    let take = |is_vmm: fn(u32) -> bool| files::run::make_read_only(&template, "snapshot-1/mem", is_vmm);
    take(|_| false).unwrap_err();
    assert_eq!((kept().uid(), kept().mode() & 0o7777), (61_000, 0o600), "another's is left alone");
    for _ in 0..2 {
        take(|user| user == 61_000).unwrap();
    }
    assert_eq!((kept().uid(), kept().mode() & 0o7777), (0, 0o444));
    for user in [61_000, 61_001] {
        assert_eq!(lent(user).unwrap().ino(), kept().ino());
    }
    // A second name of root's that is not as such a file is may be that of anything.
    fs::hard_link(&memory, dir.path().join("elsewhere")).unwrap();
    fs::set_permissions(&memory, fs::Permissions::from_mode(0o600)).unwrap();
    lent(61_000).unwrap_err();
}
