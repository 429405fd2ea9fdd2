//! Groups as plain files: what is made, refused and put right. That limits hold is shown inside a microVM.

use std::fs;
use std::path::Path;

use mvm_proto::InstanceId;

use super::*;

const COST: VmmCost = VmmCost { mem_mib: 50, pids: 20 };

/// A directory with the files that a kernel gives a group, as far as they are used here.
fn like_a_group(directory: &Path, controllers: &str) {
    fs::create_dir_all(directory).unwrap();
    for (file, text) in [
        ("cgroup.controllers", controllers),
        ("cgroup.subtree_control", controllers),
        ("memory.max", "max\n"),
        ("memory.oom.group", "0\n"),
        ("cpu.max", "max 100000\n"),
        ("cpu.weight", "100\n"),
        ("pids.max", "max\n"),
    ] {
        fs::write(directory.join(file), text).unwrap();
    }
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
        like_a_group(&mount.path().join(below), "cpu memory pids\n");
    }
    let cgroups = Cgroups::open(&settings(mount.path(), Mode::Required)).unwrap();
    assert!(cgroups.is_enforcing() && cgroups.missing().is_empty());
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
fn a_machine_without_the_controllers_is_refused_or_done_without_and_told() {
    let mount = tempfile::tempdir().unwrap();
    like_a_group(mount.path(), "io rdma\n");
    let refused = Cgroups::open(&settings(mount.path(), Mode::Required)).unwrap_err();
    assert!(refused.is_lack_of_support(), "{refused}");
    let cgroups = Cgroups::open(&settings(mount.path(), Mode::BestEffort)).unwrap();
    assert!(!cgroups.is_enforcing());
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
        like_a_group(&mount.path().join(below), "cpu pids\n");
    }
    let cgroups = Cgroups::open(&settings(mount.path(), Mode::BestEffort)).unwrap();
    let mut limits = InstanceLimits::new(1, 128, COST);
    limits.io = Some(IoLimits {
        major: 8,
        minor: 0,
        read_bytes_per_s: Some(1),
        write_bytes_per_s: None,
        reads_per_s: None,
        writes_per_s: None,
    });
    cgroups.ensure_instance(&group, &limits).unwrap();
    let directory = cgroups.directory(&group.into()).unwrap();
    assert_eq!(fs::read_to_string(directory.join("pids.max")).unwrap(), "21");
    assert_eq!(fs::read_to_string(directory.join("memory.max")).unwrap(), "max\n");
    let missing = cgroups.missing();
    assert_eq!(missing.len(), 2, "{missing:?}");
    assert!(missing.iter().any(|told| told.contains("controllers memory")), "{missing:?}");
    assert!(missing.iter().any(|told| told.contains("controllers io")), "{missing:?}");
}

#[test]
fn nothing_starts_without_its_tenants_quota_above_it() {
    let mount = tempfile::tempdir().unwrap();
    for below in ["", "mvm"] {
        like_a_group(&mount.path().join(below), "cpu memory pids\n");
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
        like_a_group(&mount.path().join(below), "cpu memory pids\n");
    }
    let cgroups = Cgroups::open(&settings(mount.path(), Mode::Required)).unwrap();
    let observed = cgroups.observe().unwrap();
    let names: Vec<String> = observed.groups.keys().map(ToString::to_string).collect();
    assert_eq!(names, ["acme", "acme/web", "acme/web/i-00000007"]);
    let root = mount.path().join("mvm");
    assert_eq!(observed.strangers, [root.join("No"), root.join("acme/web/odd")]);
}
