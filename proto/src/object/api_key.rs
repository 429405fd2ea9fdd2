//! An API key: what a program shows instead of a certificate, and what it may do with it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Observed;
use super::kind::{Column, Scope, Spec};
use crate::json::Node;
use crate::{FieldError, TenantId, Timestamp};

const API_KEY: &[&str] = &["role", "tenant", "expires_at"];

/// What a caller may do: verbs, kinds and tenants are in one table in the coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KeyRole {
    Admin,
    Operator,
    TenantAdmin,
    TenantUser,
    Viewer,
}

impl KeyRole {
    pub const ALL: [(&'static str, Self); 5] = [
        ("admin", Self::Admin),
        ("operator", Self::Operator),
        ("tenant-admin", Self::TenantAdmin),
        ("tenant-user", Self::TenantUser),
        ("viewer", Self::Viewer),
    ];

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Operator => "operator",
            Self::TenantAdmin => "tenant-admin",
            Self::TenantUser => "tenant-user",
            Self::Viewer => "viewer",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ApiKeySpec {
    pub role: KeyRole,
    /// The only tenant that it reaches. Absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<TenantId>,
    /// When it stops being accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub expires_at: Option<Timestamp>,
}

/// What the server says of a key. Its text is in the answer to the request that made it, and nowhere else.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ApiKeyStatus {
    #[serde(flatten)]
    pub observed: Observed,
    /// The public part of its text.
    pub key_id: String,
}

impl Spec for ApiKeySpec {
    const NAME: &'static str = "ApiKey";
    const PLURAL: &'static str = "api-keys";
    const SHORT: &'static str = "ak";
    const SCOPE: Scope = Scope::Cluster;
    const ABOUT: &'static str = "What a program shows instead of a certificate, and what it may do.";
    const COLUMNS: &'static [Column] = &[
        Column::new("ROLE", "spec.role"),
        Column::new("TENANT", "spec.tenant"),
        Column::new("EXPIRES", "spec.expires_at"),
        Column::wide("KEY_ID", "status.key_id"),
    ];
    type Status = ApiKeyStatus;

    fn read(node: &Node<'_, '_>) -> Option<Self> {
        let fields = node.fields(API_KEY)?;
        let role = fields.get("role", |node| node.choice(&KeyRole::ALL));
        let tenant = fields.maybe("tenant", |node| node.parse());
        let expires_at = fields.maybe("expires_at", |node| node.parse());
        if let (Some(role), Some(None)) = (role, &tenant)
            && matches!(role, KeyRole::TenantAdmin | KeyRole::TenantUser)
        {
            return node.refuse_as(
                format_args!("must have the field tenant, for the role {}", role.as_str()),
                "none",
            );
        }
        Some(Self { role: role?, tenant: tenant?, expires_at: expires_at? })
    }

    fn refused_changes(&self, next: &Self) -> Vec<FieldError> {
        let stays = |path: &str, same: bool| {
            (!same).then(|| FieldError {
                path: path.to_owned(),
                expected: "must stay as it is: make another key instead".to_owned(),
                found: "a change".to_owned(),
            })
        };
        [stays("spec.role", self.role == next.role), stays("spec.tenant", self.tenant == next.tenant)]
            .into_iter()
            .flatten()
            .collect()
    }
}
