//! Tenants that were deleted together with their data.

use schemars::JsonSchema;
use serde::Serialize;

use crate::TenantId;

/// The most bytes of the uid of a tenant's object.
pub const MAX_UID_BYTES: usize = 64;
/// The most stores of sessions that one tenant's pools ever named.
pub const MAX_SESSION_STORES: usize = 256;

/// A tenant whose sessions, disks and secrets this node deletes. What is in force of it beside this list is nothing: it
/// is not among `tenants`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct RemovedTenant {
    pub tenant_id: TenantId,
    /// Which of the tenants that had this name: the uid of its object. The node names it when it says that it is done.
    #[schemars(length(min = 1, max = 64), regex(pattern = "^[!-~]+$"))]
    pub uid: String,
    /// The stores that have sessions of it, as pools name them (`persist.store`), besides `local`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        default,
        length(max = 256),
        inner(
            length(max = 2048),
            regex(pattern = "^(local|file:///[!-~]+|s3://[a-z0-9-][a-z0-9.-]{2,62}(/[!-~]*)?)$")
        )
    )]
    pub session_stores: Vec<String>,
}
