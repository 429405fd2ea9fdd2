//! Who this machine is.

use crate::protocol::{Mount, Reborn};

/// What of a request stays as it is until another instance comes of this machine: an instance that only woke has all
/// of it already.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) names: [String; 2],
    pub(crate) network: [String; 3],
    pub(crate) dns: Vec<String>,
    pub(crate) mounts: Vec<Mount>,
}

impl Identity {
    pub(crate) fn of(request: &Reborn) -> Self {
        Self {
            names: [request.instance_id.clone(), request.hostname.clone()],
            network: [request.address.clone(), request.gateway.clone(), request.mac.clone()],
            dns: request.dns.clone(),
            mounts: request.mounts.clone(),
        }
    }
}
