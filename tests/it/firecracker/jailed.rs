//! Behind a jailer: the same suite, in a root of its own where this is allowed.

use std::path::{Path, PathBuf};

use mvm_tests::stand_in::jailer::CGROUP2;
use mvm_vmm::firecracker::{FirecrackerDriver, FirecrackerSettings, FirecrackerUnavailable, JailerSettings};
use mvm_vmm::{Driver, SnapshotOptions, VmState, conformance};

use crate::firecracker::site::{JAILER, STAND_IN, Site, names};

/// The jailer copies the program into the jail, so that it can't be a script.
pub(crate) fn settings(jailer: JailerSettings) -> FirecrackerSettings {
    FirecrackerSettings {
        program: Some(PathBuf::from(STAND_IN)),
        jailer: Some(jailer),
        ..FirecrackerSettings::default()
    }
}

pub(crate) fn jailer() -> JailerSettings {
    let own = || (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let (uid, gid) = if nix::unistd::geteuid().is_root() { (61_000, 61_000) } else { own() };
    JailerSettings::new(JAILER.into(), uid, gid)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_driver_passes_the_suite_behind_a_jailer() {
    let site = Site::new();
    let driver = site.open(settings(jailer()));
    conformance::suite(&driver, &site.subject()).await.unwrap();
    site.comes_to_rest();
    assert_eq!(names(&site.path("data/vms")), Vec::<String>::new(), "no jail is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn jailed_vms_outlive_their_driver() {
    let site = Site::new();
    conformance::outlives_its_owner(async || site.open(settings(jailer())), &site.subject()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_jailer_that_forks_leaves_a_vmm_that_is_found_by_its_pid_file() {
    let site = Site::new();
    let base = site.path("jails");
    let forking = JailerSettings { new_pid_ns: true, chroot_base: Some(base.clone()), ..jailer() };
    let driver = site.open(settings(forking.clone()));
    let spec = site.spec(1);
    driver.boot(&spec).await.unwrap();
    let root = base.join("firecracker-stand-in").join(spec.instance.as_str()).join("root");
    let pid = std::fs::read_to_string(root.join("firecracker-stand-in.pid")).unwrap();
    assert_eq!(site.vmm(&spec), pid.parse().ok());
    let second = site.open(settings(forking));
    assert_eq!(second.adopt(&spec.instance).await.unwrap().unwrap().state, VmState::Running);
    second.remove(&spec.instance).await.unwrap();
    assert!(!root.exists());
    site.comes_to_rest();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_snapshot_stays_in_a_jail() {
    let site = Site::new();
    let driver = site.open(settings(jailer()));
    let spec = site.spec(1);
    driver.boot(&spec).await.unwrap();
    let root = site.run_dir(&spec).join("jail");
    let kept = || names(&root).into_iter().filter(|name| name.starts_with("snapshot")).collect::<Vec<_>>();
    driver.pause(&spec.instance).await.unwrap();
    assert_eq!(kept(), Vec::<String>::new(), "the one that is thrown away");
    driver.snapshot(&spec.instance, &SnapshotOptions::plain()).await.unwrap();
    assert_eq!(kept(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_jail_is_named_after_the_program_that_a_link_leads_to_and_found_under_another_one() {
    let site = Site::new();
    let linked = |name: &str, target: &Path| {
        let link = site.path(name);
        std::os::unix::fs::symlink(target, &link).unwrap();
        FirecrackerSettings { program: Some(link), ..settings(jailer()) }
    };
    let driver = site.open(linked("vmm", Path::new(STAND_IN)));
    let spec = site.spec(1);
    driver.boot(&spec).await.unwrap();
    let own = site.run_dir(&spec).join("firecracker-stand-in");
    assert!(own.join(spec.instance.as_str()).join("root/api.sock").exists());
    // The next version under the same link: what runs is still reached, and its jail is what goes.
    let next = site.path("firecracker-next");
    std::fs::copy(STAND_IN, &next).unwrap();
    let upgraded = site.open(linked("newer", &next));
    assert_eq!(upgraded.adopt(&spec.instance).await.unwrap().unwrap().state, VmState::Running);
    upgraded.kill(&spec.instance).await.unwrap();
    assert!(!own.join(spec.instance.as_str()).exists());
    upgraded.boot(&spec).await.unwrap();
    assert!(site.run_dir(&spec).join("firecracker-next").exists());
}

#[test]
fn a_program_that_no_jailer_would_start_is_refused_at_the_start() {
    let site = Site::new();
    let other = site.path("vmm");
    std::fs::copy(STAND_IN, &other).unwrap();
    std::os::unix::fs::symlink(&other, site.path("firecracker")).unwrap();
    let named = FirecrackerSettings { program: Some(site.path("firecracker")), ..settings(jailer()) };
    let refused = FirecrackerDriver::open(&site.path("data"), named).unwrap_err();
    assert!(matches!(refused, FirecrackerUnavailable::BadName { .. }), "{refused}");
    assert!(refused.to_string().contains("rename it"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_jailer_that_fails_says_why_and_leaves_no_jail() {
    let site = Site::new();
    let failing = site.script("jailer", "echo 'Jailer error: no such user'; exit 1");
    let driver = site.open(settings(JailerSettings { program: failing, ..jailer() }));
    let spec = site.spec(1);
    let error = driver.boot(&spec).await.unwrap_err();
    assert!(error.to_string().contains("exited with code 1"), "{error}");
    assert!(!site.run_dir(&spec).join("jail").exists());
    site.comes_to_rest();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_jailer_stays_in_the_group_that_it_was_started_in_with_and_without_cgroup_v2() {
    let site = Site::new();
    // A group as the jailer would move itself into, and a machine where nothing is mounted.
    let mount = site.path("cgroup2");
    let group = mount.join("firecracker-stand-in");
    std::fs::create_dir_all(&group).unwrap();
    for (number, mounted) in [(1, mount.to_str().unwrap()), (2, "")] {
        let line = format!("{CGROUP2}='{mounted}' exec '{JAILER}' \"$@\"");
        let program = site.script(&format!("jailer-{number}"), &line);
        let driver = site.open(settings(JailerSettings { program, ..jailer() }));
        let spec = site.spec(number);
        driver.boot(&spec).await.unwrap();
        assert_eq!(names(&group), Vec::<String>::new(), "it moved itself");
        driver.remove(&spec.instance).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_is_not_in_its_control_group_is_ended() {
    let site = Site::new();
    let host = || conformance::FaultyHost::new(&site.path("data"));
    for settings in [site.settings(&[]), settings(jailer())] {
        let driver = FirecrackerDriver::with_host(host(), settings).unwrap();
        conformance::a_vmm_outside_its_group_is_ended(&driver, &site.subject()).await.unwrap();
        site.comes_to_rest();
    }
}
