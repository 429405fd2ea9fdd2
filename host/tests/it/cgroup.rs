//! Control groups on a real kernel: a microVM whose only program is `host/examples/cgroup_guest`, which uses this crate.
//!
//! The machine that runs the tests may bind its controllers to version 1, and its groups are not ours to change; a
//! guest's are. Needs QEMU, and a kernel from the test image (`make image`). Without them this says that it did not
//! run, and fails where it must run.

mod archive;

use mvm_needs::{Need, can_run};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Emulated on a busy machine; a healthy run needs about ten seconds.
const LIMIT: Duration = Duration::from_secs(150);

/// The guest prints one line for each.
const CHECKS: usize = 16;
const DISK_CHECKS: usize = 7;

const MACHINE: [&str; 14] = [
    "-accel",
    "tcg",
    "-cpu",
    "max",
    "-m",
    "256M",
    "-nodefaults",
    "-no-user-config",
    "-display",
    "none",
    "-no-reboot",
    "-serial",
    "stdio",
    "-M",
];

/// Without devices and without ACPI: then it has the old timer, and the kernel can measure its clock by it.
const WITHOUT_DEVICES: &str = "microvm,acpi=off";

/// Devices are found by ACPI, and the kernel must be told how fast its clock runs.
const WITH_DEVICES: &str = "microvm,acpi=on";

/// Where the partition of the disk begins, and how long both are.
const PARTITION_AT: u64 = 1 << 20;
const DISK_BYTES: u64 = 64 << 20;
const SECTOR: u64 = 512;

const COMMAND_LINE: &str = "console=ttyS0 quiet loglevel=0 reboot=t panic=-1 mitigations=off no_timer_check \
                            random.trust_cpu=on audit=0 apparmor=0 ima=off cryptomgr.notests ipv6.disable=1";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The program of the guest, built when it is not what its sources say.
fn guest_program() -> Vec<u8> {
    let script = root().join("scripts/build-cgroup-guest");
    let built = Command::new(&script).stderr(Stdio::inherit()).output().unwrap();
    assert!(built.status.success(), "{} failed", script.display());
    fs::read(String::from_utf8(built.stdout).unwrap().trim()).unwrap()
}

/// Ends with the test, whatever becomes of it.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Boots a machine until it ends by itself, and gives what it printed.
fn boot(machine: &str, kernel: &Path, initrd: &Path, more: &str, devices: &[&str]) -> Vec<String> {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(MACHINE).arg(machine).args(devices).arg("-kernel").arg(kernel).arg("-initrd").arg(initrd);
    command.arg("-append").arg(format!("{COMMAND_LINE} {more}")).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut machine = Machine(command.spawn().unwrap());
    let console = BufReader::new(machine.0.stdout.take().unwrap());
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || console.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
    let deadline = Instant::now() + LIMIT;
    let mut lines = Vec::new();
    // Until the machine ended, and with it its console.
    while let Ok(line) = told.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        println!("{line}");
        lines.push(line.trim().to_owned());
    }
    assert!(Instant::now() < deadline, "the guest did not end within {LIMIT:?}");
    lines
}

fn all_passed(lines: &[String], checks: usize) {
    let passed = lines.iter().filter(|line| line.starts_with("PASS ")).count();
    let all = lines.last().is_some_and(|line| line == "CGROUP-ALL-PASS");
    assert!(all && passed == checks, "{passed} of {checks} checks passed:\n{}", lines.join("\n"));
}

/// About how fast this machine's clock runs, which is the guest's, too. Were it another, the guest would be early or late, and
/// all that it measures by as much.
fn clock_khz() -> u64 {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("cpu MHz")?.split_once(':'));
    let khz = line.and_then(|(_, mhz)| mhz.trim().replace('.', "").parse().ok());
    khz.filter(|khz| *khz > 0).unwrap_or(2_000_000)
}

/// A disk with one partition, and ext4 in that.
fn disk(file: &Path) {
    File::create(file).unwrap().set_len(DISK_BYTES).unwrap();
    let blocks = ((DISK_BYTES - PARTITION_AT) / 1024).to_string();
    let offset = format!("offset={PARTITION_AT}");
    let mut make = Command::new("mkfs.ext4");
    make.args(["-q", "-F", "-b", "1024", "-E", &offset]).arg(file).arg(blocks);
    assert!(make.status().unwrap().success(), "mkfs.ext4 failed");
    let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap().to_le_bytes();
    let mut table = [0_u8; 66];
    // Linux, by the numbers of its first sector and of how many there are.
    table[4] = 0x83;
    table[8..12].copy_from_slice(&sectors(PARTITION_AT));
    table[12..16].copy_from_slice(&sectors(DISK_BYTES - PARTITION_AT));
    table[64..].copy_from_slice(&[0x55, 0xaa]);
    File::options().write(true).open(file).unwrap().write_all_at(&table, 446).unwrap();
}

#[test]
fn limits_hold_events_are_told_and_nothing_is_left_behind_on_a_real_kernel() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let image = mvm_needs::test_image().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (kernel, initrd) = (image.join("kernel"), folder.path().join("initrd"));
    let ours = archive::with_init(&guest_program());
    fs::write(&initrd, &ours).unwrap();
    let lines = boot(WITHOUT_DEVICES, &kernel, &initrd, "", &[]);
    all_passed(&lines, CHECKS);

    // A second machine: one with a disk has no timer by which the kernel could measure its clock.
    let more = format!("mvm.disk tsc=reliable tsc_early_khz={}", clock_khz());
    // The image's own archive has the modules; what comes later in the file takes the place of what came before.
    let mut both = fs::read(image.join("initrd")).unwrap();
    both.resize(both.len().next_multiple_of(4), 0);
    both.extend(ours);
    fs::write(&initrd, both).unwrap();
    let file = folder.path().join("disk");
    disk(&file);
    let drive = format!("if=none,id=disk,format=raw,file={}", file.display());
    let devices = ["-global", "virtio-mmio.force-legacy=false", "-drive", &drive];
    let devices = [&devices[..], &["-device", "virtio-blk-device,drive=disk"]].concat();
    all_passed(&boot(WITH_DEVICES, &kernel, &initrd, &more, &devices), DISK_CHECKS);
}
