//! A folder with everything a driver needs; whatever still runs in it ends with it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_image::BootImage;
use mvm_proto::document::Resources;
use mvm_proto::{Digest, InstanceId};
use mvm_vmm::VmSpec;
use mvm_vmm::conformance::Subject;
use mvm_vmm::firecracker::{FirecrackerDriver, FirecrackerSettings, Limits};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

pub(crate) const STAND_IN: &str = env!("CARGO_BIN_EXE_firecracker-stand-in");
pub(crate) const JAILER: &str = env!("CARGO_BIN_EXE_jailer-stand-in");

pub(crate) struct Site {
    dir: tempfile::TempDir,
}

impl Site {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("kernel"), b"\x7fELF and so on").unwrap();
        fs::write(dir.path().join("rootfs"), b"a root").unwrap();
        Self { dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The stand-in with this environment: a driver starts its VMMs with none of its own.
    pub(crate) fn stand_in(&self, name: &str, environment: &[(&str, &str)]) -> PathBuf {
        let said: String = environment.iter().map(|(name, value)| format!("{name}='{value}' ")).collect();
        self.script(name, &format!("{said}exec '{STAND_IN}' \"$@\""))
    }

    pub(crate) fn script(&self, name: &str, line: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, format!("#!/bin/sh\n{line}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    pub(crate) fn settings(&self, environment: &[(&str, &str)]) -> FirecrackerSettings {
        let program = Some(self.stand_in("firecracker", environment));
        FirecrackerSettings { program, ..FirecrackerSettings::default() }
    }

    pub(crate) fn open(&self, settings: FirecrackerSettings) -> FirecrackerDriver {
        FirecrackerDriver::open(&self.path("data"), settings).unwrap()
    }

    pub(crate) fn driver(&self, environment: &[(&str, &str)]) -> FirecrackerDriver {
        self.open(self.settings(environment))
    }

    /// A driver that is quick to give up. What it is to give up was booted by one that is not.
    pub(crate) fn hasty(&self, environment: &[(&str, &str)]) -> FirecrackerDriver {
        let short = Duration::from_secs(2);
        let limits = Limits { socket: short, call: short, vsock: short, ..Limits::default() };
        self.open(FirecrackerSettings { limits, ..self.settings(environment) })
    }

    /// Small, so that hashing a snapshot is not what the test measures.
    pub(crate) fn subject(&self) -> Subject {
        let image = BootImage {
            digest: Digest::of(b"image"),
            kernel: self.path("kernel"),
            initrd: None,
            rootfs: Some(self.path("rootfs")),
            cmdline: "quiet".to_owned(),
        };
        Subject { image, resources: Resources { vcpus: 1, mem_mib: 4, data_disk_mib: 0 } }
    }

    pub(crate) fn spec(&self, number: u32) -> VmSpec {
        let Subject { image, resources } = self.subject();
        VmSpec {
            instance: InstanceId::from_bits(number),
            revision: Digest::of(b"revision"),
            resources,
            image,
            bounds: mvm_vmm::Bounds::default(),
            purpose: mvm_vmm::Purpose::default(),
        }
    }

    pub(crate) fn run_dir(&self, spec: &VmSpec) -> PathBuf {
        self.path("data").join("vms").join(spec.instance.as_str())
    }

    /// The VMM of an instance: the process that names it and works here.
    pub(crate) fn vmm(&self, spec: &VmSpec) -> Option<u32> {
        let names = |pid: &u32| {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            words.split(|byte| *byte == 0).any(|word| word == spec.instance.as_str().as_bytes())
        };
        self.processes().into_iter().find(names)
    }

    pub(crate) fn signal(&self, spec: &VmSpec, signal: Signal) {
        let pid = self.vmm(spec).expect("the VMM runs");
        kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
    }

    /// The guest of a VMM that was killed takes a moment to follow it.
    pub(crate) fn comes_to_rest(&self) {
        mvm_tests::wait_until("everything to end", mvm_tests::PATIENCE, || self.processes().is_empty());
    }

    /// Everything that works in this folder, or has its root in it.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let within = |pid: &u32| {
            let lies = |link: &str| {
                fs::read_link(format!("/proc/{pid}/{link}"))
                    .is_ok_and(|path| path.starts_with(self.dir.path()))
            };
            lies("cwd") || lies("root")
        };
        let pids = fs::read_dir("/proc").unwrap().flatten();
        pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(within).collect()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for pid in self.processes() {
            let _ = kill(Pid::from_raw(i32::try_from(pid).unwrap_or(i32::MAX)), Signal::SIGKILL);
        }
    }
}

/// Names in a folder, sorted.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).map(|entries| entries.flatten().collect()).unwrap_or_else(|_| Vec::new());
    let mut names: Vec<_> =
        entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
