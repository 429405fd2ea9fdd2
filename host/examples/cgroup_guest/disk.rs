//! That what is done to a disk is limited, on a real one: a virtio disk with one partition of ext4.

use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use mvm_host::cgroup::{InstanceGroup, InstanceLimits, IoFound};
use mvm_proto::document::IoLimits;
use rustix::mount::{MountFlags, mount};

use crate::{Bench, Checked, PATIENCE, ending, expect, lives, pass, usual, wait_until, wide};

/// Where instances would be kept. Nothing is there yet, as on a new node.
pub(crate) const VMS: &str = "/disk/mvm/vms";

const FILE: &str = "/disk/file";
const MIB: u64 = 1 << 20;
const PIECE: usize = 64 << 10;
const PAGE: usize = 4096;

/// What of three seconds' worth of work must be waited for at least: the kernel lets the first moments pass.
const LEAST: Duration = Duration::from_secs(2);

/// How often what has no limit is tried until it is quick.
const RUNS: usize = 3;

/// Loads what disks need, and mounts the only partition of the only one.
pub(crate) fn find() {
    for path in fs::read_to_string("/modules.list").unwrap().split_whitespace() {
        let loaded = rustix::system::finit_module(File::open(path).unwrap(), c"", 0);
        assert!(matches!(loaded, Ok(()) | Err(rustix::io::Errno::EXIST)), "{path}: {loaded:?}");
    }
    wait_until("the disk", || Path::new("/dev/vda1").exists()).unwrap();
    fs::create_dir("/disk").unwrap();
    mount("/dev/vda1", "/disk", "ext4", MountFlags::empty(), None).unwrap();
}

/// The numbers of a device in `/sys/class/block`.
fn number(name: &str) -> String {
    fs::read_to_string(format!("/sys/class/block/{name}/dev")).unwrap().trim().to_owned()
}

fn writes(bytes: u64) -> IoLimits {
    IoLimits { write_bytes_per_second: Some(bytes), ..IoLimits::default() }
}

impl Bench {
    fn on_disk(&self, tenant: &str, io: Option<IoLimits>) -> InstanceGroup {
        self.tenant(tenant, &wide());
        self.instance(tenant, 1, &InstanceLimits { io, ..usual() })
    }

    /// How long this takes in a group.
    fn timed(&self, group: &InstanceGroup, what: &[&str]) -> Result<Duration, String> {
        let began = Instant::now();
        match ending(&self.start(group, what)) {
            0 => Ok(began.elapsed()),
            code => Err(format!("{what:?} ended with {code}")),
        }
    }

    /// The least that this takes in a group that has no limit: the disk may stand still during one run, and a limit would
    /// hold in all of them.
    fn unhindered(&self, group: &InstanceGroup, what: &[&str]) -> Result<Duration, String> {
        let mut least = self.timed(group, what)?;
        for _ in 1..RUNS {
            if least >= LEAST / 2 {
                least = least.min(self.timed(group, what)?);
            }
        }
        Ok(least)
    }

    /// How long it takes in a group that has no limit, and in one that has.
    fn compared(&self, tenant: &str, limits: IoLimits, what: &[&str]) -> Checked {
        let group = self.on_disk(tenant, None);
        let free = self.unhindered(&group, what)?;
        self.clear(&[group]);
        let group = self.on_disk(tenant, Some(limits));
        let held = self.timed(&group, what)?;
        self.clear(&[group]);
        expect(
            held >= LEAST && free < held / 2,
            format!("{} ms without a limit, {} ms with", free.as_millis(), held.as_millis()),
        )
    }

    /// Bytes that a group wrote to the disk.
    fn written(&self, group: &InstanceGroup) -> u64 {
        let stat = self.read(&group.clone().into(), "io.stat");
        let line =
            stat.lines().find(|line| line.starts_with(&format!("{} ", number("vda")))).unwrap_or_default();
        let bytes = line.split_whitespace().find_map(|word| word.strip_prefix("wbytes="));
        bytes.map_or(0, |bytes| bytes.parse().unwrap())
    }

