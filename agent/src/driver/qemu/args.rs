//! QEMU's command line, from values alone.
//!
//! Machine `microvm` with virtio-mmio devices only and nothing by default. ACPI stays on because Debian's kernel finds
//! its devices there and nowhere else. All names but the image's are relative: the run directory is the working
//! directory, and the path of a unix socket is short.

use std::path::Path;

use mvm_proto::Digest;
use mvm_proto::guest::SERIAL_PORT;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::driver::VmSpec;

pub(super) const QMP_SOCKET: &str = "qmp.sock";
pub(super) const GUEST_SOCKET: &str = "guest.sock";
pub(super) const CONSOLE: &str = "console.log";
pub(super) const DATA_DISK: &str = "data.img";

/// No new privileges, no children, no obsolete calls: what reaches QEMU from a guest can't do much.
pub(super) const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// What the guest's kernel needs on this machine type, and what saves time: each without effect on what a guest can do.
/// `reboot=t` with `-no-reboot` makes a guest that reboots, or panics, end its VMM.
const KERNEL_NEEDS: &str = "console=ttyS0 quiet loglevel=3 reboot=t panic=-1 no_timer_check \
                            random.trust_cpu=on audit=0 apparmor=0 ima=off cryptomgr.notests ipv6.disable=1";

/// What runs the guest's instructions. A snapshot is restored on the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "name")]
pub enum Accelerator {
    Tcg,
    /// With the processor model with which a guest was seen to boot.
    Kvm {
        cpu: String,
    },
}

impl Accelerator {
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Tcg => "tcg",
            Self::Kvm { .. } => "kvm",
        }
    }

    fn cpu(&self) -> &str {
        match self {
            Self::Tcg => "max",
            Self::Kvm { cpu } => cpu,
        }
    }
}

/// How the VMM begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begin {
    Boot,
    /// With nothing in memory, until it is told where to load it from.
    Incoming,
}

/// All that the command line depends on besides the spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Setup {
    pub(super) accelerator: Accelerator,
    /// Absent where the guest can measure it, or where there is none.
    pub(super) tsc_khz: Option<u64>,
    pub(super) sandbox: bool,
    pub(super) begin: Begin,
}

pub(super) fn command_line(spec: &VmSpec, setup: &Setup) -> Vec<String> {
    let mut args = vec!["-name".to_owned(), format!("mvm-{}", spec.instance)];
    let mut push = |items: &[&str]| args.extend(items.iter().map(|item| (*item).to_owned()));
    if setup.sandbox {
        push(&["-sandbox", SANDBOX]);
    }
    push(&["-chardev", &format!("file,id=console,path={CONSOLE},append=on"), "-serial", "chardev:console"]);
    push(&["-qmp", &format!("unix:{QMP_SOCKET},server=on,wait=off")]);
    push(&["-chardev", &format!("socket,id=guest,path={GUEST_SOCKET},server=on,wait=off")]);
    push(&["-kernel", &text(&spec.image.kernel), "-append", &kernel_command_line(spec, setup.tsc_khz)]);
    if let Some(initrd) = &spec.image.initrd {
        push(&["-initrd", &text(initrd)]);
    }
    if let Some(rootfs) = &spec.image.rootfs {
        push(&["-blockdev", &disk("rootfs", rootfs, true)]);
    }
    if spec.resources.data_disk_mib > 0 {
        push(&["-blockdev", &disk("data", Path::new(DATA_DISK), false)]);
    }
    args.extend(hardware(spec, &setup.accelerator));
    if setup.begin == Begin::Incoming {
        args.extend(["-incoming", "defer"].map(str::to_owned));
    }
    args
}

/// What the guest sees of the machine. Saved memory fits only where all of this is the same.
fn hardware(spec: &VmSpec, accelerator: &Accelerator) -> Vec<String> {
    let mut args = Vec::new();
    let mut push = |items: &[&str]| args.extend(items.iter().map(|item| (*item).to_owned()));
    push(&["-M", "microvm,acpi=on", "-accel", accelerator.as_str(), "-cpu", accelerator.cpu()]);
    push(&["-smp", &spec.resources.vcpus.to_string(), "-m", &format!("{}M", spec.resources.mem_mib)]);
    push(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    push(&["-global", "virtio-mmio.force-legacy=false"]);
    // The order decides which disk is the guest's first. A full host disk is the guest's error, not a stopped guest.
    if spec.image.rootfs.is_some() {
        push(&["-device", "virtio-blk-device,drive=rootfs,serial=rootfs"]);
    }
    if spec.resources.data_disk_mib > 0 {
        push(&["-device", "virtio-blk-device,drive=data,serial=data,werror=report,rerror=report"]);
    }
    push(&["-device", "virtio-serial-device,id=serial"]);
    // Without an id QEMU tells no one when the guest opens it.
    push(&["-device", &format!("virtserialport,bus=serial.0,id=guest,chardev=guest,name={SERIAL_PORT}")]);
    push(&["-device", "virtio-rng-device"]);
    args
}

/// Names what the guest sees of the machine.
pub(super) fn hardware_digest(spec: &VmSpec, accelerator: &Accelerator) -> Digest {
    Digest::of(hardware(spec, accelerator).join("\n").as_bytes())
}

fn kernel_command_line(spec: &VmSpec, tsc_khz: Option<u64>) -> String {
    let mut line = KERNEL_NEEDS.to_owned();
    if let Some(khz) = tsc_khz {
        line.push_str(&format!(" tsc_early_khz={khz} tsc=reliable mitigations=off nokaslr"));
    }
    if !spec.image.cmdline.is_empty() {
        line.push(' ');
        line.push_str(&spec.image.cmdline);
    }
    line
}

/// As JSON, in which a path may contain anything.
fn disk(name: &str, path: &Path, read_only: bool) -> String {
    let file = json!({ "driver": "file", "filename": text(path), "read-only": read_only });
    json!({ "driver": "raw", "node-name": name, "read-only": read_only, "file": file }).to_string()
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
