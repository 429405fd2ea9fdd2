//! What a VMM that was taken over would try. Each is a function that succeeds when it got what it wanted.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;

use nix::libc;
use rustix::fs::{CWD, FileType, Mode};
use rustix::net::{AddressFamily, SocketType, socket};
use rustix::process::{Resource, Rlimit};
use serde::{Deserialize, Serialize};

use crate::sandbox::bare;

/// What the one who tries was told: no secrets, for it guesses paths and numbers anyway.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct World {
    /// Only these, or all.
    pub(crate) only: Vec<String>,
    /// Only what does no harm if it succeeds.
    pub(crate) harmless: bool,
    pub(crate) neighbour: PathBuf,
    pub(crate) image: PathBuf,
    pub(crate) host_pid: i32,
    pub(crate) abstract_socket: String,
    /// The descriptor that it was executed from.
    pub(crate) launch: u64,
}

pub(crate) struct Attempt {
    pub(crate) name: &'static str,
    /// Does no harm when it succeeds: it is tried unconfined as well, where it must succeed.
    pub(crate) harmless: bool,
    pub(crate) run: fn(&World) -> io::Result<()>,
}

const fn harmless(name: &'static str, run: fn(&World) -> io::Result<()>) -> Attempt {
    Attempt { name, harmless: true, run }
}

const fn harmful(name: &'static str, run: fn(&World) -> io::Result<()>) -> Attempt {
    Attempt { name, harmless: false, run }
}

fn bare(number: i64, args: [u64; 5]) -> io::Result<()> {
    bare::call(number, args).map(|_| ())
}

fn open(family: AddressFamily, kind: SocketType) -> io::Result<()> {
    Ok(socket(family, kind, None).map(|_| ())?)
}

/// What must succeed in any confinement.
pub(crate) const ALLOWED: &[Attempt] = &[
    harmless("write in the run directory", |_| {
        fs::write("written", "a")?;
        fs::remove_file("written")
    }),
    harmless("read an image", |world| fs::read(&world.image).map(|_| ())),
    harmless("a unix socket in the run directory", |_| {
        let listener = UnixListener::bind("probe.sock")?;
        let mut here = UnixStream::connect("probe.sock")?;
        here.write_all(b"x")?;
        listener.accept()?.0.read_exact(&mut [0])?;
        fs::remove_file("probe.sock")
    }),
    harmless("the memory devices", |_| {
        File::open("/dev/urandom")?.read_exact(&mut [0; 8])?;
        OpenOptions::new().write(true).open("/dev/null")?.write_all(b"x")?;
        File::open("/dev/zero")?.read_exact(&mut [0; 8])
    }),
    harmless("a thread", |_| {
        std::thread::Builder::new().spawn(|| ())?.join().map_err(|_| io::ErrorKind::Other.into())
    }),
    harmless(HOLE, |_| {
        const LENGTH: usize = 64 * 1024;
        let mut file = OpenOptions::new().create(true).truncate(true).read(true).write(true).open("whole")?;
        file.write_all(&[7; LENGTH])?;
        let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, hole, 0, LENGTH as u64)?;
        let fake = io::Error::from_raw_os_error(PRETENDED);
        if fs::read("whole")?.contains(&7) { Err(fake) } else { Ok(()) }
    }),
];

/// Allowed without a balloon only.
pub(crate) const HOLE: &str = "a hole in a file";
/// It was told that there is one, and there is none.
pub(crate) const PRETENDED: i32 = libc::EREMOTEIO;

/// Allowed with KVM only.
pub(crate) const OPEN_KVM: &str = "open KVM";

