//! QEMU's command line, from values alone.
//!
//! Machine `microvm` with virtio-mmio devices only and nothing by default. ACPI stays on because Debian's kernel finds
//! its devices there and nowhere else. All names but the image's are relative: the run directory is the working
//! directory, and the path of a unix socket is short.

use std::path::Path;

use mvm_host::TAP_FD;
use mvm_proto::Digest;
use mvm_proto::guest::SERIAL_PORT;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::VmSpec;

pub(super) const QMP_SOCKET: &str = "qmp.sock";
pub(super) const GUEST_SOCKET: &str = "guest.sock";
pub(super) const CONSOLE: &str = "console.log";
pub(super) const DATA_DISK: &str = "data.img";
/// The memory of a template while it runs.
pub(super) const TEMPLATE_MEMORY: &str = "memory";
/// A template's memory by the name that it has for its fork.
pub(super) const BASE_MEMORY: &str = "base";

/// No new privileges, no children, no obsolete calls: what reaches QEMU from a guest can't do much.
pub(super) const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// What the guest's kernel needs on this machine type. `reboot=t` with `-no-reboot` makes a guest that reboots, or
/// panics, end its VMM. What an image adds comes after it and wins.
const KERNEL_NEEDS: &str = "console=ttyS0 reboot=t panic=-1 no_timer_check";

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

    /// With a bound on what emulation keeps of translated code: left alone it grows to a gibibyte.
    fn option(&self) -> &'static str {
        match self {
            Self::Tcg => "tcg,tb-size=64",
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

/// Where the guest's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// Nowhere but in memory.
    Anonymous,
    /// In a file that others will fork from: what the guest writes is in it.
    Template,
    /// A template's, until the guest writes to it: what it writes is its own.
    Fork,
}

/// All that the command line depends on besides the spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Setup {
    pub(super) accelerator: Accelerator,
    /// Absent where the guest can measure it, or where there is none.
    pub(super) tsc_khz: Option<u64>,
    pub(super) sandbox: bool,
    pub(super) begin: Begin,
    pub(super) memory: Memory,
    /// The guest can be asked to give memory back.
    pub(super) balloon: bool,
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
        push(&["-blockdev", &disk("rootfs", rootfs, true, false)]);
    }
    if spec.resources.data_disk_mib > 0 {
        push(&["-blockdev", &disk("data", Path::new(DATA_DISK), false, spec.bounds.direct_disk)]);
    }
    if spec.bounds.nic.is_some() {
        // Opened by the process that starts the VMM: the VMM needs no right to open it, and can open no other.
        push(&["-netdev", &format!("tap,id=net,fd={TAP_FD}")]);
    }
    push(&["-object", &memory(spec, setup.memory)]);
    let mac = spec.bounds.nic.as_ref().map_or("", |nic| &nic.mac);
    args.extend(hardware(spec, &setup.accelerator, setup.balloon, mac));
    if setup.begin == Begin::Incoming {
        args.extend(["-incoming", "defer"].map(str::to_owned));
    }
    args
}

/// The guest's memory, under one name whatever it is: saved memory is found again by its name.
fn memory(spec: &VmSpec, memory: Memory) -> String {
    // A host that merges equal pages would let tenants learn of each other's; a dump would put them on its disk.
    let size = format!("id=memory,size={}M,merge=off,dump=off", spec.resources.mem_mib);
    match memory {
        Memory::Anonymous => format!("memory-backend-ram,{size}"),
        Memory::Template => format!("memory-backend-file,{size},mem-path={TEMPLATE_MEMORY},share=on"),
        Memory::Fork => format!("memory-backend-file,{size},mem-path={BASE_MEMORY},share=off"),
    }
}

