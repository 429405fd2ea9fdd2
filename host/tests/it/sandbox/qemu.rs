//! Real QEMU, confined: it boots, pauses, saves, restores and ends as it does unconfined.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mvm_host::sandbox::{Confinement, Filter};
use mvm_host::{EndSignal, Host as _, VmmProcess};
use mvm_needs::{Need, can_run};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

use super::{GID, Machine, assert_confined, wait_until};

const PATIENCE: Duration = Duration::from_secs(120);
/// How often QEMU is started with and without each filter, and what confining it may add at most: a few milliseconds
/// are measured where nothing else runs.
const STARTS: u32 = 5;
const CONFINING_COSTS: Duration = Duration::from_millis(100);

/// What tests boot: the newest image that was built for them.
struct Image {
    qemu: PathBuf,
    kernel: PathBuf,
    initrd: PathBuf,
    command_line: String,
}

fn image() -> Image {
    let path = std::env::var_os("PATH").unwrap();
    let qemu = std::env::split_paths(&path).map(|dir| dir.join("qemu-system-x86_64"));
    let qemu = qemu.into_iter().find(|file| file.is_file()).unwrap();
    let dir = mvm_needs::test_image().unwrap();
    let mhz = fs::read_to_string("/proc/cpuinfo").unwrap();
    let mhz =
        mhz.lines().find_map(|line| line.strip_prefix("cpu MHz")?.rsplit_once(' ')?.1.parse::<f64>().ok());
    let khz = mhz.map(|mhz| format!("tsc_early_khz={:.0}", mhz * 1000.0)).unwrap_or_default();
    let own = fs::read_to_string(dir.join("cmdline")).unwrap();
    let command_line =
        format!("console=ttyS0 reboot=t panic=-1 no_timer_check {khz} tsc=reliable mitigations=off {own}");
    Image { qemu, kernel: dir.join("kernel"), initrd: dir.join("initrd"), command_line }
}

/// The command line of the QEMU driver, with both kinds of disk.
fn arguments(image: &Image, rootfs: &Path, incoming: bool) -> Vec<String> {
    let disk = |name: &str, path: &Path, read_only: bool| {
        let file = json!({ "driver": "file", "filename": path, "read-only": read_only });
        json!({ "driver": "raw", "node-name": name, "read-only": read_only, "file": file }).to_string()
    };
    let (kernel, initrd) = (image.kernel.display().to_string(), image.initrd.display().to_string());
    let (rootfs, data) = (disk("rootfs", rootfs, true), disk("data", Path::new("data.img"), false));
    let mut args = vec![
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "-chardev",
        "file,id=console,path=console.log,append=on",
        "-serial",
        "chardev:console",
        "-qmp",
        "unix:qmp.sock,server=on,wait=off",
        "-chardev",
        "socket,id=guest,path=guest.sock,server=on,wait=off",
        "-kernel",
        &kernel,
        "-append",
        &image.command_line,
        "-initrd",
        &initrd,
        "-blockdev",
        &rootfs,
        "-blockdev",
        &data,
        "-M",
        "microvm,acpi=on",
        "-accel",
        "tcg",
        "-cpu",
        "max",
        "-smp",
        "2",
        "-m",
        "128M",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-global",
        "virtio-mmio.force-legacy=false",
        "-device",
        "virtio-blk-device,drive=rootfs,serial=rootfs",
        "-device",
        "virtio-blk-device,drive=data,serial=data,werror=report,rerror=report",
        "-device",
        "virtio-serial-device,id=serial",
        "-device",
        "virtserialport,bus=serial.0,id=guest,chardev=guest,name=mvm.guest",
        "-device",
        "virtio-rng-device",
    ];
    if incoming {
        args.extend(["-incoming", "defer"]);
    }
    // The driver's name for it comes last: `Machine::start` adds it.
    args.push("-name");
    args.into_iter().map(str::to_owned).collect()
}

/// A connection to QEMU's control socket.
struct Qmp {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
    guest_opened: bool,
}

