//! What a compromised agent asks of its helper to get at files that are root's, step by step. Needs root.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use mvm_host::privileges::Account;
use mvm_host::{
    Access, Handover, Host as _, HostError, Jail, JailFile, Operation, Outcome, Policy, RemoteHost,
    VmmProcess, hand_over,
};
use mvm_needs::{Need, can_run};
use mvm_proto::InstanceId;

use crate::remote::suite::{JAILED, PATIENCE};
use crate::remote::{Serving, serving};

/// Who the agent runs as.
pub(crate) const AGENT: u32 = 65_534;
const CANARY: &[u8] = b"for root alone";

/// A data directory of an agent that is not root, and files outside that are root's.
pub(crate) struct Scene {
    pub(crate) dir: tempfile::TempDir,
}

impl Drop for Scene {
    fn drop(&mut self) {
        crate::support::ending::end_all_below(self.dir.path());
    }
}

/// All of a file that must not change.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    owner: (u32, u32),
    mode: u32,
    names: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    content: Vec<u8>,
}

impl Scene {
    pub(crate) fn new() -> Self {
        Self::in_dir(tempfile::tempdir().unwrap())
    }

    /// The same where no disk is waited for, if there is such a place.
    pub(crate) fn in_memory() -> Self {
        let shared = Path::new("/dev/shm");
        Self::in_dir(
            if shared.is_dir() { tempfile::tempdir_in(shared) } else { tempfile::tempdir() }.unwrap(),
        )
    }

