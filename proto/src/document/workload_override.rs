//! What a pool's instances run in place of what their image says.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::guest;

/// The most arguments, and the most variables.
pub const MAX_WORKLOAD_ARGS: usize = 256;
pub const MAX_WORKLOAD_ENV: usize = 128;
/// The most bytes of one word or value, and of a variable's name.
pub const MAX_WORKLOAD_TEXT_BYTES: usize = 16 * 1024;
pub const MAX_ENV_NAME_BYTES: usize = 128;
/// The most bytes of all words, names and values: a guest is told them in one message, with everything else about it.
pub const MAX_WORKLOAD_BYTES: usize = 32 * 1024;

/// The highest user number; the one above it means "unchanged" to the kernel.
pub const MAX_USER_ID: u32 = u32::MAX - 1;
/// The most bytes of a user's name, as `useradd` has it.
pub const MAX_USER_NAME_BYTES: usize = 32;

/// Overrides what the image's `/etc/mvm/guest.json` says of the workload. What is absent is as the image says; at least one
/// is there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields, extend("minProperties" = 1))]
pub struct WorkloadOverride {
    /// The program and its first arguments; no shell. In place of all that the image says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64), inner(length(max = 16_384), regex(pattern = r"^[^\u0000]*$")))]
    pub command: Option<Vec<String>>,
    /// What comes after `command`; without one, in place of all but the first word of what the image says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256), inner(length(max = 16_384), regex(pattern = r"^[^\u0000]*$")))]
    pub args: Option<Vec<String>>,
    /// Added to the image's, and in place of those of the same name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "env_schema")]
    pub env: BTreeMap<String, String>,
    /// Where the program is started: a folder in the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4095), regex(pattern = "^/[!-~]*$"))]
    pub working_dir: Option<String>,
    /// As whom the program is started. Absent: root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<User>,
}

/// A user of the guest: by number, or by the name that its `/etc/passwd` has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum User {
    Id(#[schemars(range(min = 0, max = 4_294_967_294u32))] u32),
    Name(#[schemars(regex(pattern = "^[A-Za-z_][A-Za-z0-9_.-]{0,31}$"))] String),
}

impl WorkloadOverride {
    /// Whether it says nothing: no document has one like that.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// How much text there is in it.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let words = self.command.iter().chain(&self.args).flatten().map(String::len);
        let env = self.env.iter().map(|(name, value)| name.len() + value.len());
        words.chain(env).sum()
    }
}

impl From<&WorkloadOverride> for guest::WorkloadOverride {
    fn from(wanted: &WorkloadOverride) -> Self {
        let words = |words: &Option<Vec<String>>| words.clone().map(|words| guest::Words { words });
        let user = wanted.user.as_ref().map(|user| match user {
            User::Id(id) => guest::workload_override::User::Id(*id),
            User::Name(name) => guest::workload_override::User::Name(name.clone()),
        });
        Self {
            command: words(&wanted.command),
            args: words(&wanted.args),
            env: wanted.env.clone().into_iter().collect(),
            directory: wanted.working_dir.clone().unwrap_or_default(),
            user,
        }
    }
}

fn env_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "maxProperties": MAX_WORKLOAD_ENV,
        "propertyNames": { "maxLength": MAX_ENV_NAME_BYTES, "pattern": "^[A-Za-z_][A-Za-z0-9_]*$" },
        "additionalProperties": {
            "type": "string", "maxLength": MAX_WORKLOAD_TEXT_BYTES, "pattern": r"^[^\u0000]*$",
        },
    })
}