impl Qmp {
    async fn connect(dir: &Path) -> Self {
        let path = dir.join("qmp.sock");
        let mut stream = None;
        wait_until("QEMU's control socket", || {
            stream = UnixStream::connect(&path).ok();
            stream.is_some()
        })
        .await;
        let stream = stream.unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let lines = BufReader::new(stream.try_clone().unwrap());
        let mut qmp = Self { stream, lines, guest_opened: false };
        assert!(qmp.line().get("QMP").is_some());
        qmp.command("qmp_capabilities", Value::Null);
        qmp
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "QEMU is gone");
        let value: Value = serde_json::from_str(&line).unwrap();
        if value["event"] == "VSERPORT_CHANGE" {
            self.guest_opened = value["data"]["open"] == true;
        }
        value
    }

    fn command(&mut self, name: &str, arguments: Value) -> Value {
        self.ask(name, arguments, None)
    }

    fn ask(&mut self, name: &str, arguments: Value, file: Option<BorrowedFd<'_>>) -> Value {
        let mut message = json!({ "execute": name });
        if !arguments.is_null() {
            message["arguments"] = arguments;
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files: Vec<_> = file.into_iter().collect();
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        let text = format!("{message}\n");
        sendmsg(&self.stream, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::NOSIGNAL).unwrap();
        loop {
            let mut answer = self.line();
            assert!(answer.get("error").is_none(), "{name}: {answer}");
            if answer.get("return").is_some() {
                return answer["return"].take();
            }
        }
    }

    async fn reaches(&mut self, state: &str) {
        wait_until(state, || self.command("query-status", Value::Null)["status"] == state).await;
    }

    /// The guest's program has opened its port: it has booted.
    fn guest(&mut self) {
        while !self.guest_opened {
            self.line();
        }
    }
}

async fn boot(
    machine: &Machine,
    number: u32,
    image: &Image,
    filter: Option<Filter>,
    incoming: bool,
) -> (VmmProcess, Qmp, Duration) {
    let dir = machine.run_dir(number).await;
    let rootfs = machine.image();
    File::options().write(true).open(&rootfs).unwrap().set_len(1 << 20).unwrap();
    let data = OpenOptions::new().create(true).append(true).mode(0o660).open(dir.join("data.img")).unwrap();
    data.set_len(16 << 20).unwrap();
    std::os::unix::fs::chown(dir.join("data.img"), Some(Machine::uid(number)), Some(GID)).unwrap();
    for name in ["qmp.sock", "guest.sock"] {
        let _ = fs::remove_file(dir.join(name));
    }
    let images = vec![image.kernel.clone(), image.initrd.clone(), rootfs.clone()];
    let confine =
        filter.map(|filter| Confinement { filter, images, ..Confinement::qemu(Machine::uid(number), GID) });
    let begun = Instant::now();
    let vmm =
        machine.start(number, &image.qemu, &arguments(image, &rootfs, incoming), confine).await.unwrap();
    let qmp = Qmp::connect(&dir).await;
    (vmm, qmp, begun.elapsed())
}

/// With KVM it takes another device and other commands; where QEMU starts with it at all, it does confined.
#[tokio::test]
async fn qemu_starts_on_kvm_under_the_strict_filter() {
    if !can_run(&[Need::Root, Need::MicroVms]) {
        return;
    }
    let image = image();
    let machine = Machine::new();
    let args = [
        "-M",
        "microvm",
        "-accel",
        "kvm",
        "-cpu",
        "qemu64",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
    ];
    let args = args.into_iter().chain(["-S", "-qmp", "unix:qmp.sock,server=on,wait=off", "-name"]);
    let args: Vec<_> = args.map(str::to_owned).collect();
    for (number, confined) in [(400, false), (401, true)] {
        let dir = machine.run_dir(number).await;
        let confine =
            confined.then(|| Confinement { kvm: true, ..Confinement::qemu(Machine::uid(number), GID) });
        let vmm = machine.start(number, &image.qemu, &args, confine).await.unwrap();
        let proc = PathBuf::from(format!("/proc/{}", vmm.process.pid));
        let mut answers = false;
        wait_until("QEMU or its end", || {
            answers = UnixStream::connect(dir.join("qmp.sock")).is_ok();
            answers || !proc.exists()
        })
        .await;
        let on_kvm = if answers || confined { Ok(()) } else { Err(machine.log(number)) };
        if !can_run(&[Need::Kvm(on_kvm)]) {
            return;
        }
        assert!(answers, "{}", machine.log(number));
        let mut qmp = Qmp::connect(&dir).await;
        assert_eq!(qmp.command("query-kvm", Value::Null)["enabled"], true);
        machine.end(&vmm, EndSignal::Kill).await;
    }
}

