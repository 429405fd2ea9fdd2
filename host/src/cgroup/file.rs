//! Single files of a group: written, read back, compared; and waiting for what one of them tells.

use std::fs::{self, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::error::{CgroupError, failed};
use super::limits::Setting;

/// Writes to a file that is there. The kernel makes a group's files; one of ours beside them would limit nothing.
pub(super) fn write(file: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).truncate(true).open(file)?.write_all(text.as_bytes())
}

/// Makes a group, unless it is there already. Says whether it was made.
pub(super) fn make_group(group: &Path) -> io::Result<bool> {
    match fs::create_dir(group) {
        Ok(()) => Ok(true),
        Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(cause) => Err(cause),
    }
}

/// What came of making sure of a setting.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Applied {
    AsItWas,
    Changed {
        from: String,
    },
    /// The kernel has no such file, and the limit holds without it.
    NotThere,
}

/// Makes sure that a file of `group` holds what belongs in it: the kernel is asked what it took.
pub(super) fn apply(
    group: &Path,
    name: &str,
    setting: &Setting,
    page_size: u64,
) -> Result<Applied, CgroupError> {
    let file = group.join(setting.file);
    let from = match fs::read_to_string(&file) {
        Ok(from) => from,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound && !setting.needed && group.is_dir() => {
            return Ok(Applied::NotThere);
        }
        Err(cause) => return Err(failed(format!("read {} of {name}", setting.file))(cause)),
    };
    if setting.is_met_by(&from, page_size) {
        return Ok(Applied::AsItWas);
    }
    write(&file, &setting.value)
        .map_err(failed(format!("write {:?} to {} of {name}", setting.value, setting.file)))?;
    let found = fs::read_to_string(&file).map_err(failed(format!("read {} of {name} back", setting.file)))?;
    if !setting.is_met_by(&found, page_size) {
        return Err(CgroupError::NotTaken {
            group: name.to_owned(),
            file: setting.file.to_owned(),
            wanted: setting.value.clone(),
            found: found.trim().to_owned(),
        });
    }
    Ok(Applied::Changed { from: from.trim().to_owned() })
}

/// The number after a word at the start of a line, as in `oom_kill 3`.
pub(super) fn counter(text: &str, word: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(' ')?;
        if name == word { value.trim().parse().ok() } else { None }
    })
}

/// Waits until a word of `cgroup.events` has a value, by what the kernel tells, not by looking again and again. A
/// group that is gone holds nothing and is not frozen. Says whether it came to that before the deadline.
pub(super) fn wait_event(group: &Path, word: &str, value: u64, deadline: Instant) -> io::Result<bool> {
    let mut file = match fs::File::open(group.join("cgroup.events")) {
        Ok(file) => file,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(value == 0),
        Err(cause) => return Err(cause),
    };
    let mut text = String::new();
    loop {
        text.clear();
        file.rewind()?;
        match file.read_to_string(&mut text) {
            Ok(_) => {}
            Err(cause) if cause.raw_os_error() == Some(nix::libc::ENODEV) => return Ok(value == 0),
            Err(cause) => return Err(cause),
        }
        if counter(&text, word) == Some(value) {
            return Ok(true);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        // Reading began a new wait: a change between it and this call is not missed.
        let timeout = timespec(left);
        match poll(&mut [PollFd::new(&file, PollFlags::PRI)], Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(cause) => return Err(cause.into()),
        }
    }
}

/// A descriptor that a task can wait for.
#[allow(
    deprecated,
    reason = "what replaces it is unsafe for descriptors that are not owned, and this one is"
)]
pub(super) fn awaitable(descriptor: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(descriptor, interest)
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(file: &'static str, value: &str, needed: bool) -> Setting {
        Setting { file, value: value.to_owned(), needed }
    }

    #[test]
    fn a_setting_is_written_once_and_put_right_after_a_change() {
        let group = tempfile::tempdir().unwrap();
        fs::write(group.path().join("pids.max"), "max\n").unwrap();
        let pids = setting("pids.max", "7", true);
        let apply = || apply(group.path(), "a/b/c", &pids, 4096).unwrap();
        assert_eq!(apply(), Applied::Changed { from: "max".to_owned() });
        assert_eq!(apply(), Applied::AsItWas);
        fs::write(group.path().join("pids.max"), "900\n").unwrap();
        assert_eq!(apply(), Applied::Changed { from: "900".to_owned() });
    }

    #[test]
    fn a_file_that_takes_a_value_and_does_not_keep_it_is_caught() {
        let group = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/null", group.path().join("memory.max")).unwrap();
        let lie = apply(group.path(), "a/b/c", &setting("memory.max", "1048576", true), 4096);
        let told = lie.unwrap_err().to_string();
        assert_eq!(told, "wrote \"1048576\" to memory.max of a/b/c and read \"\" back");
    }

    #[test]
    fn a_file_that_is_not_there_is_passed_over_only_when_it_is_not_needed_and_never_made() {
        let group = tempfile::tempdir().unwrap();
        let optional = apply(group.path(), "a", &setting("memory.swap.max", "0", false), 4096);
        assert_eq!(optional.unwrap(), Applied::NotThere);
        apply(group.path(), "a", &setting("memory.max", "0", true), 4096).unwrap_err();
        assert!(!group.path().join("memory.max").exists());
        let gone = group.path().join("gone");
        apply(&gone, "a", &setting("memory.swap.max", "0", false), 4096).unwrap_err();
    }

    #[test]
    fn counters_are_found_by_their_whole_name() {
        let text = "low 1\noom 3\noom_kill 5\nodd\nbad x\n";
        assert_eq!(counter(text, "oom"), Some(3));
        assert_eq!(counter(text, "oom_kill"), Some(5));
        assert_eq!(counter(text, "oom_group_kill"), None);
        assert_eq!(counter(text, "bad"), None);
    }

    #[test]
    fn a_group_that_is_gone_is_empty_and_one_that_does_not_empty_is_not_waited_for_for_ever() {
        let group = tempfile::tempdir().unwrap();
        let deadline = Instant::now();
        assert!(wait_event(group.path(), "populated", 0, deadline).unwrap());
        assert!(!wait_event(group.path(), "frozen", 1, deadline).unwrap());
        fs::write(group.path().join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
        assert!(!wait_event(group.path(), "populated", 0, deadline).unwrap());
        assert!(wait_event(group.path(), "populated", 1, deadline).unwrap());
    }
}
