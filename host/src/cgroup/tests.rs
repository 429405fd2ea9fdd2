//! Groups as plain files: what is made, refused and put right. That limits hold is shown inside a microVM.

use std::fs;
use std::path::Path;

use mvm_proto::InstanceId;
use mvm_proto::document::IoLimits;

use super::*;

const COST: VmmCost = VmmCost { mem_mib: 50, pids: 20 };

fn like_a_group(directory: &Path, controllers: &str) {
    fake::group(directory, controllers).unwrap();
}

fn settings(mount: &Path, mode: Mode) -> CgroupSettings {
    CgroupSettings { mode, mount: Some(mount.to_owned()), ..CgroupSettings::default() }
}

fn instance() -> InstanceGroup {
    let (tenant, pool) = ("acme".parse().unwrap(), "web".parse().unwrap());
    InstanceGroup { tenant, pool, instance: InstanceId::from_bits(7) }
}

#[test]
fn limits_are_put_down_once_and_drift_is_put_right_and_told() {
    let mount = tempfile::tempdir().unwrap();
    let group = instance();
    for below in ["", "mvm", "mvm/acme", "mvm/acme/web", "mvm/acme/web/i-00000007"] {
        like_a_group(&mount.path().join(below), "cpu memory pids");
    }
    let cgroups = Cgroups::open(&settings(mount.path(), Mode::Required)).unwrap();
    assert!(cgroups.root().is_some() && cgroups.missing().is_empty());
    let tenant = TenantLimits::new(2, 512, 2, COST);
    assert_eq!(cgroups.ensure_tenant(&group.tenant, &tenant).unwrap().len(), 3);
    let limits = InstanceLimits::new(1, 128, COST);
    assert_eq!(cgroups.ensure_instance(&group, &limits).unwrap().len(), 4);
    assert_eq!(cgroups.ensure_tenant(&group.tenant, &tenant).unwrap(), []);
    assert_eq!(cgroups.ensure_instance(&group, &limits).unwrap(), []);
    let directory = cgroups.directory(&group.clone().into()).unwrap();
    assert_eq!(fs::read_to_string(directory.join("memory.max")).unwrap(), "186646528");
    fs::write(directory.join("pids.max"), "max\n").unwrap();
    let repair = Repair::Set {
        group: group.clone().into(),
        file: "pids.max".to_owned(),
        from: "max".to_owned(),
        to: "21".to_owned(),
    };
    assert_eq!(cgroups.ensure_instance(&group, &limits).unwrap(), [repair]);
    assert!(cgroups.instance_dir_fd(&group).unwrap().is_some());
}

#[test]
fn looking_finds_what_opening_would_refuse_and_changes_nothing() {
    let mount = tempfile::tempdir().unwrap();
    like_a_group(mount.path(), "io rdma");
    let refused = Cgroups::look(&settings(mount.path(), Mode::BestEffort)).unwrap_err();
    assert!(matches!(refused, CgroupError::Unavailable { .. }), "{refused}");
    let mount = tempfile::tempdir().unwrap();
    like_a_group(mount.path(), "cpu memory pids");
    let found = Cgroups::look(&settings(mount.path(), Mode::Required)).unwrap();
    assert!(found.ends_with("has cpu, memory, pids"), "{found}");
    assert!(!mount.path().join("mvm").exists());
}

#[test]
fn a_machine_without_the_controllers_is_refused_or_done_without_and_told() {
    let mount = tempfile::tempdir().unwrap();
    like_a_group(mount.path(), "io rdma");
    let refused = Cgroups::open(&settings(mount.path(), Mode::Required)).unwrap_err();
    assert!(matches!(refused, CgroupError::Unavailable { .. }), "{refused}");
    let cgroups = Cgroups::open(&settings(mount.path(), Mode::BestEffort)).unwrap();
    assert_eq!(cgroups.root(), None);
    assert!(cgroups.missing()[0].contains("cpu, memory, pids"), "{:?}", cgroups.missing());
    // Nothing is made and nothing fails.
    let group = instance();
    assert_eq!(cgroups.ensure_tenant(&group.tenant, &TenantLimits::new(1, 1, 1, COST)).unwrap(), []);
    assert_eq!(cgroups.ensure_instance(&group, &InstanceLimits::new(1, 1, COST)).unwrap(), []);
    assert!(cgroups.instance_dir_fd(&group).unwrap().is_none());
    assert_eq!(cgroups.remove_instance(&group, Duration::ZERO).unwrap(), None);
    assert!(!cgroups.remove_pool(&group.tenant, &group.pool).unwrap());
    assert!(!cgroups.remove_tenant(&group.tenant).unwrap());
    assert_eq!(cgroups.observe().unwrap(), Observed::default());
    cgroups.freeze(&group, Duration::ZERO).unwrap();
    assert!(!mount.path().join("mvm").exists());
}

