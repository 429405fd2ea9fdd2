//! Chooses the driver of this node, with the reasons against the others: the operator's, else the strongest that works.
//!
//! The order is firecracker, then qemu with KVM, then qemu without. The fake driver is taken only by name. [`choose`]
//! and [`passed_over`] are pure; [`decide`], which the agent calls at its start, finds out what they are told.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use crate::DriverKind;
use crate::any_driver::DriverUnavailable;
use crate::firecracker::{self, FirecrackerSettings, FirecrackerUnavailable};
use crate::probe::{self, Probe};
use crate::programs::find_program;
use crate::qemu::Binary;
use crate::settings::{DriverChoice, VmmSettings};

pub const QEMU: &str = "qemu-system-x86_64";
pub const FIRECRACKER: &str = "firecracker";
/// Which driver a node was last run with, below its data directory.
const DRIVER_FILE: &str = "driver";
const VMS_DIR: &str = "vms";

/// What each Firecracker said when it was last run, by the programs that the operator named. Running it takes a moment,
/// or seconds when it hangs; describing a node must not.
static EXAMINED: Mutex<BTreeMap<Named, Result<PathBuf, String>>> = Mutex::new(BTreeMap::new());

/// Firecracker and its jailer, and whether it needs one.
type Named = (Option<PathBuf>, Option<PathBuf>, bool);

/// What was found on this machine. An error is the reason why not, in words for a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub firecracker: Result<PathBuf, String>,
    pub qemu: Result<PathBuf, String>,
    /// Whether a guest booted on KVM.
    pub kvm: Result<(), String>,
}

/// A stronger driver or accelerator that was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassedOver {
    /// `firecracker`, or `qemu with kvm`.
    pub what: &'static str,
    pub reason: String,
}

/// Takes the strongest driver that works, or the one that was asked for.
#[must_use]
pub fn choose(choice: DriverChoice, found: &Found) -> DriverKind {
    match choice {
        DriverChoice::Only(kind) => kind,
        DriverChoice::Auto if found.firecracker.is_ok() && found.kvm.is_ok() => DriverKind::Firecracker,
        DriverChoice::Auto => DriverKind::Qemu,
    }
}

/// What is stronger than the driver taken, and why it was not. The fake driver is only ever taken on purpose.
#[must_use]
pub fn passed_over(kind: DriverKind, choice: DriverChoice, found: &Found) -> Vec<PassedOver> {
    if kind != DriverKind::Qemu {
        return Vec::new();
    }
    let reason = match (choice, &found.firecracker, &found.kvm) {
        (DriverChoice::Only(_), ..) => "the settings name qemu",
        (_, Err(reason), _) | (_, Ok(_), Err(reason)) => reason,
        (_, Ok(_), Ok(())) => "this node stays with qemu while it has instances of it",
    };
    let mut passed = vec![PassedOver { what: "firecracker", reason: reason.to_owned() }];
    if let Err(reason) = &found.kvm {
        passed.push(PassedOver { what: "qemu with kvm", reason: reason.clone() });
    }
    passed
}

/// What guests of this driver run on: `kvm`, `tcg`, `none`, or nothing while that is being found out.
#[must_use]
pub fn accelerator(kind: DriverKind, vmm: &VmmSettings, data_dir: &Path) -> &'static str {
    match kind {
        DriverKind::Fake => "none",
        DriverKind::Firecracker => "kvm",
        DriverKind::Qemu => qemu_program(vmm)
            .ok()
            .and_then(|program| probe::recorded(data_dir, &program))
            .map_or("", |verdict| verdict.accelerator().as_str()),
    }
}

/// What is on this machine, as far as it is known without booting anything.
#[must_use]
pub fn find(vmm: &VmmSettings, data_dir: &Path) -> Found {
    let qemu = qemu_program(vmm);
    let kvm = match &qemu {
        Ok(qemu) => probe::recorded(data_dir, qemu)
            .map_or_else(|| Err("whether KVM works is still being found out".to_owned()), |v| v.as_result()),
        // Only QEMU's own probe boots; without QEMU the device must do.
        Err(_) => probe::open_device(),
    };
    let examined = EXAMINED.lock().get(&named(vmm)).cloned();
    let firecracker = examined.unwrap_or_else(|| {
        find_program(vmm.firecracker.as_deref(), FIRECRACKER, std::env::var_os("PATH").as_deref())
    });
    Found { firecracker, qemu, kvm }
}

fn named(vmm: &VmmSettings) -> Named {
    (vmm.firecracker.clone(), vmm.jailer.clone(), vmm.jailed)
}

