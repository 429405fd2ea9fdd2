//! Why a request on an instance was not done. `intake::problem` gives each its code.

use std::net::Ipv4Addr;

use mvm_image::ImageError;
use mvm_proto::document::Subnet;
use mvm_proto::{InstanceId, ManualAction, Phase, PoolId, TenantId};
use mvm_vmm::{DriverError, DriverKind};
use tokio::task::JoinError;

use crate::execute::StepError;
use crate::instance::archive::ArchiveError;
use crate::instance::records::StateError;
use crate::instance::transfer::Transfer;
use crate::node::actor::Place;
use crate::secrets::SecretsError;

#[derive(Debug, thiserror::Error)]
pub enum ActionError {
    #[error("there is no instance {0} on this node")]
    Unknown(Place),
    #[error("another step on {0} is still under way")]
    Busy(InstanceId),
    #[error("{instance} is {phase}, and can't {action}")]
    Illegal { instance: InstanceId, phase: Phase, action: ManualAction, hint: &'static str },
    #[error("{instance} is {phase}, and the stream may not wake it")]
    Asleep { instance: InstanceId, phase: Phase },
    #[error("{instance} is being moved {transfer}")]
    Moving { instance: InstanceId, transfer: Box<Transfer> },
    #[error("the document in force does not say what {tenant}/{pool} is made of")]
    NoSpec { tenant: TenantId, pool: PoolId },
    #[error("{instance} is not started again")]
    NotVouched {
        instance: InstanceId,
        #[source]
        cause: ImageError,
    },
    #[error("{instance} is not started, for its tenant's secrets changed")]
    SecretsChanged {
        instance: InstanceId,
        #[source]
        cause: SecretsError,
    },
    #[error("{instance} is not started without its tenant's secrets")]
    SecretsMissing {
        instance: InstanceId,
        #[source]
        cause: SecretsError,
    },
    #[error("{instance} is not started now: {reason}")]
    NotReady { instance: InstanceId, reason: String },
    #[error("{instance} can't become {to}: {reason}")]
    NoRoom { instance: InstanceId, to: Phase, reason: String },
    #[error("could not record the action, so it was not done")]
    NotRecorded(#[source] StateError),
    #[error("could not {action} {instance}")]
    Step {
        action: ManualAction,
        instance: InstanceId,
        #[source]
        cause: StepError,
    },
    #[error("could not {action} the instance")]
    Aborted {
        action: ManualAction,
        #[source]
        cause: JoinError,
    },
    #[error("override_seconds must be at most {}", mvm_planner::MAX_OVERRIDE.as_secs())]
    WindowTooLong,
    #[error("could not read the console of {instance}")]
    NoConsole {
        instance: InstanceId,
        #[source]
        cause: DriverError,
    },
}

/// Why an instance was not moved between nodes.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    #[error(transparent)]
    Action(#[from] ActionError),
    #[error("{instance} can't be exported or imported: {reason}")]
    Immovable { instance: InstanceId, reason: &'static str },
    #[error("{0} is {1}, and only sleeping instances with a snapshot can be exported")]
    NotSleeping(InstanceId, Phase),
    #[error("{instance} slept under {theirs}, and this node runs {ours}")]
    OtherDriver { instance: InstanceId, theirs: DriverKind, ours: DriverKind },
    #[error(
        "{instance} has the address {address} in network {theirs}, and here {tenant} has network {ours} with {subnet}"
    )]
    OtherNetwork {
        instance: InstanceId,
        tenant: TenantId,
        address: Ipv4Addr,
        theirs: u16,
        ours: u16,
        subnet: Subnet,
    },
    #[error("{instance} needs its image on this node")]
    NoImage {
        instance: InstanceId,
        flake_ref: String,
        #[source]
        cause: StepError,
    },
    #[error("{0} is not part of that move on this node")]
    NotMoving(InstanceId),
    #[error("the stream does not show the ticket of a move that was ordered, or it was used")]
    NoTicket,
    #[error("the archive holds {found}, and {expected} was to come")]
    NotExpected { expected: String, found: String },
    #[error("{0} is claimed")]
    Claimed(InstanceId),
    #[error("{0} is not what that archive holds: it was not exported as it is now")]
    NotExported(InstanceId),
    #[error("could not use the archive")]
    BadArchive(#[from] ArchiveError),
    #[error("could not record the move of {0}, so nothing was done")]
    NotRecorded(InstanceId, #[source] StateError),
    /// The node does not take it in.
    #[error(transparent)]
    Taken(StateError),
    /// What is done between archive and driver did not succeed.
    #[error("could not export or import {instance}")]
    Step {
        instance: InstanceId,
        #[source]
        cause: StepError,
    },
    #[error("could not read the snapshot of {instance}")]
    Unread {
        instance: InstanceId,
        #[source]
        cause: std::io::Error,
    },
    #[error("could not export or import the instance")]
    Aborted(#[from] JoinError),
}
