//! A Secret: named values that are written and never read back.
//!
//! A value that a user gives is split off while it is read ([`GivenValues`]): no spec, no answer and no log has it. What a spec
//! says of a value is how long it is and a keyed digest, which tells whether it is another one than before, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{GeneralPurpose, GeneralPurposeConfig};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::Observed;
use super::kind::{Column, Scope, Spec};
use crate::id;
use crate::json::{Json, Node};

/// The most values of one Secret.
pub const MAX_SECRET_VALUES: usize = 64;
/// The most bytes of all values of one Secret: with base64 around them they fit an object's text.
pub const MAX_SECRET_BYTES: usize = 128 * 1024;
/// The most Secrets of a tenant.
pub const MAX_TENANT_SECRETS: usize = 256;
/// The most bytes of all values of a tenant's Secrets. Whichever of them a pool names, they fit one bundle, also where each
/// byte takes six (`\u0000`).
pub const MAX_TENANT_SECRET_BYTES: u64 = 512 * 1024;
/// The most Secrets that a pool names.
const MAX_POOL_SECRETS: usize = 32;
const MAX_VALUE_NAME: usize = 128;
const VALUE_NAME_PATTERN: &str = "^[A-Za-z0-9_.-]{1,128}$";
const BASE64_PATTERN: &str = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$";
/// Whatever the bits are that base64 leaves over: the pattern says all that is asked of a text.
const BASE64: GeneralPurpose =
    GeneralPurpose::new(&STANDARD, GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true));

const SECRET: &[&str] = &["data"];
const VALUE: &[&str] = &["base64", "bytes", "digest"];

/// Named values, encrypted in the store. `get` shows of each how long it is, and a digest that changes with it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct SecretSpec {
    /// Written as text, or as `{base64: TEXT}`. What `get` shows of a value stands for the value as it is.
    #[schemars(schema_with = "data_schema")]
    pub data: BTreeMap<String, SecretValue>,
}

/// What is told of a value.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretValue {
    pub bytes: u64,
    /// Of the value and a key that no one is told; empty of a value that is only declared.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub digest: String,
    #[serde(skip)]
    given: Option<GivenValue>,
}

impl SecretValue {
    #[must_use]
    pub fn stored(bytes: u64, digest: String) -> Self {
        Self { bytes, digest, given: None }
    }
}

/// A value as a user gave it; wiped when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct GivenValue {
    pub bytes: Zeroizing<Vec<u8>>,
    /// Given as text, and shown to guests as such.
    pub is_text: bool,
}

impl fmt::Debug for GivenValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GivenValue {{ {} bytes }}", self.bytes.len())
    }
}

/// The values that a declared object gives, by their names: in no spec.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GivenValues(pub BTreeMap<String, GivenValue>);

/// What the server says of a Secret.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SecretObjectStatus {
    #[serde(flatten)]
    pub observed: Observed,
    /// Of all its values together.
    pub bytes: u64,
}

impl Spec for SecretSpec {
    const NAME: &'static str = "Secret";
    const PLURAL: &'static str = "secrets";
    const SHORT: &'static str = "sec";
    const SCOPE: Scope = Scope::Tenant;
    const ABOUT: &'static str = "Named values for a tenant's guests: written, and never read back.";
    const COLUMNS: &'static [Column] =
        &[Column::new("VALUES", "spec.data"), Column::new("BYTES", "status.bytes")];
    type Status = SecretObjectStatus;

    /// No error of it repeats what it found: that may be a value.
    fn read(node: &Node<'_, '_>) -> Option<Self> {
        if !matches!(node.value(), Json::Object(_)) {
            return node.refuse_as("must be an object", what(node.value()));
        }
        let fields = node.fields(SECRET)?;
        let data = fields.or("data", BTreeMap::new(), |node| data(&node));
        Some(Self { data: data? })
    }