/// Whether there is a Firecracker that can be used: it is run, which blocks until it says which it is.
fn examine_firecracker(vmm: &VmmSettings) -> Result<PathBuf, String> {
    let settings = FirecrackerSettings::with_programs(vmm);
    let found = firecracker::settings::find(&settings, std::env::var_os("PATH").as_deref());
    let answer = found.map(|(program, _)| program).map_err(|error| match error {
        FirecrackerUnavailable::Missing { what } => what,
        unusable => unusable.to_string(),
    });
    EXAMINED.lock().insert(named(vmm), answer.clone());
    answer
}

/// The QEMU of these settings.
pub fn qemu_program(vmm: &VmmSettings) -> Result<PathBuf, String> {
    find_program(vmm.qemu.as_deref(), QEMU, std::env::var_os("PATH").as_deref())
}

/// The driver for this start. Waits for KVM to be probed only where the choice hangs on it, which it does once for each
/// boot of the machine at most. A node whose VMs were made by one driver stays with it while there are any.
pub async fn decide(choice: DriverChoice, vmm: &VmmSettings, data_dir: &Path) -> DriverKind {
    let mut found = find(vmm, data_dir);
    if choice == DriverChoice::Auto {
        let asked = vmm.clone();
        let examined = tokio::task::spawn_blocking(move || examine_firecracker(&asked)).await;
        found.firecracker = examined.unwrap_or_else(|cause| Err(cause.to_string()));
        if let Some(kind) = used_before(data_dir).filter(|_| has_vms(data_dir)) {
            return kind;
        }
        if let (Ok(_), Ok(qemu)) = (&found.firecracker, &found.qemu) {
            found.kvm = Probe::start(data_dir, qemu).settled().await.as_result();
        }
    }
    choose(choice, &found)
}

/// Refuses a driver whose program can't run here, which would else show at the first boot. Firecracker is examined when its
/// driver is opened.
pub async fn check(kind: DriverKind, vmm: &VmmSettings) -> Result<(), DriverUnavailable> {
    if kind != DriverKind::Qemu {
        return Ok(());
    }
    let program = qemu_program(vmm).map_err(DriverUnavailable::NoQemu)?;
    Ok(Binary::check(&program).await?)
}

/// The driver to look at a stopped node with: the one it was last run with.
#[must_use]
pub fn look_with(choice: DriverChoice, vmm: &VmmSettings, data_dir: &Path) -> DriverKind {
    match choice {
        DriverChoice::Only(kind) => kind,
        DriverChoice::Auto => recorded(data_dir).unwrap_or_else(|| {
            let firecracker = examine_firecracker(vmm);
            choose(choice, &Found { firecracker, ..find(vmm, data_dir) })
        }),
    }
}

/// Remembers which driver the VMs below `data_dir` are made by.
pub fn remember(kind: DriverKind, data_dir: &Path) -> std::io::Result<()> {
    if recorded(data_dir) == Some(kind) {
        return Ok(());
    }
    mvm_pki::files::write_private(data_dir.join(DRIVER_FILE), kind.as_str().as_bytes())
}

fn recorded(data_dir: &Path) -> Option<DriverKind> {
    std::fs::read_to_string(data_dir.join(DRIVER_FILE)).ok()?.trim().parse().ok()
}

/// The fake driver is never taken because it was taken before.
fn used_before(data_dir: &Path) -> Option<DriverKind> {
    recorded(data_dir).filter(|kind| kind.uses_host_resources())
}

