//! What happened to an object, as the API tells it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{TenantId, Timestamp};

/// Whether an operator should look at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum EventType {
    Normal,
    Warning,
}

impl EventType {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// Something that happened to an object, once or several times for the same reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ObjectEvent {
    /// `Pool`
    pub kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<TenantId>,
    pub name: String,
    /// Of the object that it happened to: a later one of its name is another.
    #[serde(default)]
    pub uid: String,
    /// Of the tenant that the object belongs to; empty of objects of the cluster.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tenant_uid: String,
    pub r#type: EventType,
    /// One word for programs: `Scheduled`, `Unplaced`, `Lost`.
    pub reason: String,
    /// For people, of the last time.
    pub message: String,
    /// How often it happened.
    pub count: u64,
    pub first_at: Timestamp,
    pub last_at: Timestamp,
}

impl ObjectEvent {
    /// `pool/acme/workers`
    #[must_use]
    pub fn object(&self) -> String {
        let kind = self.kind.to_lowercase();
        match &self.tenant {
            Some(tenant) => format!("{kind}/{tenant}/{}", self.name),
            None => format!("{kind}/{}", self.name),
        }
    }
}
