//! Checks that only root can have changed a program that is to be started as a VMM.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use super::policy::{Policy, refused};
use crate::HostError;
use crate::files::failed;

const WRITABLE_BY_OTHERS: u32 = 0o022;

/// A file of root's that no other user can write, in directories that are not the agent's to change, by a path without
/// links: what it is started by later leads to the same file.
pub(super) fn check(program: &Path, policy: &Policy) -> Result<(), HostError> {
    let meta = match fs::metadata(program) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
            return Err(HostError::ProgramMissing { program: program.to_owned() });
        }
        meta => meta.map_err(failed("look at", program))?,
    };
    // Without root there is no one to protect from the agent.
    let user = rustix::process::geteuid().as_raw();
    let trusted = |meta: &Metadata| meta.uid() == 0 || meta.uid() == user;
    if !meta.is_file() || !trusted(&meta) || meta.permissions().mode() & WRITABLE_BY_OTHERS != 0 {
        return refused(format!("{} may be changed by others than root; give it to root", program.display()));
    }
    if program.canonicalize().map_err(failed("find", program))?.as_os_str() != program.as_os_str() {
        return refused(format!("{} leads through a link; name what it leads to", program.display()));
    }
    crate::ownership::check_way(program, policy.agent_uid, &policy.agent_gids)
}
