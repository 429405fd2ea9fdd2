//! Where run directories and records of jails lie: `<data>/vms` and `<data>/jails`.
//!
//! A helper opens both once, at its start, and holds them: from then on neither is looked up by a path again. Any other
//! process looks them up for each operation, for it may be there before they are.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use mvm_proto::InstanceId;

use super::HostError;
use super::files::Dir;

/// Run directories of instances.
pub(crate) const VMS_DIR: &str = "vms";

/// A file per jailed instance that says where its jail is. It is not in the run directory, which may be the VMM's to
/// write to.
pub(crate) const JAILS_DIR: &str = "jails";

/// The directories of one data directory. Clones share what is held.
#[derive(Debug, Clone)]
pub(crate) struct DataDir {
    path: PathBuf,
    held: Option<Arc<Held>>,
}

#[derive(Debug)]
struct Held {
    vms: Dir,
    jails: Dir,
}

impl DataDir {
    /// Looked up by path for each operation.
    pub(crate) fn named(path: &Path) -> Self {
        Self { path: path.to_owned(), held: None }
    }

    /// Opened now, made if need be, and held. Neither may be a link, nor anyone's but this user's or root's.
    pub(crate) fn hold(path: &Path) -> Result<Self, HostError> {
        let data_dir = Dir::open_shared_root(path)?;
        let hold = |name| data_dir.open_own(name);
        let held = Held { vms: hold(VMS_DIR)?, jails: hold(JAILS_DIR)? };
        Ok(Self { path: path.to_owned(), held: Some(Arc::new(held)) })
    }

    pub(crate) fn vms_path(&self) -> PathBuf {
        self.path.join(VMS_DIR)
    }

    pub(crate) fn run_path(&self, instance: &InstanceId) -> PathBuf {
        self.vms_path().join(instance.as_str())
    }

    pub(crate) fn vms(&self) -> Result<Dir, HostError> {
        match &self.held {
            Some(held) => held.vms.again(),
            None => Dir::open_root(&self.vms_path()),
        }
    }

    /// The same, made if need be.
    pub(crate) fn make_vms(&self) -> Result<Dir, HostError> {
        match &self.held {
            Some(held) => held.vms.again(),
            None => Dir::make_root(&self.vms_path()),
        }
    }

    pub(crate) fn jails(&self) -> Result<Dir, HostError> {
        match &self.held {
            Some(held) => held.jails.again(),
            None => Dir::open_root(&self.path.join(JAILS_DIR)),
        }
    }

    /// The same, made if need be.
    pub(crate) fn make_jails(&self) -> Result<Dir, HostError> {
        match &self.held {
            Some(held) => held.jails.again(),
            None => Dir::make_root(&self.path.join(JAILS_DIR)),
        }
    }

    /// The run directory of an instance.
    pub(crate) fn run(&self, instance: &InstanceId) -> Result<Dir, HostError> {
        self.vms()?.sub(instance.as_str())
    }
}