/// Boots, pauses, saves by descriptor, goes on, ends; restores from the file, goes on, ends by a signal.
async fn lifecycle(number: u32, filter: Filter) {
    if !can_run(&[Need::Root, Need::MicroVms]) {
        return;
    }
    let image = image();
    let machine = Machine::new();
    let (vmm, mut qmp, _) = boot(&machine, number, &image, Some(filter), false).await;
    let dir = machine.host.run_dir(&Machine::instance(number));
    assert_confined(&vmm, Machine::uid(number));
    assert_eq!(machine.host.vmms().await.unwrap(), std::slice::from_ref(&vmm));
    let begun = Instant::now();
    qmp.guest();
    eprintln!("{filter:?}: the guest is up {:?} after QEMU", begun.elapsed());
    // The agent's group reaches what the VMM makes; others don't.
    let socket = fs::metadata(dir.join("guest.sock")).unwrap();
    assert_eq!((socket.uid(), socket.gid(), socket.mode() & 0o777), (Machine::uid(number), GID, 0o770));
    qmp.command("stop", Value::Null);
    let memory = File::create(dir.join("memory")).unwrap();
    qmp.command("migrate-set-parameters", json!({ "max-bandwidth": 10_u64 << 30 }));
    qmp.ask("getfd", json!({ "fdname": "memory" }), Some(memory.as_fd()));
    qmp.command("migrate", json!({ "uri": "fd:memory" }));
    qmp.reaches("postmigrate").await;
    qmp.command("cont", Value::Null);
    qmp.command("quit", Value::Null);
    assert_eq!(machine.ended(&vmm).await.exit_code, Some(0), "{}", machine.log(number));
    let (vmm, mut qmp, _) = boot(&machine, number, &image, Some(filter), true).await;
    let memory = File::open(dir.join("memory")).unwrap();
    qmp.ask("getfd", json!({ "fdname": "memory" }), Some(memory.as_fd()));
    qmp.command("migrate-incoming", json!({ "uri": "fd:memory" }));
    qmp.reaches("paused").await;
    qmp.command("cont", Value::Null);
    qmp.guest();
    assert_confined(&vmm, Machine::uid(number));
    let end = machine.end(&vmm, EndSignal::Terminate).await;
    assert_eq!((end.exit_code, end.signal), (Some(0), None), "{}", machine.log(number));
}

#[tokio::test]
async fn qemu_lives_and_ends_under_the_baseline_filter() {
    lifecycle(100, Filter::Baseline).await;
}

#[tokio::test]
async fn qemu_lives_and_ends_under_the_strict_filter() {
    lifecycle(200, Filter::Strict).await;
}

#[tokio::test]
async fn confining_qemu_costs_little_of_its_start() {
    if !can_run(&[Need::Root, Need::MicroVms]) {
        return;
    }
    let image = image();
    let machine = Machine::new();
    let filters = [None, Some(Filter::Baseline), Some(Filter::Strict)];
    let mut least = [Duration::MAX; 3];
    // In turn, and the least of each: what else the machine does slows all of them.
    for run in 0..STARTS {
        for ((kind, filter), least) in (0..).zip(filters).zip(&mut least) {
            let (vmm, qmp, time) = boot(&machine, 300 + 3 * run + kind, &image, filter, true).await;
            drop(qmp);
            *least = time.min(*least);
            machine.end(&vmm, EndSignal::Kill).await;
        }
    }
    let [open, confined @ ..] = least;
    for (time, filter) in confined.into_iter().zip(&filters[1..]) {
        assert!(time < 2 * open + CONFINING_COSTS, "{filter:?}: {time:?}, without {open:?}");
    }
}
