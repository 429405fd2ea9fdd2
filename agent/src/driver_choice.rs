//! Which driver this node uses, and why not another: the operator's word, else the strongest that works here.
//!
//! The order is firecracker, then qemu with KVM, then qemu without. The fake driver is taken only by name. [`choose`]
//! is pure; what it is told was found out by whoever calls it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::driver::DriverKind;
use crate::settings::{DriverChoice, VmmSettings};

/// What was found on this machine. An error is the reason why not, in words for a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub firecracker: Result<PathBuf, String>,
    pub qemu: Result<PathBuf, String>,
    /// Whether a guest booted on KVM.
    pub kvm: Result<(), String>,
}

/// The driver taken, and what was not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    pub kind: DriverKind,
    pub passed_over: Vec<PassedOver>,
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
pub fn choose(choice: DriverChoice, found: &Found) -> Chosen {
    let mut passed_over = Vec::new();
    let mut pass = |what, reason: &str| passed_over.push(PassedOver { what, reason: reason.to_owned() });
    let firecracker = found.firecracker.as_ref().map(|_| ()).and(found.kvm.as_ref().map(|()| ()));
    let kind = match choice {
        DriverChoice::Only(DriverKind::Fake) => {
            return Chosen { kind: DriverKind::Fake, passed_over };
        }
        DriverChoice::Only(kind) => kind,
        DriverChoice::Auto if firecracker.is_ok() => DriverKind::Firecracker,
        DriverChoice::Auto => DriverKind::Qemu,
    };
    if kind == DriverKind::Qemu {
        match (&choice, firecracker) {
            (DriverChoice::Only(_), _) => pass("firecracker", "the settings name qemu"),
            (DriverChoice::Auto, Err(reason)) => pass("firecracker", reason),
            (DriverChoice::Auto, Ok(())) => {}
        }
        if let Err(reason) = &found.kvm {
            pass("qemu with kvm", reason);
        }
    }
    Chosen { kind, passed_over }
}

/// The driver for this start. Whether KVM boots is not asked yet: until a probe said so, it is taken not to.
#[must_use]
pub fn kind(choice: DriverChoice, vmm: &VmmSettings) -> DriverKind {
    let path = std::env::var_os("PATH");
    let find = |named: &Option<PathBuf>, name| find_program(named.as_deref(), name, path.as_deref());
    let found = Found {
        firecracker: find(&vmm.firecracker, "firecracker"),
        qemu: find(&vmm.qemu, "qemu-system-x86_64"),
        kvm: Err("KVM was not probed yet".to_owned()),
    };
    choose(choice, &found).kind
}

/// A program named by the operator, else the one of this name in `PATH`.
pub fn find_program(named: Option<&Path>, name: &str, path: Option<&OsStr>) -> Result<PathBuf, String> {
    if let Some(named) = named {
        return if is_program(named) {
            Ok(named.to_owned())
        } else {
            Err(format!("{} is not a program", named.display()))
        };
    }
    let dirs = path.map(std::env::split_paths).into_iter().flatten();
    let found = dirs.map(|dir| dir.join(name)).find(|program| is_program(program));
    found.ok_or_else(|| format!("there is no {name} in PATH"))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
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
        let chosen = choose(choice, found);
        (chosen.kind, chosen.passed_over.into_iter().map(|over| (over.what, over.reason)).collect())
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

    #[test]
    fn the_fake_driver_is_taken_by_name_only_and_a_name_is_never_overruled() {
        let only = |kind| what(DriverChoice::Only(kind), &found(false, false)).0;
        assert_eq!(DriverKind::ALL.map(only), DriverKind::ALL);
    }
}
