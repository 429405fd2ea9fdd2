//! Each argument that a compromised agent might send, and what is said to it.

use super::*;
use crate::sandbox::Filter;
use crate::{EndSignal, ProcessIdentity};

struct Site {
    dir: tempfile::TempDir,
    policy: Policy,
}

fn id() -> InstanceId {
    InstanceId::from_bits(0x2a)
}

fn site() -> Site {
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().join("images");
    std::fs::create_dir_all(images.join("a")).unwrap();
    for name in ["a/kernel", "a/initrd", "a/rootfs"] {
        std::fs::write(images.join(name), "image").unwrap();
    }
    std::fs::write(dir.path().join("secret"), "of the host").unwrap();
    std::os::unix::fs::symlink(dir.path().join("secret"), images.join("a/link")).unwrap();
    std::os::unix::fs::symlink(dir.path(), images.join("up")).unwrap();
    let program = |name: &str| dir.path().join(name);
    for name in ["qemu", "firecracker", "jailer", "anyones"] {
        std::fs::write(program(name), "").unwrap();
        let mode = if name == "anyones" { 0o777 } else { 0o755 };
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(program(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    std::os::unix::fs::symlink(program("qemu"), program("linked")).unwrap();
    let policy = Policy {
        data_dir: dir.path().to_owned(),
        images_dir: images,
        programs: vec![
            (program("qemu"), VmmProgram::Qemu),
            (program("firecracker"), VmmProgram::Firecracker),
            (program("jailer"), VmmProgram::Jailer),
            (program("anyones"), VmmProgram::Qemu),
            (program("gone"), VmmProgram::Qemu),
            (program("linked"), VmmProgram::Qemu),
        ],
        jail_base: Some("/srv/jails".into()),
        agent_uid: rustix::process::geteuid().as_raw(),
        agent_gids: vec![],
        vmm_ids: vec![(61_000, 61_010)],
        demand: None,
        groups: None,
    };
    Site { dir, policy }
}

impl Site {
    fn admits(&self, operation: &Operation) {
        let admitted = self.policy.admit(operation);
        assert!(admitted.is_ok(), "{operation:?}: {admitted:?}");
    }

    fn refuses(&self, operation: &Operation) {
        assert!(self.policy.admit(operation).is_err(), "{operation:?}");
    }

    fn spawn(&self, program: &str, args: &[&str]) -> Operation {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        let log = "vmm.log".to_owned();
        Operation::SpawnVmm(SpawnVmm {
            instance: id(),
            program: self.dir.path().join(program),
            args,
            log,
            tap: None,
            group: None,
            confine: None,
        })
    }

    fn image(&self, name: &str) -> String {
        self.policy.images_dir.join(name).display().to_string()
    }

    fn jail(&self) -> Jail {
        let root = self.policy.run_dir(&id()).join("firecracker").join(id().as_str()).join("root");
        Jail { instance: id(), root, uid: 61_000, gid: 61_000 }
    }
}

#[test]
fn names_are_plain_and_sizes_are_bounded() {
    let site = site();
    for name in ["data.img", "snapshot/memory", "snapshot-0123456789abcdef/mem"] {
        site.admits(&Operation::RemoveFile { instance: id(), name: name.to_owned() });
    }
    let long = "x".repeat(MAX_NAME_BYTES + 1);
    let ours =
        ["jail", "jail/api.sock", "sub/file", "firecracker", "my-firecracker", "firecracker/i-0000002a"];
    let jails = ["i-0000002a", "snapshot/i-0000002a", "snapshot/firecracker", "snapshot-firecracker/memory"];
    let wrong = ["", ".", "..", "../x", "/x", "a/b/c", "a/../b", ".hidden", "-x", "a b", "a\0", "ä", &long];
    for name in wrong.into_iter().chain(ours).chain(jails) {
        let name = name.to_owned();
        site.refuses(&Operation::RemoveFile { instance: id(), name: name.clone() });
        site.refuses(&Operation::MakeDir { instance: id(), name: name.clone() });
        site.refuses(&Operation::WriteFile { instance: id(), name: name.clone(), text: String::new() });
        site.refuses(&Operation::TrimLog { instance: id(), name: name.clone(), max_bytes: 1 });
        site.refuses(&Operation::Rename { instance: id(), from: name.clone(), to: "a".to_owned() });
        site.refuses(&Operation::Rename { instance: id(), from: "a".to_owned(), to: name.clone() });
        site.refuses(&Operation::DigHoles { instance: id(), name: name.clone() });
        site.refuses(&Operation::AdmitVmm { instance: id(), user: 61_000, files: vec![name.clone()] });
        let (template, memory) = (InstanceId::from_bits(1), "snapshot/memory".to_owned());
        site.refuses(&Operation::ShareMemory { instance: id(), template, memory, name: name.clone() });
        site.refuses(&Operation::MakeDisk { instance: id(), name, size_mib: 16 });
    }
    for name in ["snapshot", "snapshot.tmp", "snapshot.new", "snapshot-0123456789abcdef"] {
        site.admits(&Operation::MakeDir { instance: id(), name: name.to_owned() });
    }
    for name in ["data", "snapshot/a", "asnapshot"] {
        site.refuses(&Operation::MakeDir { instance: id(), name: name.to_owned() });
    }
    let write =
        |bytes| Operation::WriteFile { instance: id(), name: "vmm.json".to_owned(), text: "x".repeat(bytes) };
    site.admits(&write(MAX_TEXT_BYTES));
    site.refuses(&write(MAX_TEXT_BYTES + 1));
    let disk = |size_mib| Operation::MakeDisk { instance: id(), name: "data.img".to_owned(), size_mib };
    site.admits(&disk(MAX_DISK_MIB));
    site.refuses(&disk(MAX_DISK_MIB + 1));
    site.refuses(&disk(0));
    // An instance's id is a type: what is no id is no operation.
    let text = r#"{"operation":"make_run_dir","instance":"../../etc"}"#;
    serde_json::from_str::<Operation>(text).unwrap_err();
    for name in ["jail/api.sock", "jail/firecracker.pid", "data.img", "snapshot/state"] {
        site.policy.opened(name, Some(Access::Read)).unwrap();
        site.policy.opened(name, None).unwrap();
    }
    for name in ["jail", "jail/..", "jail/a/b", "firecracker/a", "sub/file"] {
        site.policy.opened(name, Some(Access::ReadShared)).unwrap_err();
    }
    site.policy.opened("jail/api.sock", Some(Access::Create)).unwrap_err();
    let share = |memory: &str| {
        let (template, memory, name) = (InstanceId::from_bits(1), memory.to_owned(), "base".to_owned());
        Operation::ShareMemory { instance: id(), template, memory, name }
    };
    site.admits(&share("snapshot/memory"));
    for memory in ["memory", "snapshot/state", "sub/memory", "jail/memory", "snapshot/memory/memory"] {
        site.refuses(&share(memory));
    }
    let process = ProcessIdentity { pid: 1, start_time: 1, boot_id: String::new() };
    site.admits(&Operation::EndProcess { process, signal: EndSignal::Kill });
}

#[test]
fn nothing_but_images_is_linked_and_only_where_vmms_are_not_confined() {
    let site = site();
    let link = |source: PathBuf| Operation::LinkFile { instance: id(), source, name: "rootfs".to_owned() };
    let images = &site.policy.images_dir;
    site.admits(&link(images.join("a/kernel")));
    for source in [
        site.dir.path().join("secret"),
        images.clone(),
        images.join("a/../../secret"),
        images.join("../secret"),
        "a/kernel".into(),
        "/etc/passwd".into(),
    ] {
        site.refuses(&link(source));
    }
    for demand in [Demand::All, Demand::BestEffort] {
        let confined = Policy { demand: Some(demand), ..site.policy.clone() };
        assert!(confined.admit(&link(images.join("a/kernel"))).is_err());
    }
}

#[test]
fn a_jail_is_the_instances_own_and_of_a_user_that_owns_nothing_else() {
    let site = site();
    let make = |jail: Jail, files: Vec<JailFile>| Operation::MakeJail { jail, files };
    let jail = site.jail();
    site.admits(&make(jail.clone(), vec![]));
    site.admits(&Operation::RemoveJail {
        jail: Jail { root: format!("/srv/jails/firecracker/{}/root", id()).into(), ..jail.clone() },
    });
    for (uid, gid) in [(0, 61_000), (61_000, 0), (1000, 61_000), (61_011, 61_000), (61_000, 1000)] {
        site.refuses(&make(Jail { uid, gid, ..jail.clone() }, vec![]));
    }
    let foreign = InstanceId::from_bits(0x2b);
    for root in [
        PathBuf::from("/"),
        format!("/etc/firecracker/{}/root", id()).into(),
        format!("/srv/jails/firecracker/{foreign}/root").into(),
        format!("/srv/jails/{}/root", id()).into(),
        format!("/srv/jails/../etc/firecracker/{}/root", id()).into(),
        format!("/srv/jails/a/b/{}/root", id()).into(),
        format!("/srv/jails/snapshot-a/{}/root", id()).into(),
        format!("/srv/jails/firecracker/{}/root/..", id()).into(),
        site.policy.run_dir(&id()),
    ] {
        site.refuses(&Operation::RemoveJail { jail: Jail { root, ..jail.clone() } });
    }
    let file = |source: PathBuf, name: &str, writable| JailFile { source, name: name.to_owned(), writable };
    let kernel = site.policy.images_dir.join("a/kernel");
    let own = site.policy.run_dir(&id()).join("data.img");
    site.admits(&make(
        jail.clone(),
        vec![file(kernel.clone(), "kernel", false), file(own, "data.img", true)],
    ));
    for bad in [
        file(kernel.clone(), "kernel", true),
        file(kernel.clone(), "a/kernel", false),
        file(kernel.clone(), "..", false),
        file(kernel.clone(), "firecracker", false),
        file(kernel.clone(), "dev", false),
        file(kernel.clone(), "run", false),
        file(kernel.clone(), "sys", false),
        file(site.policy.run_dir(&foreign).join("k"), "kernel", false),
        file(site.policy.run_dir(&foreign).join("sub/mem"), "kernel", false),
        file(site.policy.run_dir(&id()).join("firecracker/x"), "data.img", true),
        file(site.dir.path().join("secret"), "kernel", false),
        file("/etc/shadow".into(), "data.img", true),
        file(site.policy.run_dir(&foreign).join("data.img"), "data.img", true),
        file(site.policy.run_dir(&id()).join("../../secret"), "data.img", true),
    ] {
        site.refuses(&make(jail.clone(), vec![bad.clone()]));
        site.refuses(&Operation::ShareWithJail { jail: jail.clone(), files: vec![bad] });
    }
    let unshare = |names: Vec<String>| Operation::UnshareFromJail { jail: jail.clone(), names };
    site.refuses(&unshare(vec!["../x".to_owned()]));
    site.refuses(&unshare(vec!["sys".to_owned()]));
    let names = |number| (0..number).map(|number| format!("file-{number}")).collect::<Vec<_>>();
    let files = |number| names(number).iter().map(|name| file(kernel.clone(), name, false)).collect();
    site.admits(&unshare(names(MAX_JAIL_FILES)));
    site.refuses(&unshare(names(MAX_JAIL_FILES + 1)));
    let share = |files| Operation::ShareWithJail { jail: jail.clone(), files };
    for asked in [make(jail.clone(), files(MAX_JAIL_FILES)), share(files(MAX_JAIL_FILES))] {
        site.admits(&asked);
    }
    for asked in [make(jail.clone(), files(MAX_JAIL_FILES + 1)), share(files(MAX_JAIL_FILES + 1))] {
        site.refuses(&asked);
    }
    let admit = |user| Operation::AdmitVmm { instance: id(), user, files: vec![] };
    site.admits(&admit(61_000));
    for user in [0, 1000, 61_011, site.policy.agent_uid] {
        site.refuses(&admit(user));
    }
}

#[test]
fn a_program_is_on_the_list_and_writable_by_root_alone() {
    let site = site();
    let name = format!("mvm-{}", id());
    site.admits(&site.spawn("qemu", &["-name", &name]));
    site.refuses(&site.spawn("anyones", &["-name", &name]));
    site.refuses(&site.spawn("gone", &["-name", &name]));
    // It may lead elsewhere by the time that it is started.
    site.refuses(&site.spawn("linked", &["-name", &name]));
    site.refuses(&site.spawn("./qemu", &["-name", &name]));
    site.refuses(&site.spawn("/bin/sh", &["-name", &name]));
    let Operation::SpawnVmm(spawn) = site.spawn("qemu", &["-name", &name]) else { unreachable!() };
    site.refuses(&Operation::SpawnVmm(SpawnVmm { log: "../log".to_owned(), ..spawn.clone() }));
    let with_tap = |tap: &str| Operation::SpawnVmm(SpawnVmm { tap: Some(tap.to_owned()), ..spawn.clone() });
    site.admits(&with_tap("tn7i3"));
    for tap in ["", "eth0", "br-tenant-7", "tn7i03", "tn7i3/..", "tn7"] {
        site.refuses(&with_tap(tap));
    }
    site.refuses(&Operation::SpawnVmm(SpawnVmm { args: vec![String::new(); MAX_ARGS + 1], ..spawn }));
    if mvm_needs::can_run(&[mvm_needs::Need::Root]) {
        use std::os::unix::fs::{PermissionsExt as _, chown};
        let (agent_uid, agent_gids) = (65_534, vec![65_533, 65_534]);
        let policy = Policy { agent_uid, agent_gids, ..site.policy.clone() };
        std::fs::set_permissions(site.dir.path(), std::fs::Permissions::from_mode(0o775)).unwrap();
        for (group, admitted) in [(0, true), (50, true), (65_533, false)] {
            chown(site.dir.path(), None, Some(group)).unwrap();
            assert_eq!(policy.admit(&site.spawn("qemu", &["-name", &name])).is_ok(), admitted, "{group}");
        }
    }
}

#[test]
fn qemu_is_told_what_our_driver_tells_it_and_nothing_else() {
    let site = site();
    let name = format!("mvm-{}", id());
    let disk = |file: &str, read_only: bool| {
        format!(
            r#"{{"driver":"raw","node-name":"d","read-only":{read_only},
                "file":{{"driver":"file","filename":"{file}","read-only":{read_only}}}}}"#
        )
    };
    let cached = |cache: &str| {
        format!(
            r#"{{"driver":"raw","node-name":"d","read-only":false,"cache":{cache},
                "file":{{"driver":"file","filename":"data.img","read-only":false,"cache":{cache}}}}}"#
        )
    };
    let named = format!("mvm-{}", id());
    let with_disk = |disk: &str| site.spawn("qemu", &["-name", &named, "-blockdev", disk]);
    site.admits(&with_disk(&cached(r#"{"direct":true}"#)));
    site.refuses(&with_disk(&cached(r#"{"direct":true,"no-flush":true}"#)));
    let (kernel, initrd) = (site.image("a/kernel"), site.image("a/initrd"));
    let (rootfs, data) = (disk(&site.image("a/rootfs"), true), disk("data.img", false));
    #[rustfmt::skip]
    let honest = [
        "-name", &name, "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-chardev", "file,id=console,path=console.log,append=on", "-serial", "chardev:console",
        "-qmp", "unix:qmp.sock,server=on,wait=off",
        "-chardev", "socket,id=guest,path=guest.sock,server=on,wait=off",
        "-kernel", &kernel, "-append", "console=ttyS0 root=/dev/vda, init=/sbin/init", "-initrd", &initrd,
        "-blockdev", &rootfs, "-blockdev", &data,
        "-M", "microvm,acpi=on", "-accel", "kvm", "-cpu", "host,-arch-capabilities", "-smp", "2", "-m", "128M",
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-global", "virtio-mmio.force-legacy=false",
        "-device", "virtio-blk-device,drive=rootfs,serial=rootfs",
        "-device", "virtserialport,bus=serial.0,id=guest,chardev=guest,name=mvm.guest",
        "-object", "memory-backend-file,id=memory,size=128M,merge=off,dump=off,mem-path=base,share=off",
        "-netdev", "tap,id=net,fd=3",
        "-device", "virtio-net-device,netdev=net,mac=02:4d:00:07:00:03",
        "-incoming", "defer",
    ];
    site.admits(&site.spawn("qemu", &honest));
    site.refuses(&site.spawn("qemu", &honest[2..]));
    let writable_image = disk(&site.image("a/rootfs"), false);
    let shadow = disk("/etc/shadow", true);
    #[rustfmt::skip]
    let dishonest = [
        ["-name", "mvm-i-0000002b"], ["-name", "mvm-i-0000002a,debug-threads=on"],
        ["-sandbox", "off"], ["-sandbox", "on"],
        ["-kernel", "/etc/shadow"], ["-initrd", "kernel"],
        ["-blockdev", &shadow], ["-blockdev", &writable_image], ["-blockdev", "driver=file,filename=/etc/shadow"],
        ["-chardev", "file,id=c,path=/etc/cron.d/x"], ["-chardev", "socket,id=c,host=a,port=1"],
        ["-chardev", "pipe,id=c,path=x"], ["-chardev", "file,id=c,path=x,input-path=y"],
        ["-qmp", "tcp:0.0.0.0:1,server=on,wait=off"], ["-qmp", "unix:/run/x,server=on,wait=off"],
        ["-serial", "file:/etc/passwd"], ["-monitor", "stdio"], ["-incoming", "exec:sh"],
        ["-netdev", "tap,id=n"], ["-netdev", "tap,id=n,fd=4"], ["-netdev", "tap,id=n,ifname=eth0,script=no,downscript=no"],
        ["-netdev", "tap,id=n,fd=3,script=/tmp/x"], ["-netdev", "tap,id=n,fd=3,fd=3"],
        ["-netdev", "user,id=n"],
        ["-netdev", "user,id=n,smb=/etc"], ["-device", "vfio-pci,host=01:00.0"],
        ["-device", "virtio-net-device,netdev=n,romfile=/etc/shadow"],
        ["-M", "pc"], ["-M", "microvm,dtb=/etc/shadow"], ["-accel", "xen"], ["-object", "rng-random,id=r"], ["-object", "memory-backend-ram,id=memory,size=64M,merge=on"],
        ["-object", "memory-backend-file,id=memory,size=64M,mem-path=base"],
        ["-object", "memory-backend-file,id=memory,size=64M,mem-path=base,share=on,share=off"],
        ["-fw_cfg", "name=opt/x,file=/etc/shadow"], ["-readconfig", "x"], ["-daemonize", ""], ["-runas", "root"],
        ["-drive", "file=/etc/shadow"], ["-append", "x"], ["-unknown", ""],
    ];
    for words in dishonest {
        // The guest's command line may be anything, and is what shows that this list would be let through else.
        let line = ["-name", &name, words[0], words[1]];
        if words[0] == "-append" {
            site.admits(&site.spawn("qemu", &line));
        } else {
            site.refuses(&site.spawn("qemu", &line));
        }
    }
}

#[test]
fn firecracker_and_its_jailer_are_told_what_our_driver_tells_them() {
    let site = site();
    let instance = id();
    let logs = ["--log-path", "vmm.log", "--level", "Warning", "--show-level"];
    let named = |instance: &str, socket: &str, logs: &[&str]| {
        let words = ["--id", instance, "--api-sock", socket];
        site.spawn("firecracker", &[&words[..], logs].concat())
    };
    let plain = [&["--id", instance.as_str(), "--api-sock", "api.sock"], &logs[..]].concat();
    // Unjailed only where the operator wants no VMM confined; confined by this helper never, for QEMU alone is.
    site.admits(&site.spawn("firecracker", &plain));
    for demand in [Demand::All, Demand::BestEffort] {
        let confined = Policy { demand: Some(demand), ..site.policy.clone() };
        assert!(confined.admit(&site.spawn("firecracker", &plain)).is_err(), "{demand:?}");
    }
    let Operation::SpawnVmm(spawn) = site.spawn("firecracker", &plain) else { unreachable!() };
    let confine = Some(Confinement::qemu(61_000, 61_000));
    site.refuses(&Operation::SpawnVmm(SpawnVmm { confine, ..spawn }));
    site.refuses(&named("i-0000002b", "api.sock", &logs));
    site.refuses(&named(instance.as_str(), "/run/x", &logs));
    for logs in [
        &["--log-path", "/etc/cron.d/x", "--level", "Warning", "--show-level"][..],
        &["--log-path", "vmm.log", "--level", "Trace", "--show-level"],
        &["--log-path", "vmm.log", "--level", "Warning", "--no-seccomp"],
        &[],
    ] {
        site.refuses(&named(instance.as_str(), "api.sock", logs));
    }
    site.refuses(&site.spawn("firecracker", &plain[2..]));
    site.refuses(&site.spawn("firecracker", &[&plain[..], &["--config-file", "x"]].concat()));
    let program = site.dir.path().join("firecracker").display().to_string();
    let base = site.policy.run_dir(&instance).display().to_string();
    let line = |option: &'static str, value: &str| {
        let mut words: Vec<String> = ["--id", instance.as_str(), "--exec-file", &program, "--uid", "61000"]
            .into_iter()
            .chain(["--gid", "61001", "--chroot-base-dir", &base, "--cgroup-version", "1"])
            .map(str::to_owned)
            .collect();
        if let Some(at) = words.iter().position(|word| word == option) {
            words[at + 1] = value.to_owned();
        } else if !option.is_empty() {
            words.extend([option.to_owned(), value.to_owned()]);
        }
        words.extend(["--", "--api-sock", "api.sock"].iter().chain(&logs).map(|word| (*word).to_owned()));
        words
    };
    let jailer =
        |words: Vec<String>| site.spawn("jailer", &words.iter().map(String::as_str).collect::<Vec<_>>());
    site.admits(&jailer(line("", "")));
    let Operation::SpawnVmm(spawn) = jailer(line("", "")) else { unreachable!() };
    let confine = Some(Confinement::qemu(61_000, 61_000));
    site.refuses(&Operation::SpawnVmm(SpawnVmm { confine, ..spawn }));
    site.admits(&jailer(line("--chroot-base-dir", "/srv/jails")));
    for (option, value) in [
        ("--id", "i-0000002b"),
        ("--exec-file", "/bin/sh"),
        ("--uid", "0"),
        ("--gid", "0"),
        ("--uid", "1000"),
        ("--chroot-base-dir", "/"),
        ("--cgroup-version", "2"),
        ("--netns", "/run/netns/a"),
        ("--cgroup", "cpu.max=100 200"),
        ("--resource-limit", "no-file=1024"),
        ("--parent-cgroup", "mvm/acme/web/i-0000002a"),
        ("--bind", "/etc"),
    ] {
        site.refuses(&jailer(line(option, value)));
    }
    let twice = line("", "").into_iter().flat_map(|word| match word.as_str() {
        "--uid" => vec!["--uid".to_owned(), "61000".to_owned(), word],
        _ => vec![word],
    });
    site.refuses(&jailer(twice.collect()));
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o777)).unwrap();
    site.refuses(&jailer(line("", "")));
    site.refuses(&jailer(line("", "").into_iter().filter(|word| word != "--").collect()));
    let mut other = line("", "");
    other.extend(["--config-file", "x"].map(str::to_owned));
    site.refuses(&jailer(other));
}

#[test]
fn a_vmm_is_started_in_its_instances_group_and_no_other() {
    use crate::cgroup::InstanceGroup;
    let site = site();
    let settings = CgroupSettings { parent: Some("machine.slice".into()), ..CgroupSettings::default() };
    let with_groups = Policy { groups: Some(settings), ..site.policy.clone() };
    let group = |instance| {
        let (tenant, pool) = ("acme".parse().unwrap(), "web".parse().unwrap());
        Some(InstanceGroup { tenant, pool, instance })
    };
    let (own, foreign, absent) = (group(id()), group(InstanceId::from_bits(0x2b)), None);
    let instance = id();
    let program = site.dir.path().join("firecracker").display().to_string();
    let spawn = |parent: Option<&str>, group: &Option<InstanceGroup>| {
        let words = ["--id", instance.as_str(), "--exec-file", &program, "--uid", "61000", "--gid", "61000"];
        let parent = parent.map(|parent| ["--parent-cgroup", parent]);
        let vmm = ["--", "--api-sock", "a", "--log-path", "l", "--level", "Warning", "--show-level"];
        let args = words.into_iter().chain(parent.into_iter().flatten()).chain(vmm);
        let Operation::SpawnVmm(spawn) = site.spawn("jailer", &args.collect::<Vec<_>>()) else {
            unreachable!()
        };
        Operation::SpawnVmm(SpawnVmm { group: group.clone(), ..spawn })
    };
    for (policy, parent, group, admitted) in [
        (&with_groups, None, &own, true),
        (&with_groups, None, &absent, true),
        (&with_groups, None, &foreign, false),
        (&with_groups, Some("machine.slice/mvm/acme/web/i-0000002a"), &own, false),
        (&with_groups, Some("system.slice"), &own, false),
        (&with_groups, Some(""), &own, false),
    ] {
        let asked = policy.admit(&spawn(parent, group));
        assert_eq!(asked.is_ok(), admitted, "{parent:?} {group:?}: {asked:?}");
    }
}

#[test]
fn only_files_of_snapshots_are_taken_from_vmms_and_logs_are_cut_where_they_lie() {
    let site = site();
    let take = |name: &str| Operation::MakeReadOnly { instance: id(), name: name.to_owned() };
    let punch = |name: &str| Operation::PunchLog { instance: id(), name: name.to_owned(), max_bytes: 1 };
    site.admits(&take("snapshot.new/mem"));
    for name in
        ["data.img", "snapshot.new", "other/mem", "jail/mem", "snapshot.new/../mem", "snapshot.new/a/b", "/x"]
    {
        site.refuses(&take(name));
    }
    for name in ["metrics.json", "jail/metrics.json", "jail/vmm.log"] {
        site.admits(&punch(name));
    }
    for name in ["/etc/passwd", "jail/../x", "jail/a/b", "firecracker/x", ".x"] {
        site.refuses(&punch(name));
    }
}

#[test]
fn qemu_is_confined_at_least_as_the_operator_said() {
    let site = site();
    let name = format!("mvm-{}", id());
    let Operation::SpawnVmm(spawn) = site.spawn("qemu", &["-name", &name]) else { unreachable!() };
    let admitted = |demand, confine| {
        let policy = Policy { demand, ..site.policy.clone() };
        policy.admit(&Operation::SpawnVmm(SpawnVmm { confine, ..spawn.clone() })).is_ok()
    };
    let with = |demand| Some(Confinement { demand, ..Confinement::qemu(61_000, 61_000) });
    let (all, best) = (Demand::All, Demand::BestEffort);
    let asked = [with(all), with(best), None];
    let table =
        [(Some(all), [true, false, false]), (Some(best), [true, true, false]), (None, [true, true, true])];
    for (operator, expected) in table {
        assert_eq!(asked.clone().map(|asked| admitted(operator, asked)), expected, "{operator:?}");
    }
    // Nothing else of it is the agent's to say either, but for KVM and the filter.
    let changed = |change: fn(&mut Confinement)| {
        let mut confine = Confinement::qemu(61_000, 61_000);
        change(&mut confine);
        admitted(Some(all), Some(confine))
    };
    for (what, expected, found) in [
        ("kvm", true, changed(|asked| asked.kvm = true)),
        ("filter", true, changed(|asked| asked.filter = Filter::Baseline)),
        ("another user", true, changed(|asked| (asked.uid, asked.gid) = (61_010, 61_010))),
        ("a user of the host", false, changed(|asked| (asked.uid, asked.gid) = (1000, 1000))),
        ("a uid that is not the gid", false, changed(|asked| asked.uid = 61_001)),
        ("a gid that is not the uid", false, changed(|asked| asked.gid = 61_001)),
        ("root's group", false, changed(|asked| asked.gid = 0)),
        ("umask", false, changed(|asked| asked.umask = 0)),
        ("images", false, changed(|asked| asked.images = vec!["/etc/shadow".into()])),
        ("needs", false, changed(|asked| asked.needs.push("/etc".into()))),
        ("limits", false, changed(|asked| asked.limits.open_files += 1)),
        ("oom_score", false, changed(|asked| asked.oom_score = -1000)),
    ] {
        assert_eq!(found, expected, "{what}");
    }
}

#[test]
fn ids_that_groups_are_named_by_are_no_paths() {
    let group = |tenant: &str, pool: &str, instance: &str| {
        let group = format!(r#"{{"tenant":"{tenant}","pool":"{pool}","instance":"{instance}"}}"#);
        let of_group = |word: &str| format!(r#"{{"operation":"{word}","group":{group}}}"#);
        [
            format!(r#"{{"operation":"remove_tenant_group","tenant":"{tenant}"}}"#),
            of_group("remove_group"),
            of_group("limit_io").replace("}}", r#"},"limits":null}"#),
        ]
        .map(|text| serde_json::from_str::<Operation>(&text).is_ok())
    };
    assert_eq!(group("acme", "web", "i-0000002a"), [true, true, true]);
    for wrong in ["", ".", "..", "../x", "a/b", "/", "a\\u0000"] {
        assert_eq!(group(wrong, "web", "i-0000002a"), [false, false, false], "{wrong:?}");
        assert_eq!(group("acme", wrong, "i-0000002a"), [true, false, false], "{wrong:?}");
        assert_eq!(group("acme", "web", wrong), [true, false, false], "{wrong:?}");
    }
}

#[test]
fn networks_have_numbers_ports_users_of_vmms_and_links_names() {
    use crate::network::{NetworkWanted, TenantNet};
    use mvm_proto::document::EgressMode;
    let site = site();
    let net = |net_id| TenantNet {
        tenant: "acme".parse().unwrap(),
        net_id,
        subnet: "10.77.1.0/24".parse().unwrap(),
        egress: EgressMode::None,
        dns: false,
        isolate_ports: false,
        mtu: 1500,
    };
    let port = |net_id, owner_uid| Port {
        tenant: "acme".parse().unwrap(),
        instance: id(),
        net_id,
        offset: 3,
        address: "10.77.1.3".parse().unwrap(),
        owner_uid,
    };
    let seven = net(7);
    let of_net = |net: TenantNet| {
        let (port, others) = (port(7, 61_000), vec![]);
        let wanted = NetworkWanted { nets: vec![net.clone()], ..NetworkWanted::default() };
        [
            Operation::EnsureNet { net: net.clone() },
            Operation::RemoveNet { net: net.clone() },
            Operation::EnsurePort { net: net.clone(), port: port.clone() },
            Operation::ProbeNet { net: net.clone(), port: port.clone(), others },
            Operation::ProbeNet { net: seven.clone(), port, others: vec![seven.clone(), net] },
            Operation::KeepNetwork { wanted },
        ]
    };
    let of_port = |port: Port| {
        let wanted = NetworkWanted { ports: vec![port.clone()], ..NetworkWanted::default() };
        [
            Operation::EnsurePort { net: net(7), port: port.clone() },
            Operation::OpenPort { port: port.clone() },
            Operation::RemovePort { port: port.clone() },
            Operation::ProbeNet { net: net(7), port, others: vec![] },
            Operation::KeepNetwork { wanted },
        ]
    };
    let of_name = |name: &str| {
        let wanted = NetworkWanted { hands_off: vec![name.to_owned()], ..NetworkWanted::default() };
        [Operation::RemoveLink { name: name.to_owned() }, Operation::KeepNetwork { wanted }]
    };
    let right = of_net(net(4095)).into_iter().chain(of_port(port(4095, 61_010)));
    right.chain(of_name("br-tenant-4095")).for_each(|operation| site.admits(&operation));
    let numbers = [4096, u16::MAX].into_iter();
    numbers.clone().flat_map(|number| of_net(net(number))).for_each(|operation| site.refuses(&operation));
    let ports = numbers.map(|number| port(number, 61_000));
    let users = [0, 1000, 61_011, u32::MAX, site.policy.agent_uid].map(|user| port(7, user));
    ports.chain(users).flat_map(of_port).for_each(|operation| site.refuses(&operation));
    for name in ["", "..", "a/b", "eth0;x", "a name", "br-tenant-409600"] {
        of_name(name).iter().for_each(|operation| site.refuses(operation));
    }
    let probe = |number| {
        let (net, port) = (net(7), port(7, 61_000));
        Operation::ProbeNet { others: vec![net.clone(); number], net, port }
    };
    site.admits(&probe(MAX_PROBED));
    site.refuses(&probe(MAX_PROBED + 1));
}

#[test]
fn a_disk_is_limited_as_documents_say_and_not_named_in_the_request() {
    use crate::cgroup::{InstanceGroup, InstanceLimits, VmmCost};
    let site = site();
    let group = || {
        let (tenant, pool) = ("acme".parse().unwrap(), "web".parse().unwrap());
        InstanceGroup { tenant, pool, instance: id() }
    };
    let ensure = |io| {
        let limits = InstanceLimits { io, ..InstanceLimits::new(1, 64, VmmCost { mem_mib: 1, pids: 1 }) };
        Operation::EnsureGroup { group: group(), limits }
    };
    let limit = |limits| Operation::LimitIo { group: group(), limits };
    let writes = |bytes| IoLimits { write_bytes_per_second: Some(bytes), ..IoLimits::default() };
    let reads = |times| IoLimits { read_ops_per_second: Some(times), ..IoLimits::default() };
    for limits in [None, Some(writes(65_536)), Some(reads(10))] {
        site.admits(&ensure(limits));
        site.admits(&limit(limits));
    }
    for limits in [IoLimits::default(), writes(0), writes(65_535), writes(u64::MAX), reads(0), reads(1 << 40)]
    {
        site.refuses(&ensure(Some(limits)));
        site.refuses(&limit(Some(limits)));
    }
}
