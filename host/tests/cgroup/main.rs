//! Control groups on a real kernel: a microVM whose only program is `host/examples/cgroup_guest`, which uses this crate.
//!
//! The machine that runs the tests may bind its controllers to version 1, and its groups are not ours to change; a
//! guest's are. Needs QEMU, and a kernel from the test image (`make image`). Without them this says that it did not
//! run, and fails where it must run.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test may end at the first surprise")]

mod archive;

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Emulated on a busy machine; a healthy run needs about ten seconds.
const LIMIT: Duration = Duration::from_secs(150);

/// The guest prints one line for each.
const CHECKS: usize = 15;

/// A machine without devices and without ACPI: then it has the old timer, and the kernel can measure its clock by it.
const MACHINE: [&str; 14] = [
    "-M",
    "microvm,acpi=off",
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
];

const COMMAND_LINE: &str = "console=ttyS0 quiet loglevel=0 reboot=t panic=-1 mitigations=off no_timer_check \
                            random.trust_cpu=on audit=0 apparmor=0 ima=off cryptomgr.notests ipv6.disable=1";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A kernel of the test image.
fn kernel() -> Option<PathBuf> {
    let images = fs::read_dir(root().join("target/images/sha256")).ok()?;
    images.flatten().map(|image| image.path().join("kernel")).find(|kernel| kernel.is_file())
}

fn has_qemu() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join("qemu-system-x86_64").is_file())
}

fn kernel_or_say_so() -> Option<PathBuf> {
    let missing = match (has_qemu(), kernel()) {
        (true, Some(kernel)) => return Some(kernel),
        (false, _) => "needs qemu-system-x86_64 (scripts/setup)",
        (true, None) => "needs target/images (make image)",
    };
    // Not by `eprintln`, which is kept back when a test passes.
    let _ = writeln!(std::io::stderr(), "NOT RUN: control groups inside a microVM: {missing}");
    let must = ["CI", "MVM_REQUIRE_PRIVILEGED"].into_iter().any(|name| std::env::var_os(name).is_some());
    assert!(!must, "must run here: {missing}");
    None
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

#[test]
fn limits_hold_events_are_told_and_nothing_is_left_behind_on_a_real_kernel() {
    let Some(kernel) = kernel_or_say_so() else { return };
    let folder = tempfile::tempdir().unwrap();
    let initrd = folder.path().join("initrd");
    fs::write(&initrd, archive::with_init(&guest_program())).unwrap();
    let mut command = Command::new("qemu-system-x86_64");
    command.args(MACHINE).arg("stdio").arg("-kernel").arg(kernel).arg("-initrd").arg(initrd);
    command.args(["-append", COMMAND_LINE]).stdin(Stdio::null()).stdout(Stdio::piped());
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
    let passed = lines.iter().filter(|line| line.starts_with("PASS ")).count();
    let all = lines.last().is_some_and(|line| line == "CGROUP-ALL-PASS");
    assert!(all && passed == CHECKS, "{passed} of {CHECKS} checks passed:\n{}", lines.join("\n"));
}