    fn take_given(&mut self) -> GivenValues {
        let given =
            self.data.iter_mut().filter_map(|(name, value)| Some((name.clone(), value.given.take()?)));
        GivenValues(given.collect())
    }
}

fn data(node: &Node<'_, '_>) -> Option<BTreeMap<String, SecretValue>> {
    if !matches!(node.value(), Json::Object(_)) {
        return node.refuse_as("must be an object of values by their names", what(node.value()));
    }
    if node.len() > MAX_SECRET_VALUES {
        return node.refuse_as(format_args!("must have at most {MAX_SECRET_VALUES} values"), node.len());
    }
    let mut values = Some(BTreeMap::new());
    let mut bytes = 0;
    for (name, value) in node.entries()? {
        let read = if is_value_name(name) {
            self::value(&value)
        } else {
            let rule = format_args!("must have a name of 1 to {MAX_VALUE_NAME} letters, digits and -_.");
            value.refuse_as(rule, "another name")
        };
        match (read, &mut values) {
            (Some(read), Some(values)) => {
                bytes += read.given.as_ref().map_or(0, |given| given.bytes.len());
                values.insert(name.to_owned(), read);
            }
            _ => values = None,
        }
    }
    if bytes > MAX_SECRET_BYTES {
        let rule = format_args!("must have at most {MAX_SECRET_BYTES} bytes in all values");
        return node.refuse_as(rule, format_args!("{bytes} bytes"));
    }
    values
}

fn value(node: &Node<'_, '_>) -> Option<SecretValue> {
    match node.value() {
        Json::Str(text) => Some(given(Zeroizing::new(text.as_bytes().to_vec()), true)),
        Json::Object(_) => {
            let fields = node.fields(VALUE)?;
            let decoded = fields.maybe("base64", |node| {
                let Json::Str(text) = node.value() else {
                    return node.refuse_as("must be a string", what(node.value()));
                };
                // Of its full size at once: a buffer that grows leaves copies behind.
                let mut bytes = Zeroizing::new(Vec::with_capacity(text.len()));
                match BASE64.decode_vec(text.as_bytes(), &mut bytes) {
                    Ok(()) => Some(bytes),
                    Err(_) => node.refuse_as("must be base64, with padding", "something else"),
                }
            })?;
            if let Some(bytes) = decoded {
                return Some(given(bytes, false));
            }
            // What `get` showed stands for the value that is stored.
            let bytes = fields.get("bytes", |node| match node.value() {
                Json::Number(_) => node.integer(0..=MAX_SECRET_BYTES as u64),
                other => node.refuse_as("must be the length that the server showed", what(other)),
            });
            let digest = fields.get("digest", |node| match node.value() {
                Json::Str(text) if text.len() <= MAX_VALUE_NAME => Some(text.to_string()),
                other => node.refuse_as("must be the digest that the server showed", what(other)),
            });
            Some(SecretValue::stored(bytes?, digest?))
        }
        other => node.refuse_as("must be a string, or {base64: TEXT}", what(other)),
    }
}

fn given(bytes: Zeroizing<Vec<u8>>, is_text: bool) -> SecretValue {
    let length = bytes.len() as u64;
    SecretValue { bytes: length, digest: String::new(), given: Some(GivenValue { bytes, is_text }) }
}

fn is_value_name(text: &str) -> bool {
    let is_of_it = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    (1..=MAX_VALUE_NAME).contains(&text.len()) && text.bytes().all(is_of_it)
}

/// The kind of a value, and nothing of what it says.
fn what(value: &Json<'_>) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "true or false",
        Json::Number(_) => "a number",
        Json::Str(_) => "a string",
        Json::Array(_) => "an array",
        Json::Object(_) => "an object",
    }
}

