//! The guest's name, in the kernel and in the files that programs read.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;

use rustix::fs::{FallocateFlags, Stat, fallocate, fstat};

use crate::refusal::Refusal;

pub(super) fn take(instance: &str, hostname: &str, dns: &[String]) -> Result<(), Refusal> {
    if !hostname.is_empty() {
        rustix::system::sethostname(hostname.as_bytes())
            .map_err(|error| Refusal::io("host name", &error.into()))?;
    }
    // The files are for the convenience of programs: a root that can't be written is no reason to refuse.
    let _ = write_files(instance, hostname, dns);
    Ok(())
}

const MACHINE_ID: &str = "/etc/machine-id";
const HOSTNAME: &str = "/etc/hostname";
const HOSTS: &str = "/etc/hosts";
const RESOLVERS: &str = "/etc/resolv.conf";

/// Files that every rebirth writes. Open from the beginning, with room for what comes: a guest that just woke has better
/// to do than to look for them. Never closed, for that takes as long.
static OPEN: OnceLock<Vec<Opened>> = OnceLock::new();

struct Opened {
    path: &'static str,
    file: File,
    /// When anything of it changed last: its content, its name, the number of its names.
    changed: (i64, i64),
}

impl Opened {
    /// Its length, if it is untouched since. A program may have replaced or renamed it.
    fn untouched(&self) -> Option<i64> {
        let found = fstat(&self.file).ok()?;
        (found.st_nlink > 0 && changed(&found) == self.changed).then_some(found.st_size)
    }
}

fn changed(found: &Stat) -> (i64, i64) {
    (found.st_ctime, i64::try_from(found.st_ctime_nsec).unwrap_or(i64::MAX))
}

/// As much as any of them takes.
const ROOM_BYTES: u64 = 4096;

/// Makes the files that are not there, and opens them. What is in them is said by [`take`].
pub(super) fn open_files() {
    let _ = fs::create_dir_all("/etc");
    let opened = [MACHINE_ID, HOSTNAME, HOSTS].into_iter().filter_map(|path| {
        let file = open(path).ok()?;
        // Where a file system has no such thing it is found when it is needed.
        let _ = fallocate(&file, FallocateFlags::KEEP_SIZE, 0, ROOM_BYTES);
        let changed = changed(&fstat(&file).ok()?);
        Some(Opened { path, file, changed })
    });
    let _ = OPEN.set(opened.collect());
}

/// What [`take`] does in memory.
pub(super) fn rehearse(instance: &str) -> String {
    [&machine_id(instance), "\n"].concat()
}

fn open(path: &str) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(false).open(path)
}

fn write_files(instance: &str, hostname: &str, dns: &[String]) -> io::Result<()> {
    write(MACHINE_ID, &[&machine_id(instance), "\n"])?;
    if !hostname.is_empty() {
        write(HOSTNAME, &[hostname, "\n"])?;
        write(HOSTS, &["127.0.0.1 localhost ", hostname, "\n::1 localhost\n"])?;
    }
    if !dns.is_empty() {
        let lines: Vec<&str> = dns.iter().flat_map(|server| ["nameserver ", server, "\n"]).collect();
        write(RESOLVERS, &lines)?;
    }
    Ok(())
}

/// The file's whole content. It is cut only where it was longer: of a fork it is mostly empty.
fn write(path: &str, text: &[&str]) -> io::Result<()> {
    let text = text.concat();
    let fill = |file: &File, had: i64| {
        file.write_all_at(text.as_bytes(), 0)?;
        if had > text.len() as i64 { file.set_len(text.len() as u64) } else { Ok(()) }
    };
    let opened = OPEN.get().and_then(|open| open.iter().find(|opened| opened.path == path));
    if let Some((opened, had)) = opened.and_then(|opened| Some((opened, opened.untouched()?))) {
        return fill(&opened.file, had);
    }
    let file = open(path)?;
    fill(&file, fstat(&file)?.st_size)
}

/// The same for the same instance, and another for every other: FNV-1a, which needs no library. In hexadecimal.
fn machine_id(instance: &str) -> String {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let hash = instance.bytes().fold(BASIS, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME));
    let digit = |place: u32| char::from_digit((hash >> (place * 4)) as u32 & 0xf, 16).unwrap_or('0');
    (0..u128::BITS / 4).rev().map(digit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_untouched_until_it_is_written_renamed_linked_or_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        let other = folder.path().join("other");
        let opened = || {
            fs::write(&path, "had").unwrap();
            let file = File::open(&path).unwrap();
            let changed = changed(&fstat(&file).unwrap());
            // The clock of a file system is coarse: what comes next must be later by it, too.
            let probe = File::create(folder.path().join("probe")).unwrap();
            while super::changed(&fstat(&probe).unwrap()) <= changed {
                probe.set_len(1).and_then(|()| probe.set_len(0)).unwrap();
            }
            Opened { path: HOSTS, file, changed }
        };
        type Touch<'a> = &'a dyn Fn() -> io::Result<()>;
        let touches: [Touch<'_>; 4] = [
            &|| fs::write(&path, "more"),
            &|| fs::rename(&path, &other),
            &|| fs::hard_link(&path, folder.path().join("second")),
            &|| fs::remove_file(&path),
        ];
        for touch in touches {
            let opened = opened();
            assert_eq!(opened.untouched(), Some(3));
            touch().unwrap();
            assert_eq!(opened.untouched(), None);
        }
    }

    #[test]
    fn a_machine_id_is_the_instances_own_and_stays() {
        assert_eq!(machine_id("i-1"), machine_id("i-1"));
        assert_ne!(machine_id("i-1"), machine_id("i-2"));
        // The published value for one letter.
        assert_eq!(machine_id("a"), "d228cb696f1a8caf78912b704e4a8964");
        assert_eq!(machine_id("a").len(), 32);
    }
}