    /// How much a group writes in this time, by the second.
    fn rate(&self, group: &InstanceGroup, time: Duration) -> u64 {
        let (before, began) = (self.written(group), Instant::now());
        pass(time);
        (self.written(group) - before) * 1000 / u64::try_from(began.elapsed().as_millis()).unwrap()
    }
}

pub(crate) fn resolved(bench: &Bench) -> Checked {
    let (disk, partition) = (number("vda"), number("vda1"));
    let group = bench.on_disk("whole", Some(writes(MIB)));
    let held = bench.read(&group.clone().into(), "io.max");
    let found = bench.cgroups.usage(&group.clone().into()).unwrap().io;
    // What a partition's own number would have come to.
    let file = bench.cgroups.directory(&group.clone().into()).unwrap().join("io.max");
    let refused = fs::write(file, format!("{partition} wbps=1048576"));
    bench.cgroups.ensure_io(&group, None).unwrap();
    let taken_away = bench.read(&group.clone().into(), "io.max").is_empty();
    bench.clear(&[group]);
    let well = held == format!("{disk} rbps=max wbps=1048576 riops=max wiops=max");
    let seen = matches!(found, IoFound::Limited { limits, .. } if limits == writes(MIB));
    expect(
        well && seen && refused.is_err() && taken_away && disk != partition,
        format!("{held:?}; the partition {partition} by itself: {refused:?}"),
    )
}

pub(crate) fn direct_writes(bench: &Bench) -> Checked {
    bench.compared("direct", writes(MIB), &["write", "direct", FILE, "48"])
}

pub(crate) fn delayed_writes(bench: &Bench) -> Checked {
    // Each its own file: what is delayed is charged to who owns the file, and that is who wrote to it first.
    let free = bench.on_disk("free", None);
    let before = bench.unhindered(&free, &["write", "delayed", "/disk/free", "48"])?;
    let held = bench.on_disk("held", Some(writes(MIB)));
    let after = bench.timed(&held, &["write", "delayed", "/disk/held", "48"])?;
    bench.clear(&[free, held]);
    expect(
        after >= LEAST && before < after / 2,
        format!("{} ms without a limit, {} ms with", before.as_millis(), after.as_millis()),
    )
}

/// As a data disk is: made and filled by who starts the VMM. The kernel gives a file to another once most of its writes are
/// that one's for a while.
pub(crate) fn others_file(bench: &Bench) -> Checked {
    let maker = bench.on_disk("maker", None);
    bench.timed(&maker, &["write", "delayed", "/disk/given", "2"])?;
    let group = bench.on_disk("given", Some(writes(MIB)));
    let (before, began) = (disk_written(), Instant::now());
    bench.start(&group, &["write", "delayed", "/disk/given", "0"]);
    // All that is written to the disk, whoever it is charged to.
    let mut passed = 0;
    let mut rate = || {
        passed = disk_written() - before;
        pass(Duration::from_secs(2));
        (disk_written() - before - passed) / 2
    };
    let held = wait_until("the file to be given to who writes", || rate() <= MIB * 3 / 2);
    let took = began.elapsed().as_millis();
    bench.clear(&[group, maker]);
    held.map(|()| format!("after {} KiB, {} ms with the measuring", passed >> 10, took))
}

/// Bytes written to the disk by all.
fn disk_written() -> u64 {
    let stat = fs::read_to_string("/sys/block/vda/stat").unwrap();
    stat.split_whitespace().nth(6).unwrap().parse::<u64>().unwrap() * 512
}

