//! What can go wrong between an agent and a guest.

use std::time::Duration;

use mvm_proto::InstanceId;
use mvm_proto::guest::{Failure, MAX_VERSION, MIN_VERSION, Readiness};

use super::view::shortened;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    #[error("no connection to the guest of {0}: the instance is not running")]
    NoLink(InstanceId),
    #[error("the guest did not answer within {0:?}")]
    Silent(Duration),
    #[error("the guest was not ready within {waited:?}: it is {}", name(*readiness))]
    NotReady { waited: Duration, readiness: Readiness },
    #[error("the guest's workload failed: {0}")]
    WorkloadFailed(String),
    #[error("the guest refused ({code}): {message}")]
    Refused { code: String, message: String },
    #[error("the guest speaks version {version} of the protocol, and {what} needs version {needs}")]
    Unsupported { what: &'static str, needs: u32, version: u32 },
    #[error("the guest is too old to know `{0}`: build its image with the guest program of this version")]
    Lacks(&'static str),
    #[error(
        "the guest speaks versions {min} to {max} of the protocol, this agent {MIN_VERSION} to {MAX_VERSION}"
    )]
    NoCommonVersion { min: u32, max: u32 },
    #[error("the connection to the guest broke")]
    Broken,
    #[error("another stream follows this program now")]
    Replaced,
    #[error("the number of this program belongs to another request")]
    NumberTaken,
    #[error("the guest's answer does not match the request")]
    Unexpected,
    #[error("the guest's answer exceeds the size limit")]
    Flooded,
    #[error("too many requests to one guest are under way")]
    TooMany,
    #[error("the request exceeds the size limit of the guest protocol")]
    TooLong,
    #[error("could not read random bytes from the system: {0}")]
    NoEntropy(String),
}

impl From<Failure> for LinkError {
    fn from(failure: Failure) -> Self {
        Self::Refused { code: shortened(&failure.code), message: shortened(&failure.message) }
    }
}

fn name(readiness: Readiness) -> &'static str {
    match readiness {
        Readiness::Unspecified => "silent",
        Readiness::Starting => "starting",
        Readiness::Ready => "ready",
        Readiness::Idle => "idle",
        Readiness::Busy => "busy",
        Readiness::Failed => "failed",
    }
}
