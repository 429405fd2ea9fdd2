//! How a driver's call fails.

use std::io;
use std::time::Duration;

use mvm_host::HostError;
use mvm_proto::{Digest, InstanceId};

use crate::capability::Lacking;
use crate::snapshot_key::KeyError;
use crate::vm::VmState;

#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error("{instance} has no VM to {action}")]
    NoVm { instance: InstanceId, action: &'static str },
    #[error("{instance} is {found:?} and can't {action}")]
    WrongState { instance: InstanceId, action: &'static str, found: VmState },
    #[error("{instance} already runs revision {running}, not {asked}")]
    OtherRevision { instance: InstanceId, running: Digest, asked: Digest },
    #[error("{instance} has no snapshot {digest}")]
    NoSnapshot { instance: InstanceId, digest: Digest },
    /// It is there, and never will be of use here: damaged, or made for something else.
    #[error("the snapshot of {instance} can't be used: {reason}")]
    Unusable { instance: InstanceId, reason: String },
    /// It is there and may be whole: it can be used once the key is there.
    #[error("could not {action} {instance} without its tenant's key")]
    Key {
        instance: InstanceId,
        action: &'static str,
        #[source]
        cause: KeyError,
    },
    #[error("could not {action} {instance}")]
    Io {
        instance: InstanceId,
        action: &'static str,
        #[source]
        cause: io::Error,
    },
    #[error("{instance}: {reason}")]
    Vmm { instance: InstanceId, reason: String },
    /// The VMM's own socket did not answer in time: stuck, not gone.
    #[error("the VMM of {instance} did not answer {action} within {waited:?}")]
    Stuck { instance: InstanceId, action: &'static str, waited: Duration },
    #[error(transparent)]
    Lacking(#[from] Lacking),
    #[error("could not look for VMs")]
    List {
        #[source]
        cause: HostError,
    },
    #[error("could not {action} {instance}")]
    Host {
        instance: InstanceId,
        action: &'static str,
        #[source]
        cause: HostError,
    },
}

pub(crate) fn same_revision(
    instance: &InstanceId,
    running: Digest,
    asked: Digest,
) -> Result<(), DriverError> {
    if running == asked {
        return Ok(());
    }
    Err(DriverError::OtherRevision { instance: instance.clone(), running, asked })
}