pub(crate) fn reads(bench: &Bench) -> Checked {
    let bytes = IoLimits { read_bytes_per_second: Some(MIB), ..IoLimits::default() };
    let by_bytes = bench.compared("bytes", bytes, &["read", FILE, "65536", "48"])?;
    let ops = IoLimits { read_ops_per_second: Some(20), ..IoLimits::default() };
    let by_number = bench.compared("number", ops, &["read", FILE, "4096", "60"])?;
    Ok(format!("by bytes: {by_bytes}; by number: {by_number}"))
}

pub(crate) fn changed(bench: &Bench) -> Checked {
    let group = bench.on_disk("change", Some(writes(MIB)));
    let writer = bench.start(&group, &["write", "direct", FILE, "0"]);
    wait_until("the writer to write", || bench.written(&group) > MIB)?;
    let slow = bench.rate(&group, Duration::from_secs(2));
    bench.cgroups.ensure_io(&group, Some(&writes(3 * MIB))).unwrap();
    pass(Duration::from_millis(500));
    // A limit holds whenever one looks; that there is no lower one shows while the disk doesn't stand still.
    let mut faster = 0;
    let sped_up = wait_until("the writer to write faster", || {
        faster = faster.max(bench.rate(&group, Duration::from_secs(2)));
        faster >= MIB * 2
    });
    bench.cgroups.ensure_io(&group, None).unwrap();
    pass(Duration::from_millis(500));
    let mut free = 0;
    let freed = wait_until("the writer to write freely", || {
        free = bench.rate(&group, Duration::from_secs(1));
        free > MIB * 6
    });
    let alive = lives(&writer);
    bench.clear(&[group]);
    let well = slow <= MIB * 3 / 2 && faster <= MIB * 4 && sped_up.is_ok() && freed.is_ok();
    let told = format!("{} KiB/s of 1024, {} of 3072, then {}", slow >> 10, faster >> 10, free >> 10);
    expect(alive && well, told)
}

pub(crate) fn killed(bench: &Bench) -> Checked {
    let least = *mvm_proto::document::IO_BYTES_PER_SECOND.start();
    let group = bench.on_disk("killed", Some(writes(least)));
    let writer = bench.start(&group, &["write", "direct", FILE, "0"]);
    wait_until("the writer to write", || bench.written(&group) > 0)?;
    let began = Instant::now();
    let killed = bench.cgroups.kill_instance(&group, PATIENCE).map_err(|cause| cause.to_string())?;
    let (gone, took) = (!lives(&writer), began.elapsed().as_millis());
    bench.clear(&[group]);
    expect(killed && gone, format!("gone after {took} ms with {least} bytes in a second"))
}

/// Writes as many pieces, or for ever, past the page cache or through it, and waits for the disk.
pub(crate) fn write(how: &str, file: &str, pieces: usize) {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    if how == "direct" {
        options.custom_flags(nix::libc::O_DIRECT);
    }
    let mut file = options.open(file).unwrap();
    let (buffer, begin) = aligned(PIECE);
    let mut write = || file.write_all(&buffer[begin..begin + PIECE]).unwrap();
    if pieces > 0 {
        (0..pieces).for_each(|_| write());
        file.sync_all().unwrap();
        return;
    }
    loop {
        file.rewind().unwrap();
        (0..16).for_each(|_| file.write_all(&buffer[begin..begin + PIECE]).unwrap());
        file.sync_data().unwrap();
    }
}

/// Reads as many pieces of this size past the page cache, from the beginning on.
pub(crate) fn read(file: &str, bytes: usize, pieces: usize) {
    let mut file = OpenOptions::new().read(true).custom_flags(nix::libc::O_DIRECT).open(file).unwrap();
    let (mut buffer, begin) = aligned(bytes);
    (0..pieces).for_each(|_| file.read_exact(&mut buffer[begin..begin + bytes]).unwrap());
}

/// Memory in which a page begins there: nothing else goes past the page cache.
fn aligned(bytes: usize) -> (Vec<u8>, usize) {
    let buffer = vec![7_u8; bytes + PAGE];
    let begin = buffer.as_ptr().align_offset(PAGE);
    (buffer, begin)
}