fn data_schema(_: &mut SchemaGenerator) -> Schema {
    let text = json_schema!({ "type": "string", "maxLength": MAX_SECRET_BYTES });
    let base64 = json_schema!({
        "type": "object",
        "additionalProperties": false,
        "required": ["base64"],
        "properties": {
            "base64": { "type": "string", "pattern": BASE64_PATTERN, "maxLength": MAX_SECRET_BYTES.div_ceil(3) * 4 },
            "bytes": {},
            "digest": {},
        },
    });
    let stored = json_schema!({
        "type": "object",
        "additionalProperties": false,
        "required": ["bytes"],
        "properties": {
            "bytes": { "type": "integer", "minimum": 0, "maximum": MAX_SECRET_BYTES },
            "digest": { "type": "string", "maxLength": MAX_VALUE_NAME },
        },
    });
    json_schema!({
        "type": "object",
        "description": "Written as text, or as {base64: TEXT}. What `get` shows of a value stands for the value as it is.",
        "maxProperties": MAX_SECRET_VALUES,
        "propertyNames": { "pattern": VALUE_NAME_PATTERN },
        "additionalProperties": { "anyOf": [text, base64, stored] },
    })
}

/// The Secrets that a pool names, each once.
pub(super) fn names(node: &Node<'_, '_>) -> Option<BTreeSet<String>> {
    if node.len() > MAX_POOL_SECRETS {
        return node.refuse(format_args!("must be at most {MAX_POOL_SECRETS} names"));
    }
    let (mut names, mut all_good) = (BTreeSet::new(), true);
    for item in node.items()? {
        let name = item.text().and_then(|text| match id::check_name(text) {
            Ok(()) => Some(text.to_owned()),
            Err(rule) => item.refuse(rule),
        });
        let is_new =
            name.is_some_and(|name| names.insert(name) || item.refuse::<()>("must be named once").is_some());
        all_good &= is_new;
    }
    all_good.then_some(names)
}