#[test]
fn with_best_effort_the_limits_that_can_be_held_are() {
    let mount = tempfile::tempdir().unwrap();
    let group = instance();
    for below in ["", "mvm", "mvm/acme", "mvm/acme/web", "mvm/acme/web/i-00000007"] {
        like_a_group(&mount.path().join(below), "cpu pids");
    }
    let cgroups = Cgroups::open(&settings(mount.path(), Mode::BestEffort)).unwrap();
    let mut limits = InstanceLimits::new(1, 128, COST);
    limits.io = Some(writes(1 << 20));
    cgroups.ensure_instance(&group, &limits).unwrap();
    let directory = cgroups.directory(&group.clone().into()).unwrap();
    assert_eq!(fs::read_to_string(directory.join("pids.max")).unwrap(), "21");
    assert_eq!(fs::read_to_string(directory.join("memory.max")).unwrap(), "max\n");
    let missing = cgroups.missing();
    assert_eq!(missing.len(), 2, "{missing:?}");
    assert!(missing.iter().any(|told| told.contains("controllers memory")), "{missing:?}");
    assert!(missing.iter().any(|told| told.contains("controllers io")), "{missing:?}");
    // It is missed for as long as somebody asks for it.
    limits.io = None;
    cgroups.ensure_instance(&group, &limits).unwrap();
    assert_eq!(cgroups.missing().len(), 1, "{:?}", cgroups.missing());
}

/// A machine whose only file system is of this kind, on the first partition of the disk 8:16.
fn machine(root: &Path, kind: &str) -> Machine {
    let (sys, mounts) = (root.join("sys"), root.join("mountinfo"));
    let partition = sys.join("devices/sdb/sdb1");
    fs::create_dir_all(&partition).unwrap();
    fs::create_dir_all(sys.join("dev/block")).unwrap();
    fs::write(sys.join("devices/sdb/dev"), "8:16\n").unwrap();
    fs::write(partition.join("partition"), "1\n").unwrap();
    std::os::unix::fs::symlink(&partition, sys.join("dev/block/8:17")).unwrap();
    fs::write(&mounts, format!("1 0 8:17 / / rw - {kind} /dev/sdb1 rw\n")).unwrap();
    Machine { sys, mounts, ..Machine::default() }
}

fn writes(bytes: u64) -> IoLimits {
    IoLimits { write_bytes_per_second: Some(bytes), ..IoLimits::default() }
}

fn with_io(bytes: u64) -> InstanceLimits {
    InstanceLimits { io: Some(writes(bytes)), ..InstanceLimits::new(1, 128, COST) }
}

/// An instance's group on a machine whose data is on a file system of this kind.
fn groups_on(mount: &Path, kind: &str, mode: Mode) -> Cgroups {
    for below in ["", "mvm", "mvm/acme", "mvm/acme/web", "mvm/acme/web/i-00000007"] {
        like_a_group(&mount.join(below), "cpu memory pids io");
        fs::write(mount.join(below).join("io.max"), "").unwrap();
    }
    let settings = CgroupSettings { machine: machine(mount, kind), ..settings(mount, mode) };
    Cgroups::open(&settings).unwrap().with_disk_of(mount.join("data/vms"))
}

#[test]
fn limits_on_the_disk_are_set_changed_while_it_runs_and_taken_away() {
    let mount = tempfile::tempdir().unwrap();
    let cgroups = groups_on(mount.path(), "ext4", Mode::Required);
    let group = instance();
    let file = cgroups.directory(&group.clone().into()).unwrap().join("io.max");
    let now = || fs::read_to_string(&file).unwrap();
    cgroups.ensure_instance(&group, &with_io(1 << 20)).unwrap();
    assert_eq!(now(), "8:16 rbps=max wbps=1048576 riops=max wiops=max");
    assert_eq!(cgroups.ensure_instance(&group, &with_io(1 << 20)).unwrap(), []);
    let repairs = cgroups.ensure_io(&group, Some(&writes(2 << 20))).unwrap();
    let to = "8:16 rbps=max wbps=2097152 riops=max wiops=max".to_owned();
    let from = "8:16 rbps=max wbps=1048576 riops=max wiops=max".to_owned();
    let set = Repair::Set { group: group.clone().into(), file: "io.max".to_owned(), from, to };
    assert_eq!(repairs, [set]);
    let found = cgroups.usage(&group.clone().into()).unwrap().io;
    assert_eq!(found, IoFound::Limited { disk: Disk { major: 8, minor: 16 }, limits: writes(2 << 20) });
    assert_eq!(cgroups.ensure_io(&group, Some(&writes(2 << 20))).unwrap(), []);
    assert_eq!(cgroups.ensure_io(&group, None).unwrap().len(), 1);
    assert_eq!(now(), "8:16 rbps=max wbps=max riops=max wiops=max");
    assert_eq!(cgroups.usage(&group.into()).unwrap().io, IoFound::Unlimited);
}

