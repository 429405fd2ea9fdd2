//! Opens files and VMM sockets in a run directory for a caller that may not do so itself.
//!
//! A run directory, or the jail of its instance, may be under the control of a VMM that a guest has taken over: every access
//! goes through [`Dir`], which follows no links and opens only the requested kind of file.

use std::fs::File;
use std::os::unix::net::UnixStream;

use mvm_proto::InstanceId;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use super::HostError;
use super::data_dir::DataDir;
use super::files::{self, Dir, FILE_MODE, OpenHow, failed};
use super::jail;

/// The first part of a name that is to be looked for in the instance's jail, wherever that is.
pub const JAIL: &str = "jail";

/// What is to be done with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    Read,
    /// One that may have names elsewhere, as a template's memory has.
    ReadShared,
    /// To write a new one: a name that is taken is an error.
    Create,
}

/// The open directory in which to look, and the name to look for there.
fn place<'a>(
    data: &DataDir,
    instance: &InstanceId,
    name: &'a str,
) -> Result<(Dir, &'a std::ffi::OsStr), HostError> {
    match name.split_once('/') {
        Some((JAIL, rest)) => Ok((jail::open_recorded(data, instance)?, rest.as_ref())),
        _ => data.run(instance)?.place(name),
    }
}

/// A file in a run directory or its jail; none when it is not there.
pub(super) fn open(
    data: &DataDir,
    instance: &InstanceId,
    name: &str,
    access: Access,
) -> Result<Option<File>, HostError> {
    // A jail has second names for files of the run directory. Without one, a second name is someone's trick.
    let how = match jail::recorded_jail(data, instance) {
        Some(_) => OpenHow::ReadShared,
        None => OpenHow::Read,
    };
    let opened = place(data, instance, name).and_then(|(dir, name)| match access {
        Access::Read => dir.open_file(name, how),
        Access::ReadShared => dir.open_file(name, OpenHow::ReadShared),
        // Opened for writing: the receiver can't read what others wrote to it.
        Access::Create => {
            let made = dir.create_new(name, FILE_MODE)?;
            files::reopen(&made, OFlags::WRONLY).map_err(|errno| failed("open", dir.path())(errno.into()))
        }
    });
    match opened {
        Err(error) if error.is_not_found() && access != Access::Create => Ok(None),
        opened => opened.map(Some),
    }
}

/// Leaves only the end of a log on the disk. One that is not there takes no space.
pub(super) fn punch_log(
    data: &DataDir,
    instance: &InstanceId,
    name: &str,
    max_bytes: u64,
) -> Result<(), HostError> {
    match place(data, instance, name).and_then(|(dir, name)| dir.punch_log(name, max_bytes)) {
        Err(error) if error.is_not_found() => Ok(()),
        punched => punched,
    }
}

/// A connection to a socket in a run directory or its jail. Never waits: a VMM that has no time is
/// [`WouldBlock`](std::io::ErrorKind::WouldBlock).
pub(super) fn dial(data: &DataDir, instance: &InstanceId, name: &str) -> Result<UnixStream, HostError> {
    let (dir, name) = place(data, instance, name)?;
    dir.connect_socket(name)
}

/// The names in a run directory; none of one that is not there.
pub(super) fn names(data: &DataDir, instance: &InstanceId) -> Result<Vec<String>, HostError> {
    let mut names: Vec<String> = match data.run(instance) {
        Err(error) if error.is_not_found() => return Ok(Vec::new()),
        dir => dir?.list()?.into_iter().map(|name| name.to_string_lossy().into_owned()).collect(),
    };
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn what_a_vmm_put_in_the_place_of_a_file_or_a_socket_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (secret, run_dir) = (dir.path().join("secret"), dir.path().join("vms/i-00000007"));
        let (data, id) = (DataDir::named(dir.path()), InstanceId::from_bits(7));
        std::fs::create_dir_all(run_dir.join("sub")).unwrap();
        std::fs::write(&secret, "of the host").unwrap();
        let _listening = UnixListener::bind(dir.path().join("host.sock")).unwrap();
        symlink(&secret, run_dir.join("console.log")).unwrap();
        symlink(dir.path(), run_dir.join("up")).unwrap();
        symlink("../../host.sock", run_dir.join("qmp.sock")).unwrap();
        nix::unistd::mkfifo(&run_dir.join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        for name in ["console.log", "up/secret", "pipe", "sub"] {
            open(&data, &id, name, Access::Read).unwrap_err();
        }
        for name in ["qmp.sock", "up/host.sock", "pipe"] {
            dial(&data, &id, name).unwrap_err();
        }
        open(&data, &id, "up/new", Access::Create).unwrap_err();
        assert!(!dir.path().join("new").exists());
        // What lies there by that name is no jail: where one is, is written down elsewhere.
        symlink(dir.path(), run_dir.join("jail")).unwrap();
        assert!(open(&data, &id, "jail/secret", Access::Read).unwrap().is_none());
    }
}