    fn in_dir(dir: tempfile::TempDir) -> Self {
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let scene = Self { dir };
        let outside = scene.outside();
        fs::create_dir(&outside).unwrap();
        for (name, mode) in [("secret", 0o600), ("world", 0o644)] {
            fs::write(outside.join(name), CANARY).unwrap();
            fs::set_permissions(outside.join(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        let account = Account { name: "nobody".to_owned(), uid: AGENT, gid: AGENT };
        hand_over(&Handover { data_dir: &scene.data_dir(), own: vec![scene.images()] }, &account).unwrap();
        for name in ["qemu", "firecracker", "jailer"] {
            fs::write(scene.program(name), "#!/bin/sh\n").unwrap();
            fs::set_permissions(scene.program(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        scene
    }

    pub(crate) fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }

    pub(crate) fn data_dir(&self) -> PathBuf {
        self.dir.path().join("agent")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.data_dir().join("images")
    }

    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn image(&self, name: &str) -> PathBuf {
        let image = self.images().join(name);
        fs::write(&image, "an image").unwrap();
        chown(&image, Some(AGENT), Some(AGENT)).unwrap();
        image
    }

    pub(crate) fn policy(&self) -> Policy {
        Policy {
            data_dir: self.data_dir(),
            images_dir: self.images(),
            agent_uid: AGENT,
            agent_gids: vec![AGENT],
            ..crate::remote::confined_policy(self.dir.path())
        }
    }

    pub(crate) fn helper(&self) -> (RemoteHost, Serving) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let host = RemoteHost::new(ours.into(), &self.data_dir()).unwrap();
        (host, serving(theirs, self.policy()))
    }

    pub(crate) fn run_dir(&self, instance: &InstanceId) -> PathBuf {
        self.data_dir().join("vms").join(instance.as_str())
    }

    pub(crate) fn jail(&self, instance: &InstanceId) -> Jail {
        let root = self.run_dir(instance).join("firecracker").join(instance.as_str()).join("root");
        Jail { instance: instance.clone(), root, uid: JAILED, gid: JAILED }
    }

    /// The same but for when a file last had a name more or less.
    pub(crate) fn kept(&self) -> Vec<(PathBuf, Seen)> {
        let mut all = self.seen();
        all.iter_mut().for_each(|(_, seen)| seen.changed = (0, 0));
        all
    }

    pub(crate) fn seen(&self) -> Vec<(PathBuf, Seen)> {
        let mut entries: Vec<_> =
            fs::read_dir(self.outside()).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        entries.into_iter().map(|path| (path.clone(), Seen::of(&path))).collect()
    }
}

impl Seen {
    fn of(path: &Path) -> Self {
        let meta = fs::symlink_metadata(path).unwrap();
        Self {
            owner: (meta.uid(), meta.gid()),
            mode: meta.mode(),
            names: meta.nlink(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
            content: fs::read(path).unwrap(),
        }
    }
}

/// Puts a link to a file of root's where an image was, as the agent can.
fn swap(image: &Path, target: &Path) {
    fs::remove_file(image).unwrap();
    symlink(target, image).unwrap();
}

fn ids() -> [InstanceId; 2] {
    [0x1, 0x2].map(InstanceId::from_bits)
}

/// Each file of root's: `LinkFile` an image, put a link to root's file in its place, lend that link to a jail, make the
/// jail's parts names of the run directory, and have the file given away as a template's memory.
#[tokio::test]
async fn no_file_of_root_s_is_lent_read_or_given_away_by_way_of_a_link_to_an_image() {
    if !can_run(&[Need::Root]) {
        return;
    }
    for name in ["secret", "world"] {
        let scene = Scene::new();
        let target = scene.outside().join(name);
        let before = scene.seen();
        let image = scene.image("a");
        let (host, _serving) = scene.helper();
        let [one, two] = ids();
        for instance in ids() {
            host.perform(&Operation::MakeRunDir { instance }).await.unwrap();
        }
        // 1. A link in a run directory to an image. Whether it is made makes no difference to what follows.
        let (source, link) = (image.clone(), "k".to_owned());
        let linked = host.perform(&Operation::LinkFile { instance: two.clone(), source, name: link }).await;
        if linked.is_err() {
            symlink(&image, scene.run_dir(&two).join("k")).unwrap();
        }
        // 2. The image becomes a link.
        swap(&image, &target);
        // 3. and 4. Through a run directory, and directly.
        let jail = scene.jail(&one);
        host.perform(&Operation::MakeJail { jail: jail.clone(), files: vec![] }).await.unwrap();
        for source in [scene.run_dir(&two).join("k"), image.clone()] {
            let file = JailFile { source, name: "s".to_owned(), writable: false };
            let files = vec![file];
            let share = Operation::ShareWithJail { jail: jail.clone(), files: files.clone() };
            let lent = host.perform(&share).await;
            assert!(lent.is_err(), "{name}: {lent:?}");
            let made = host.perform(&Operation::MakeJail { jail: jail.clone(), files }).await;
            assert!(made.is_err(), "{name}: {made:?}");
            assert!(!jail.root.join("s").exists(), "{name}");
            for access in [Access::Read, Access::ReadShared] {
                let opened = host.open_file(&one, "jail/s", access).await;
                assert!(!matches!(opened, Ok(Some(_))), "{name}: {opened:?}");
            }
        }
        assert_eq!(scene.seen(), before, "{name}");
    }
}

/// The second half alone: a jail that has a second name of a file of root's.
#[tokio::test]
async fn no_part_of_a_jail_becomes_a_name_of_a_run_directory_and_none_of_its_files_a_template_s_memory() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let scene = Scene::new();
    let (host, _serving) = scene.helper();
    let [one, two] = ids();
    for instance in ids() {
        host.perform(&Operation::MakeRunDir { instance }).await.unwrap();
    }
    let jail = scene.jail(&one);
    host.perform(&Operation::MakeJail { jail: jail.clone(), files: vec![] }).await.unwrap();
    fs::hard_link(scene.outside().join("world"), jail.root.join("s")).unwrap();
    fs::hard_link(scene.outside().join("world"), jail.root.join("memory")).unwrap();
    let before = scene.seen();
    let own = format!("firecracker/{one}");
    for (from, to) in [
        (own.as_str(), "y"),
        (own.as_str(), "snapshot-y"),
        ("y/root", "z"),
        ("snapshot-y/root", "snapshot-z"),
        ("firecracker", "snapshot-q"),
        ("firecracker", "q"),
        ("jail/s", "s"),
    ] {
        let (from, to) = (from.to_owned(), to.to_owned());
        let renamed = host.perform(&Operation::Rename { instance: one.clone(), from, to: to.clone() }).await;
        assert!(renamed.is_err(), "{to}: {renamed:?}");
    }
    for memory in ["z/s", "firecracker/memory", "jail/memory", "memory", "snapshot-z/s"] {
        let (template, name) = (one.clone(), "base".to_owned());
        let share =
            Operation::ShareMemory { instance: two.clone(), template, memory: memory.to_owned(), name };
        let shared = host.perform(&share).await;
        assert!(matches!(shared, Err(HostError::Refused(_))), "{memory}: {shared:?}");
    }
    assert_eq!(scene.seen(), before);
}

/// Only what a VMM's user owns, by one name, is given to all as a template's memory.
#[tokio::test]
async fn a_template_s_memory_is_a_vmm_s_own_file_in_a_snapshot() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let scene = Scene::new();
    let (host, _serving) = scene.helper();
    let [one, two] = ids();
    for instance in ids() {
        host.perform(&Operation::MakeRunDir { instance }).await.unwrap();
    }
    let make = Operation::MakeDir { instance: one.clone(), name: "snapshot".to_owned() };
    host.perform(&make).await.unwrap();
    let memory = scene.run_dir(&one).join("snapshot/memory");
    let share = || {
        let (memory, name) = ("snapshot/memory".to_owned(), "base".to_owned());
        Operation::ShareMemory { instance: two.clone(), template: one.clone(), memory, name }
    };
    fs::hard_link(scene.outside().join("world"), &memory).unwrap();
    let before = scene.seen();
    host.perform(&share()).await.unwrap_err();
    assert_eq!(scene.seen(), before);
    fs::remove_file(&memory).unwrap();
    // A file that root made there is no VMM's memory either, nor is the agent's.
    for owner in [0, AGENT] {
        fs::write(&memory, "m").unwrap();
        chown(&memory, Some(owner), None).unwrap();
        let refused = host.perform(&share()).await.unwrap_err();
        assert!(matches!(refused, HostError::Refused(_)), "{refused:?}");
    }
    chown(&memory, Some(JAILED), Some(JAILED)).unwrap();
    for _ in 0..2 {
        host.perform(&share()).await.unwrap();
        let meta = fs::metadata(&memory).unwrap();
        assert_eq!((meta.uid(), meta.mode() & 0o7777, meta.nlink()), (0, 0o666, 2));
    }
}

#[tokio::test]
async fn what_a_vmm_left_in_its_jail_under_the_program_s_name_is_not_written_to_by_the_next_jailer() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let scene = Scene::new();
    // Copies its program as the real one does: over what has its name, and through links.
    let (instance, [_, other]) = (ids()[0].clone(), ids());
    let jail = scene.jail(&instance);
    let script = format!("#!/bin/sh\ncp \"$4\" {}/firecracker\n", jail.root.display());
    fs::write(scene.program("jailer"), script).unwrap();
    let image = scene.image("kernel");
    fs::set_permissions(&image, fs::Permissions::from_mode(0o444)).unwrap();
    let (host, _serving) = scene.helper();
    for instance in [&instance, &other] {
        host.perform(&Operation::MakeRunDir { instance: instance.clone() }).await.unwrap();
    }
    let spawn = |instance: &InstanceId| {
        let (program, base) = (scene.program("firecracker"), scene.run_dir(instance));
        let (program, base) = (program.to_str().unwrap(), base.to_str().unwrap());
        let user = JAILED.to_string();
        let line = ["--id", instance.as_str(), "--exec-file", program, "--uid", &user, "--gid", &user];
        let rest = [
            "--chroot-base-dir",
            base,
            "--",
            "--api-sock",
            "api.sock",
            "--log-path",
            "l",
            "--level",
            "Warning",
            "--show-level",
        ];
        Operation::SpawnVmm(mvm_host::SpawnVmm {
            instance: instance.clone(),
            program: scene.program("jailer"),
            args: line.into_iter().chain(rest).map(str::to_owned).collect(),
            log: "console.log".to_owned(),
            tap: None,
            group: None,
            confine: None,
        })
    };
    let files = vec![JailFile { source: image.clone(), name: "kernel".to_owned(), writable: false }];
    host.perform(&Operation::MakeJail { jail: jail.clone(), files }).await.unwrap();
    let (before, program) = (scene.kept(), jail.root.join("firecracker"));
    // What the VMM does to its own directory before it ends.
    let link = || symlink(scene.outside().join("world"), &program);
    let rename = || fs::rename(jail.root.join("kernel"), &program);
    for trick in [&link as &dyn Fn() -> std::io::Result<()>, &rename] {
        trick().unwrap();
        let Outcome::Process(process) = host.perform(&spawn(&instance)).await.unwrap() else { panic!() };
        let started = VmmProcess { instance: instance.clone(), process };
        tokio::time::timeout(PATIENCE, host.wait_end(&started)).await.unwrap().unwrap();
        assert_eq!(scene.kept(), before);
        assert_eq!(fs::read(&image).unwrap(), b"an image");
        assert_eq!(fs::read(&program).unwrap(), fs::read(scene.program("firecracker")).unwrap());
        fs::remove_file(&program).unwrap();
    }
    // Nor does it go where no jail was made.
    let refused = host.perform(&spawn(&other)).await.unwrap_err();
    assert!(matches!(refused, HostError::Refused(_)), "{refused:?}");
}

#[tokio::test]
async fn firecracker_is_started_through_its_jailer_and_nothing_is_asked_to_be_weaker_than_the_operator_said()
{
    if !can_run(&[Need::Root]) {
        return;
    }
    let scene = Scene::new();
    let (host, _serving) = scene.helper();
    let [instance, _] = ids();
    host.perform(&Operation::MakeRunDir { instance: instance.clone() }).await.unwrap();
    let args = ["--id", instance.as_str(), "--api-sock", "api.sock"].map(str::to_owned).to_vec();
    let spawn = mvm_host::SpawnVmm {
        instance: instance.clone(),
        program: scene.program("firecracker"),
        args,
        log: "console.log".to_owned(),
        tap: None,
        group: None,
        confine: None,
    };
    let started = host.perform(&Operation::SpawnVmm(spawn.clone())).await;
    assert!(matches!(started, Err(HostError::Refused(_))), "{started:?}");
    let confine = mvm_host::Confinement {
        demand: mvm_host::sandbox::Demand::BestEffort,
        ..mvm_host::Confinement::qemu(JAILED, JAILED)
    };
    let args = ["-name".to_owned(), format!("mvm-{instance}")].to_vec();
    let weaker = mvm_host::SpawnVmm { program: scene.program("qemu"), args, confine: Some(confine), ..spawn };
    let started = host.perform(&Operation::SpawnVmm(weaker)).await;
    assert!(matches!(started, Err(HostError::Refused(_))), "{started:?}");
    assert_eq!(host.vmms().await.unwrap(), []);
}