#[test]
fn a_disk_that_the_kernel_does_not_limit_is_told_and_not_believed() {
    let mount = tempfile::tempdir().unwrap();
    let cgroups = groups_on(mount.path(), "ext4", Mode::Required);
    let group = instance();
    let file = cgroups.directory(&group.clone().into()).unwrap().join("io.max");
    fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("/dev/null", &file).unwrap();
    let refused = cgroups.ensure_io(&group, Some(&writes(1 << 20))).unwrap_err();
    assert!(matches!(refused, CgroupError::NotTaken { .. }), "{refused}");
}

#[test]
fn data_that_lies_on_no_disk_keeps_limited_instances_from_starting_or_is_told() {
    let mount = tempfile::tempdir().unwrap();
    let cgroups = groups_on(mount.path(), "overlay", Mode::Required);
    let group = instance();
    let refused = cgroups.ensure_instance(&group, &with_io(1 << 20)).unwrap_err();
    assert!(
        matches!(refused, CgroupError::NoDisk { .. }) && refused.to_string().contains("overlay"),
        "{refused}"
    );
    cgroups.ensure_instance(&group, &InstanceLimits::new(1, 128, COST)).unwrap();

    let mount = tempfile::tempdir().unwrap();
    let cgroups = groups_on(mount.path(), "overlay", Mode::BestEffort);
    cgroups.ensure_instance(&group, &with_io(1 << 20)).unwrap();
    assert!(cgroups.missing()[0].contains("its file system is overlay"), "{:?}", cgroups.missing());
    assert_eq!(cgroups.usage(&group.clone().into()).unwrap().io, IoFound::Unheld);
    cgroups.ensure_io(&group, None).unwrap();
    assert_eq!(cgroups.missing(), [""; 0]);
}

#[test]
fn a_group_that_is_gone_has_nothing_to_limit_and_is_not_made() {
    let mount = tempfile::tempdir().unwrap();
    let cgroups = groups_on(mount.path(), "ext4", Mode::Required);
    let gone = InstanceGroup { instance: InstanceId::from_bits(8), ..instance() };
    assert_eq!(cgroups.ensure_io(&gone, Some(&writes(1 << 20))).unwrap(), []);
    assert!(!cgroups.directory(&gone.into()).unwrap().exists());
}

#[test]
fn nothing_starts_without_its_tenants_quota_above_it() {
    let mount = tempfile::tempdir().unwrap();
    for below in ["", "mvm"] {
        like_a_group(&mount.path().join(below), "cpu memory pids");
    }
    let cgroups = Cgroups::open(&settings(mount.path(), Mode::Required)).unwrap();
    let refused = cgroups.ensure_instance(&instance(), &InstanceLimits::new(1, 128, COST)).unwrap_err();
    assert!(matches!(refused, CgroupError::TenantMissing(_)), "{refused}");
}

#[test]
fn what_is_there_is_found_by_its_ids_and_the_rest_is_told() {
    let mount = tempfile::tempdir().unwrap();
    for below in
        ["", "mvm", "mvm/acme", "mvm/acme/web", "mvm/acme/web/i-00000007", "mvm/acme/web/odd", "mvm/No"]
    {
        like_a_group(&mount.path().join(below), "cpu memory pids");
    }
    let cgroups = Cgroups::open(&settings(mount.path(), Mode::Required)).unwrap();
    let observed = cgroups.observe().unwrap();
    let names: Vec<String> = observed.groups.keys().map(ToString::to_string).collect();
    assert_eq!(names, ["acme", "acme/web", "acme/web/i-00000007"]);
    let root = mount.path().join("mvm");
    assert_eq!(observed.orphans, [root.join("No"), root.join("acme/web/odd")]);
}