/// What must be refused.
pub(crate) const FORBIDDEN: &[Attempt] = &[
    // Files.
    harmless("read /etc/passwd", |_| fs::read("/etc/passwd").map(|_| ())),
    harmless("list /etc", |_| fs::read_dir("/etc/ssl").map(|_| ())),
    harmless("list a home", |_| fs::read_dir("/root").map(|_| ())),
    harmless("list processes", |_| fs::read_dir("/proc").map(|_| ())),
    harmless("list interfaces", |_| fs::read_dir("/sys/class/net").map(|_| ())),
    harmless("list another tenant's directory", |world| fs::read_dir(&world.neighbour).map(|_| ())),
    harmless("read another tenant's file", |world| fs::read(world.neighbour.join("secret")).map(|_| ())),
    harmless("write to another tenant", |world| fs::write(world.neighbour.join("planted"), "x")),
    harmless("write an image", |world| OpenOptions::new().append(true).open(&world.image).map(|_| ())),
    harmless("write outside", |world| fs::write(world.neighbour.with_file_name("outside"), "x")),
    harmful("write to /", |_| fs::write("/outside", "x")),
    harmful("write to /dev", |_| fs::write("/dev/outside", "x")),
    harmful("write to libraries", |_| fs::write("/usr/lib/outside", "x")),
    harmful("write its program", |_| {
        let program = std::env::args_os().next().unwrap_or_default();
        OpenOptions::new().append(true).open(program).map(|_| ())
    }),
    harmless("a symbolic link", |_| std::os::unix::fs::symlink("/etc/passwd", "symlink")),
    harmless("a hard link", |world| fs::hard_link(&world.image, "link")),
    harmless("a directory", |_| fs::create_dir("directory")),
    harmless("a pipe", |_| Ok(rustix::fs::mknodat(CWD, "pipe", FileType::Fifo, Mode::RUSR, 0)?)),
    harmful("a device", |_| {
        let device = rustix::fs::makedev(1, 1);
        Ok(rustix::fs::mknodat(CWD, "mem", FileType::CharacterDevice, Mode::RUSR, device)?)
    }),
    harmful("give a file away", |_| {
        File::create("given")?;
        std::os::unix::fs::chown("given", Some(0), Some(0))
    }),
    harmful("open a file by its number", |_| bare(libc::SYS_open_by_handle_at, [0, 0, 0, 0, 0])),
    harmful(OPEN_KVM, |_| OpenOptions::new().read(true).write(true).open("/dev/kvm").map(|_| ())),
    harmful("make a TAP outlive it", |_| bare(libc::SYS_ioctl, [0, 0x4004_54cb, 1, 0, 0])),
    harmless("share equal pages with others", |_| {
        bare(libc::SYS_madvise, [0, 0, libc::MADV_MERGEABLE as u64, 0, 0])
    }),
    // Programs and processes.
    harmless("run a shell", |_| Command::new("/bin/sh").arg("-c").arg(":").status().map(|_| ())),
    harmless("run what it wrote", |_| {
        let mut file = OpenOptions::new().create(true).append(true).mode(0o755).open("own")?;
        file.write_all(b"#!/bin/sh\n:")?;
        drop(file);
        fs::set_permissions("own", fs::Permissions::from_mode(0o755)).ok();
        Command::new("./own").status().map(|_| ())
    }),
    harmful("run a library from the launch's descriptor", |world| {
        let library = c"/lib/x86_64-linux-gnu/libc.so.6";
        bare(libc::SYS_execveat, [world.launch, library.as_ptr() as u64, 0, 0, libc::AT_EMPTY_PATH as u64])
    }),
    harmful("have the launch's descriptor again", |world| bare(libc::SYS_dup3, [0, world.launch, 0, 0, 0])),
    harmful("more open files", |_| {
        let limit = Rlimit { current: Some(4096), maximum: Some(4096) };
        Ok(rustix::process::setrlimit(Resource::Nofile, limit)?)
    }),
    harmless("fork", |_| bare::fork()),
    harmless("signal a process of the host", |world| {
        bare(libc::SYS_kill, [world.host_pid as u64, 0, 0, 0, 0])
    }),
    harmless("signal a thread of the host", |world| {
        bare(libc::SYS_tgkill, [world.host_pid as u64, world.host_pid as u64, 0, 0, 0])
    }),
    harmful("be traced", |_| bare(libc::SYS_ptrace, [0, 0, 0, 0, 0])),
    harmful("trace a process of the host", |world| {
        bare(libc::SYS_ptrace, [libc::PTRACE_SEIZE as u64, world.host_pid as u64, 0, 0, 0])
    }),
    harmless("a handle on a process of the host", |world| {
        bare(libc::SYS_pidfd_open, [world.host_pid as u64, 0, 0, 0, 0])
    }),
    harmful("read a process's memory", |_| bare(libc::SYS_process_vm_readv, [1, 0, 0, 0, 0])),
    // Rights.
    harmless("be root", |_| bare(libc::SYS_setuid, [0; 5])),
    harmless("be in root's group", |_| bare(libc::SYS_setgid, [0; 5])),
    harmless("be in no group", |_| bare(libc::SYS_setgroups, [0; 5])),
    harmful("a user namespace", |_| bare(libc::SYS_unshare, [libc::CLONE_NEWUSER as u64, 0, 0, 0, 0])),
    harmful("a mount namespace", |_| bare(libc::SYS_unshare, [libc::CLONE_NEWNS as u64, 0, 0, 0, 0])),
    harmful("mount", |_| {
        let text = c"tmpfs".as_ptr() as u64;
        bare(libc::SYS_mount, [text, c".".as_ptr() as u64, text, 0, 0])
    }),
    harmful("the new way to mount", |_| bare(libc::SYS_fsopen, [c"tmpfs".as_ptr() as u64, 0, 0, 0, 0])),
    harmful("another root", |_| bare(libc::SYS_chroot, [c"/".as_ptr() as u64, 0, 0, 0, 0])),
    harmless("another working directory", |_| std::env::set_current_dir(".")),
    // The network.
    harmless("TCP", |_| TcpListener::bind("127.0.0.1:0").map(|_| ())),
    harmless("UDP", |_| UdpSocket::bind("127.0.0.1:0").map(|_| ())),
    harmless("netlink", |_| open(AddressFamily::NETLINK, SocketType::RAW)),
    harmless("raw packets", |_| open(AddressFamily::PACKET, SocketType::RAW)),
    harmless("an abstract socket of the host", |world| {
        UnixStream::connect_addr(&SocketAddr::from_abstract_name(&world.abstract_socket)?).map(|_| ())
    }),
    // The kernel.
    harmless("a keyring", |_| bare(libc::SYS_keyctl, [0, (-3_i64).cast_unsigned(), 1, 0, 0])),
    harmful("bpf", |_| bare(libc::SYS_bpf, [0, 0, 0, 0, 0])),
    harmful("performance counters", |_| bare(libc::SYS_perf_event_open, [0; 5])),
    harmful("io_uring", |_| bare(libc::SYS_io_uring_setup, [8, 0, 0, 0, 0])),
    harmful("userfaultfd", |_| bare(libc::SYS_userfaultfd, [1, 0, 0, 0, 0])),
    harmful("a kernel module", |_| bare(libc::SYS_finit_module, [0, c"".as_ptr() as u64, 0, 0, 0])),
    harmful("another kernel", |_| bare(libc::SYS_kexec_load, [0; 5])),
    harmful("a reboot", |_| bare(libc::SYS_reboot, [0; 5])),
    harmful("swapping", |_| bare(libc::SYS_swapon, [c"own".as_ptr() as u64, 0, 0, 0, 0])),
    harmful("the clock", |_| bare(libc::SYS_clock_settime, [0, 0, 0, 0, 0])),
    harmful("the kernel's log", |_| bare(libc::SYS_syslog, [10, 0, 0, 0, 0])),
    harmful("shared memory", |_| bare(libc::SYS_shmget, [0, 4096, 0o1600, 0, 0])),
    harmful("a call by its second number", |_| bare(0x4000_0000 + libc::SYS_getpid, [0; 5])),
];

/// What a filter must answer: an errno tells that it was the filter, and not some other layer or a bad argument.
pub(crate) const BY_FILTER: &[&str] = &[
    "open a file by its number",
    "be traced",
    "read a process's memory",
    "bpf",
    "performance counters",
    "a kernel module",
    "another kernel",
    "a reboot",
    "swapping",
    "the clock",
    "the kernel's log",
    "a user namespace",
    "fork",
    "TCP",
    "be root",
    "another working directory",
    "make a TAP outlive it",
    "share equal pages with others",
];
