//! Typed ids. One rule for all names, so that an id can be a path segment, a DNS label and a metric label.
//!
//! An id that exists is valid: the only constructors check. The text is private, so no other crate can make one by hand.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// The longest a name may be: one DNS label.
pub const MAX_NAME_LEN: usize = 63;

/// The rule for names as a JSON Schema pattern; [`check_name`] is the same rule in code.
pub const NAME_PATTERN: &str = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$";

/// The rule for instance ids as a JSON Schema pattern.
pub const INSTANCE_PATTERN: &str = "^i-[0-9a-f]{8}$";

/// `i-` and 8 hexadecimal digits.
const INSTANCE_LEN: usize = 10;

/// Why a text is not an id. The text itself is not repeated: it may be long, or hostile to a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    #[error("must be 1 to {MAX_NAME_LEN} characters of a-z, 0-9 and hyphen, with no hyphen at either end")]
    Name,
    #[error("must be `i-` followed by 8 lower-case hexadecimal digits")]
    Instance,
}

/// Accepts 1 to 63 of `[a-z0-9-]` with no hyphen at either end.
pub fn check_name(text: &str) -> Result<(), IdError> {
    let bytes = text.as_bytes();
    let allowed = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-';
    let length_ok = (1..=MAX_NAME_LEN).contains(&bytes.len());
    if length_ok && bytes.iter().all(allowed) && bytes[0] != b'-' && bytes[bytes.len() - 1] != b'-' {
        Ok(())
    } else {
        Err(IdError::Name)
    }
}

fn check_instance(text: &str) -> Result<(), IdError> {
    let hex = text.strip_prefix("i-").ok_or(IdError::Instance)?;
    let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    if hex.len() == 8 && hex.bytes().all(digit) { Ok(()) } else { Err(IdError::Instance) }
}

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident($text:ty), $check:path, $pattern:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name($text);

        impl $name {
            /// The id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                $check(text)?;
                Ok(Self(text.into()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.as_str().to_owned()
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self.as_str(), f)
            }
        }

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }
            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "pattern": $pattern })
            }
        }
    };
}

id_type!(
    /// One installation of mvm: the trust domain in every identity.
    ClusterId(Arc<str>), check_name, NAME_PATTERN
);
id_type!(
    /// One machine that runs an agent.
    NodeId(Arc<str>), check_name, NAME_PATTERN
);
id_type!(
    /// The boundary for quota, network, secrets and audit.
    TenantId(Arc<str>), check_name, NAME_PATTERN
);
id_type!(
    /// A homogeneous group of instances inside a tenant.
    PoolId(Arc<str>), check_name, NAME_PATTERN
);
id_type!(
    /// A named variant of what `flake_ref` builds.
    ProfileId(Arc<str>), check_name, NAME_PATTERN
);
id_type!(
    /// One microVM. Made by the agent: `i-` and 8 hexadecimal digits.
    InstanceId(InstanceText), check_instance, INSTANCE_PATTERN
);

/// Its text, which is always as long: kept in place, so that a node's many ids need no memory of their own.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct InstanceText([u8; INSTANCE_LEN]);

impl From<&str> for InstanceText {
    /// Of a text that [`check_instance`] accepted.
    fn from(text: &str) -> Self {
        let mut bytes = [b'0'; INSTANCE_LEN];
        bytes.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
        Self(bytes)
    }
}

impl std::ops::Deref for InstanceText {
    type Target = str;
    fn deref(&self) -> &str {
        // Only ASCII is accepted.
        str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl InstanceId {
    /// The id for these random bits.
    #[must_use]
    pub fn from_bits(bits: u32) -> Self {
        Self(format!("i-{bits:08x}").as_str().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_escape_a_path_or_confuse_a_reader_are_refused() {
        let long = "a".repeat(64);
        for bad in
            ["", "-a", "a-", "A", "a_b", "a.b", "..", "a/b", "a\0", "a\n", "ａ", "а", " a", long.as_str()]
        {
            assert_eq!(bad.parse::<TenantId>(), Err(IdError::Name), "{bad:?}");
        }
        for good in ["a", "0", "a-b", "node-abc123", &"a".repeat(63)] {
            assert_eq!(good.parse::<TenantId>().unwrap().as_str(), good);
        }
    }

    #[test]
    fn instance_ids_are_i_and_eight_hex_digits() {
        assert_eq!(InstanceId::from_bits(0xab).as_str(), "i-000000ab");
        assert_eq!("i-89abcdef".parse::<InstanceId>().unwrap().to_string(), "i-89abcdef");
        for bad in ["i-", "i-12345", "i-ABCDEF01", "x-00000000", "i-000000000"] {
            assert_eq!(bad.parse::<InstanceId>(), Err(IdError::Instance), "{bad:?}");
        }
    }
}
