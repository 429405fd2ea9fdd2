//! Declared objects: what users write, and what the server keeps of it.
//!
//! Every kind is one file and one line in [`KINDS`]. All that serves objects (reading, storing, the API, the command
//! line, the schemas) is written once, over this table.

mod answers;
mod api_key;
mod event;
mod kind;
mod metadata;
mod node;
mod pool;
mod read;
mod rollout;
mod schema;
mod secret;
mod selector;
mod tenant;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::status::Condition;

pub use answers::{
    DemandShape, EmptyNode, FieldChange, FleetChange, FleetDemand, NodeChange, NodeFit, ObjectChange,
    Outcome, PlannedStep, PoolExplanation, PoolUnplaced, field_changes,
};
pub use api_key::{ApiKeySpec, ApiKeyStatus, KeyRole};
pub use event::{EventType, ObjectEvent};
pub use kind::{Column, Kind, Scope, Spec, kind_named};
pub use metadata::{MAX_LABELS, Metadata, check_label_key, check_label_value};
pub use node::{
    DrainStatus, DrainedInstance, ManagedBy, NodeObjectStatus, NodeResources, NodeSpec, Overcommit,
};
pub use pool::{
    NodeCounts, PoolCounts, PoolImage, PoolObjectStatus, PoolResources, PoolScale, PoolScaleStatus, PoolSpec,
    ScaleMetric, UnplacedCounts,
};
pub use read::{Declared, MAX_OBJECT_BYTES, read, read_tree};
pub use rollout::{
    CAUSE_ANNOTATION, NodeRollout, OnRolloutFailure, PlannedRollout, PoolRevision, PoolTemplate, PoolUpdate,
    RESUMED_ANNOTATION, RolloutDetail, RolloutPhase, RolloutStatus,
};
pub use schema::{kind_schema, openapi_schemas};
pub use secret::{
    GivenValue, GivenValues, MAX_SECRET_BYTES, MAX_SECRET_VALUES, MAX_TENANT_SECRET_BYTES,
    MAX_TENANT_SECRETS, SecretObjectStatus, SecretSpec, SecretValue,
};
pub use selector::{FieldSelector, LabelSelector, SelectorError};
pub use tenant::{OnDelete, TenantImages, TenantNetwork, TenantObjectStatus, TenantQuotas, TenantSpec};

/// The version of the objects that this build reads and writes.
pub const API_VERSION: &str = "mvm/v1";

/// Every kind, in the order in which objects that name each other are made.
pub static KINDS: [Kind; 5] = [
    Kind::of::<TenantSpec>(),
    Kind::of::<NodeSpec>(),
    Kind::of::<SecretSpec>(),
    Kind::of::<PoolSpec>(),
    Kind::of::<ApiKeySpec>(),
];

/// An object as the server keeps and shows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Object {
    pub api_version: String,
    pub kind: String,
    pub metadata: Metadata,
    /// With all defaults filled in.
    pub spec: Value,
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub status: Value,
}

impl Object {
    /// The spec as its kind's type. What was stored was read by that type.
    pub fn spec<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        T::deserialize(&self.spec)
    }

    /// The status as its kind's type; the default where there is none yet.
    pub fn status<T: DeserializeOwned + Default>(&self) -> Result<T, serde_json::Error> {
        if self.status.is_null() { Ok(T::default()) } else { T::deserialize(&self.status) }
    }

    /// The conditions of its status, whatever its kind.
    #[must_use]
    pub fn conditions(&self) -> Vec<Condition> {
        let conditions = self.status.get("conditions");
        conditions.and_then(|conditions| Vec::deserialize(conditions).ok()).unwrap_or_default()
    }

    /// `pool/acme/workers`: how people name it, and how the command line takes it.
    #[must_use]
    pub fn reference(&self) -> String {
        let kind = self.kind.to_lowercase();
        match &self.metadata.tenant {
            Some(tenant) => format!("{kind}/{tenant}/{}", self.metadata.name),
            None => format!("{kind}/{}", self.metadata.name),
        }
    }
}

/// What every status begins with.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Observed {
    /// The generation of the spec that the rest of the status is about.
    pub observed_generation: u64,
    #[schemars(with = "Vec<ShownCondition>")]
    pub conditions: Vec<Condition>,
}

/// A condition in the schemas.
#[derive(JsonSchema)]
#[schemars(rename = "Condition")]
#[allow(dead_code, reason = "it is there for its schema")]
struct ShownCondition {
    r#type: String,
    /// `True`, `False` or `Unknown`.
    status: String,
    reason: String,
    message: String,
    since: String,
}

#[cfg(test)]
mod tests;