pub(super) fn names_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "description": "The Secrets whose values its guests are given. What no pool names is on no node.",
        "uniqueItems": true,
        "maxItems": MAX_POOL_SECRETS,
        "items": { "type": "string", "pattern": id::NAME_PATTERN },
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{Declared, kind_named, kind_schema, read};
    use super::*;

    fn declared(data: &Value) -> Result<Declared, Vec<String>> {
        let object = json!({ "api_version": "mvm/v1", "kind": "Secret",
            "metadata": { "tenant": "acme", "name": "db" }, "spec": { "data": data } });
        read(object.to_string().as_bytes()).map_err(|errors| errors.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn values_are_split_off_while_they_are_read() {
        let read = declared(&json!({
            "PASSWORD": "hunter2", "key.der": { "base64": "AAH/" }, "same": { "bytes": 3, "digest": "d" }
        }));
        let read = read.unwrap();
        assert_eq!(
            read.spec,
            json!({ "data": { "PASSWORD": { "bytes": 7 }, "key.der": { "bytes": 3 },
                "same": { "bytes": 3, "digest": "d" } } })
        );
        let GivenValues(given) = &read.given;
        assert_eq!(given.len(), 2);
        assert!(given["PASSWORD"].is_text && *given["PASSWORD"].bytes == b"hunter2");
        assert!(!given["key.der"].is_text && *given["key.der"].bytes == [0, 1, 255]);
        assert!(!format!("{read:?}").contains("hunter2"), "{read:?}");
    }

    #[test]
    fn a_pool_names_secrets_once_each_and_in_any_order() {
        let pool = |secrets: Value| {
            let object = json!({ "api_version": "mvm/v1", "kind": "Pool",
                "metadata": { "tenant": "acme", "name": "web" },
                "spec": { "image": { "ref": "builtin:busybox" }, "resources": { "vcpus": 1, "mem_mib": 64 },
                    "secrets": secrets } });
            let read = read(object.to_string().as_bytes());
            read.map_err(|errors| errors.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(pool(json!(["tls", "db"])).unwrap().spec["secrets"], json!(["db", "tls"]));
        // What was stored before there were any is the same.
        assert!(pool(json!([])).unwrap().spec.get("secrets").is_none());
        let errors = pool(json!(["db", "DB", "db", 7])).unwrap_err();
        let paths: Vec<_> = errors.iter().filter_map(|error| error.split(':').next()).collect();
        assert_eq!(paths, ["spec.secrets[1]", "spec.secrets[2]", "spec.secrets[3]"], "{errors:?}");
        let many = (0..=MAX_POOL_SECRETS).map(|n| json!(format!("s{n}"))).collect();
        assert!(pool(many).is_err());
    }

    #[test]
    fn what_was_shown_and_is_given_anew_is_the_new_value() {
        // As a merge patch of what `get` shows makes it.
        let read = declared(&json!({ "a": { "bytes": 9, "digest": "d", "base64": "AA==" } })).unwrap();
        assert_eq!(read.spec, json!({ "data": { "a": { "bytes": 1 } } }));
    }

    #[test]
    fn no_error_repeats_a_value() {
        const VALUE: &str = "hunter2";
        for data in [
            json!(VALUE),
            json!([VALUE]),
            json!({ "a": [VALUE] }),
            json!({ "a": { "base64": VALUE } }),
            json!({ "a": { "base64": [VALUE] } }),
            json!({ "a": { "text": VALUE } }),
            json!({ "a": { "bytes": VALUE, "digest": [VALUE] } }),
            json!({ "a b": VALUE }),
            json!({ "": VALUE }),
            json!({ "a": VALUE, "b": 7 }),
        ] {
            let errors = declared(&data).unwrap_err();
            assert!(!errors.iter().any(|error| error.contains(VALUE)), "{errors:?}");
        }
    }

    #[test]
    fn values_are_bounded_in_number_and_size() {
        let many = |count: usize| (0..count).map(|n| (format!("v{n}"), json!("x"))).collect::<Value>();
        assert!(declared(&many(MAX_SECRET_VALUES)).is_ok());
        assert!(declared(&many(MAX_SECRET_VALUES + 1)).is_err());
        let half = "x".repeat(MAX_SECRET_BYTES / 2);
        assert!(declared(&json!({ "a": half, "b": half })).is_ok());
        let errors = declared(&json!({ "a": half, "b": format!("{half}x") })).unwrap_err();
        assert!(errors[0].contains("at most 131072 bytes"), "{errors:?}");
        let longest = "n".repeat(MAX_VALUE_NAME);
        assert!(declared(&json!({ longest.clone(): "x" })).is_ok());
        assert!(declared(&json!({ format!("{longest}n"): "x" })).is_err());
    }

    #[test]
    fn the_schema_takes_what_is_written_and_what_is_shown() {
        let schema = kind_schema(kind_named("sec").unwrap());
        let validator = jsonschema::validator_for(&schema).unwrap();
        let valid = |data: &Value| {
            validator.is_valid(&json!({ "api_version": "mvm/v1", "kind": "Secret",
                "metadata": { "tenant": "acme", "name": "db" }, "spec": { "data": data } }))
        };
        for data in [
            json!({}),
            json!({ "A": "text", "b-c.d": { "base64": "AAE=" } }),
            json!({ "A": { "bytes": 3, "digest": "x" } }),
            json!({ "A": { "bytes": 3 } }),
        ] {
            assert!(valid(&data), "{data}");
        }
        for data in [json!({ "A": 1 }), json!({ "A b": "x" }), json!({ "A": { "base64": "A" } }), json!([])] {
            assert!(!valid(&data) && declared(&data).is_err(), "{data}");
        }
        assert!(declared(&json!({ "A": { "bytes": 3 } })).is_err(), "that says nothing of the value");
        // Bits that base64 leaves over are no error, as the pattern knows nothing of them.
        assert!(valid(&json!({ "A": { "base64": "AAF=" } })));
        assert!(declared(&json!({ "A": { "base64": "AAF=" } })).is_ok());
    }
}