fn has_vms(data_dir: &Path) -> bool {
    std::fs::read_dir(data_dir.join(VMS_DIR)).is_ok_and(|mut entries| entries.next().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(firecracker: bool, kvm: bool) -> Found {
        let path = |there| if there { Ok("/usr/bin/vmm".into()) } else { Err("not in PATH".to_owned()) };
        let kvm = if kvm { Ok(()) } else { Err("no guest booted within 5 s".to_owned()) };
        Found { firecracker: path(firecracker), qemu: path(true), kvm }
    }

    fn what(choice: DriverChoice, found: &Found) -> (DriverKind, Vec<(&'static str, String)>) {
        let kind = choose(choice, found);
        let over = passed_over(kind, choice, found).into_iter().map(|over| (over.what, over.reason));
        (kind, over.collect())
    }

    #[test]
    fn the_strongest_driver_that_works_is_taken_and_the_others_have_reasons() {
        let no_binary = || ("firecracker", "not in PATH".to_owned());
        let no_kvm = |what| (what, "no guest booted within 5 s".to_owned());
        let auto = DriverChoice::Auto;
        assert_eq!(what(auto, &found(true, true)), (DriverKind::Firecracker, vec![]));
        assert_eq!(what(auto, &found(false, true)), (DriverKind::Qemu, vec![no_binary()]));
        let slow = vec![no_kvm("firecracker"), no_kvm("qemu with kvm")];
        assert_eq!(what(auto, &found(true, false)), (DriverKind::Qemu, slow));
        let slow = vec![no_binary(), no_kvm("qemu with kvm")];
        assert_eq!(what(auto, &found(false, false)), (DriverKind::Qemu, slow));
    }

    #[tokio::test]
    async fn a_node_stays_with_the_driver_of_its_vms_but_never_with_the_fake_one() {
        let dir = tempfile::tempdir().unwrap();
        let vmm = VmmSettings::default();
        std::fs::create_dir_all(dir.path().join("vms/i-00000001")).unwrap();
        remember(DriverKind::Firecracker, dir.path()).unwrap();
        assert_eq!(decide(DriverChoice::Auto, &vmm, dir.path()).await, DriverKind::Firecracker);
        remember(DriverKind::Fake, dir.path()).unwrap();
        assert_eq!(look_with(DriverChoice::Auto, &vmm, dir.path()), DriverKind::Fake);
        assert_ne!(decide(DriverChoice::Auto, &vmm, dir.path()).await, DriverKind::Fake);
    }

    #[tokio::test]
    async fn a_firecracker_that_is_too_old_or_broken_is_passed_over_with_the_reason_and_run_once() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        for (line, reason) in [("echo Firecracker v1.4.0", "1.4.0"), ("exit 1", "did not say")] {
            let (program, ran) = (dir.path().join("firecracker"), dir.path().join("ran"));
            std::fs::write(&program, format!("#!/bin/sh\necho >> {}\n{line}\n", ran.display())).unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
            let vmm = VmmSettings { firecracker: Some(program), ..VmmSettings::default() };
            assert_eq!(decide(DriverChoice::Auto, &vmm, dir.path()).await, DriverKind::Qemu);
            for _ in 0..2 {
                let over = passed_over(DriverKind::Qemu, DriverChoice::Auto, &find(&vmm, dir.path()));
                assert!(over[0].reason.contains(reason), "{over:?}");
            }
            assert_eq!(std::fs::read(&ran).unwrap(), b"\n");
            std::fs::remove_file(ran).unwrap();
        }
    }

    #[tokio::test]
    async fn a_firecracker_that_must_be_jailed_and_has_no_jailer_is_passed_over_with_the_reason() {
        use std::os::unix::fs::PermissionsExt as _;
        if !mvm_needs::can_run(&[mvm_needs::Need::NoProgram("jailer")]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("firecracker");
        std::fs::write(&program, "#!/bin/sh\necho Firecracker v1.13.0\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let vmm = VmmSettings { firecracker: Some(program), jailed: true, ..VmmSettings::default() };
        assert_eq!(decide(DriverChoice::Auto, &vmm, dir.path()).await, DriverKind::Qemu);
        let over = passed_over(DriverKind::Qemu, DriverChoice::Auto, &find(&vmm, dir.path()));
        assert!(over[0].reason.contains("jailer"), "{over:?}");
    }

    #[tokio::test]
    async fn a_qemu_that_is_missing_or_none_is_refused_before_anything_boots() {
        let named = |qemu: &str| VmmSettings { qemu: Some(qemu.into()), ..VmmSettings::default() };
        for (qemu, why) in
            [("/no/qemu", "/no/qemu is not a program"), ("/bin/true", "does not say that it is QEMU")]
        {
            let refused = check(DriverKind::Qemu, &named(qemu)).await.unwrap_err();
            assert!(refused.to_string().contains("QEMU") && refused.to_string().contains(why), "{refused}");
            check(DriverKind::Fake, &named(qemu)).await.unwrap();
        }
        if mvm_needs::can_run(&[mvm_needs::Need::Program(QEMU)]) {
            check(DriverKind::Qemu, &VmmSettings::default()).await.unwrap();
        }
    }

    #[test]
    fn the_fake_driver_is_taken_by_name_only_and_a_name_is_never_overruled() {
        let only = |kind| what(DriverChoice::Only(kind), &found(false, false)).0;
        assert_eq!(DriverKind::ALL.map(only), DriverKind::ALL);
    }
}