/// What the guest sees of the machine. Saved memory fits only where all of this is the same.
fn hardware(spec: &VmSpec, accelerator: &Accelerator, balloon: bool, mac: &str) -> Vec<String> {
    let mut args = Vec::new();
    let mut push = |items: &[&str]| args.extend(items.iter().map(|item| (*item).to_owned()));
    push(&[
        "-M",
        "microvm,acpi=on,memory-backend=memory",
        "-accel",
        accelerator.option(),
        "-cpu",
        accelerator.cpu(),
    ]);
    push(&["-smp", &spec.resources.vcpus.to_string(), "-m", &format!("{}M", spec.resources.mem_mib)]);
    push(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    push(&["-global", "virtio-mmio.force-legacy=false"]);
    // The order decides which disk is the guest's first. A full host disk is the guest's error, not a stopped guest.
    if spec.image.rootfs.is_some() {
        push(&["-device", "virtio-blk-device,drive=rootfs,serial=rootfs"]);
    }
    if spec.resources.data_disk_mib > 0 {
        // Beside a balloon nothing makes holes in files, whatever it is told: see the filter on system calls.
        let whole = if balloon { ",discard=off,write-zeroes=off" } else { "" };
        let disk = format!("virtio-blk-device,drive=data,serial=data,werror=report,rerror=report{whole}");
        push(&["-device", &disk]);
    }
    if spec.bounds.nic.is_some() {
        push(&["-device", &format!("virtio-net-device,netdev=net,mac={mac}")]);
    }
    push(&["-device", "virtio-serial-device,id=serial"]);
    // Without an id QEMU sends no event when the guest opens it.
    push(&["-device", &format!("virtserialport,bus=serial.0,id=guest,chardev=guest,name={SERIAL_PORT}")]);
    push(&["-device", "virtio-rng-device"]);
    if balloon {
        // What the guest gave back and needs after all it takes, before it ends a program.
        push(&["-device", "virtio-balloon-device,id=balloon,deflate-on-oom=on"]);
    }
    args
}

/// Names what the guest sees of the machine, but for the card's address, which each fork is told anew.
pub(super) fn hardware_digest(spec: &VmSpec, accelerator: &Accelerator, balloon: bool) -> Digest {
    Digest::of(hardware(spec, accelerator, balloon, "").join("\n").as_bytes())
}

fn kernel_command_line(spec: &VmSpec, tsc_khz: Option<u64>) -> String {
    let mut line = KERNEL_NEEDS.to_owned();
    if let Some(khz) = tsc_khz {
        // An emulated processor does not speculate: what would keep speculation in check only costs time.
        line.push_str(&format!(" tsc_early_khz={khz} tsc=reliable mitigations=off"));
    }
    if !spec.image.cmdline.is_empty() {
        line.push(' ');
        line.push_str(&spec.image.cmdline);
    }
    line
}

/// As JSON, in which a path may contain anything. `direct`: past the host's page cache.
fn disk(name: &str, path: &Path, read_only: bool, direct: bool) -> String {
    let mut file = json!({ "driver": "file", "filename": text(path), "read-only": read_only });
    let mut disk = json!({ "driver": "raw", "node-name": name, "read-only": read_only });
    if direct {
        file["cache"] = json!({ "direct": true });
        disk["cache"] = json!({ "direct": true });
    }
    disk["file"] = file;
    disk.to_string()
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use mvm_proto::InstanceId;
    use mvm_proto::document::Resources;

    use super::*;
    use crate::{Bounds, Nic, Purpose};
    use mvm_image::BootImage;

    fn spec(rootfs: Option<&str>, data_disk_mib: u64) -> VmSpec {
        VmSpec {
            instance: InstanceId::from_bits(0x2a),
            revision: Digest::of(b"args"),
            resources: Resources { vcpus: 2, mem_mib: 128, data_disk_mib },
            image: BootImage {
                digest: Digest::of(b"image"),
                kernel: "/images/kernel".into(),
                initrd: Some("/images/initrd".into()),
                rootfs: rootfs.map(Into::into),
                cmdline: "quiet root=/dev/vda".to_owned(),
            },
            bounds: Bounds::default(),
            purpose: Purpose::default(),
        }
    }

    fn setup(accelerator: Accelerator, begin: Begin) -> Setup {
        let tsc_khz = (accelerator == Accelerator::Tcg).then_some(2_400_000);
        Setup { accelerator, tsc_khz, sandbox: true, begin, memory: Memory::Anonymous, balloon: false }
    }

    #[test]
    fn the_command_line_is_this_one() {
        let line = command_line(&spec(None, 0), &setup(Accelerator::Tcg, Begin::Boot)).join(" ");
        assert_eq!(
            line,
            "-name mvm-i-0000002a \
             -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny \
             -chardev file,id=console,path=console.log,append=on -serial chardev:console \
             -qmp unix:qmp.sock,server=on,wait=off \
             -chardev socket,id=guest,path=guest.sock,server=on,wait=off \
             -kernel /images/kernel -append console=ttyS0 reboot=t panic=-1 no_timer_check \
             tsc_early_khz=2400000 tsc=reliable mitigations=off quiet root=/dev/vda \
             -initrd /images/initrd \
             -object memory-backend-ram,id=memory,size=128M,merge=off,dump=off \
             -M microvm,acpi=on,memory-backend=memory -accel tcg,tb-size=64 -cpu max -smp 2 -m 128M \
             -nodefaults -no-user-config -display none -no-reboot \
             -global virtio-mmio.force-legacy=false \
             -device virtio-serial-device,id=serial \
             -device virtserialport,bus=serial.0,id=guest,chardev=guest,name=mvm.guest \
             -device virtio-rng-device"
        );
    }

    #[test]
    fn a_disk_whose_use_is_limited_goes_past_the_page_cache_and_is_the_same_to_the_guest() {
        let (plain, mut limited) = (spec(Some("/images/rootfs"), 16), spec(Some("/images/rootfs"), 16));
        limited.bounds.direct_disk = true;
        let disks = |spec: &VmSpec| -> Vec<String> {
            let args = command_line(spec, &setup(Accelerator::Tcg, Begin::Boot));
            args.into_iter().filter(|arg| arg.starts_with("{")).collect()
        };
        let (before, after) = (disks(&plain), disks(&limited));
        assert_eq!(before[0], after[0]);
        assert!(!before[1].contains("cache"), "{before:?}");
        assert_eq!(after[1].matches(r#""cache":{"direct":true}"#).count(), 2, "{after:?}");
        let digest = |spec: &VmSpec| hardware_digest(spec, &Accelerator::Tcg, false);
        assert_eq!(digest(&plain), digest(&limited), "what sleeps wakes with or without a limit");
    }

    #[test]
    fn disks_come_in_order_and_their_paths_may_contain_anything() {
        let spec = spec(Some("/images/a,b \"c\"/rootfs"), 16);
        let args = command_line(&spec, &setup(Accelerator::Tcg, Begin::Incoming));
        let devices: Vec<_> = args.iter().filter(|arg| arg.starts_with("virtio-blk")).collect();
        assert!(devices[0].contains("serial=rootfs") && devices[1].contains("serial=data"), "{devices:?}");
        let disks: Vec<serde_json::Value> = args
            .iter()
            .filter_map(|arg| serde_json::from_str(arg).ok())
            .filter(serde_json::Value::is_object)
            .collect();
        assert_eq!(disks[0]["file"]["filename"], "/images/a,b \"c\"/rootfs");
        assert_eq!((&disks[0]["read-only"], &disks[1]["read-only"]), (&json!(true), &json!(false)));
        assert!(args.ends_with(&["-incoming".to_owned(), "defer".to_owned()]));
    }

    #[test]
    fn a_template_writes_its_memory_file_and_a_fork_never_does() {
        let line = |memory| {
            let setup = Setup { memory, ..setup(Accelerator::Tcg, Begin::Boot) };
            command_line(&spec(None, 0), &setup).join(" ")
        };
        let file = "-object memory-backend-file,id=memory,size=128M,merge=off,dump=off";
        assert!(line(Memory::Template).contains(&format!("{file},mem-path=memory,share=on ")));
        assert!(line(Memory::Fork).contains(&format!("{file},mem-path=base,share=off ")));
    }

    #[test]
    fn a_network_card_is_the_taps_and_part_of_the_machine() {
        let mut connected = spec(None, 0);
        let plain = hardware_digest(&connected, &Accelerator::Tcg, false);
        let nic = Nic { tap: "tn7i3".to_owned(), mac: "02:4d:00:07:00:03".to_owned() };
        connected.bounds.nic = Some(nic);
        let line = command_line(&connected, &setup(Accelerator::Tcg, Begin::Boot)).join(" ");
        assert!(line.contains("-netdev tap,id=net,fd=3 "), "{line}");
        assert!(line.contains("-device virtio-net-device,netdev=net,mac=02:4d:00:07:00:03 "), "{line}");
        let one = hardware_digest(&connected, &Accelerator::Tcg, false);
        assert_ne!(plain, one);
        connected.bounds.nic = Some(Nic { tap: "tn7i4".to_owned(), mac: "02:4d:00:07:00:04".to_owned() });
        assert_eq!(
            one,
            hardware_digest(&connected, &Accelerator::Tcg, false),
            "a fork has an address of its own"
        );
    }

    #[test]
    fn saved_memory_fits_the_same_machine_only() {
        let one = hardware_digest(&spec(None, 0), &Accelerator::Tcg, false);
        assert_eq!(one, hardware_digest(&spec(None, 0), &Accelerator::Tcg, false));
        let kvm = Accelerator::Kvm { cpu: "host".to_owned() };
        assert_ne!(one, hardware_digest(&spec(None, 0), &kvm, false));
        assert_ne!(one, hardware_digest(&spec(None, 16), &Accelerator::Tcg, false));
    }
}
