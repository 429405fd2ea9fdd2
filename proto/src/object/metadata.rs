//! What objects of all kinds have: names, labels, and what the server notes of them.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::kind::{Kind, Scope};
use crate::json::{Fields, Node};
use crate::placement::Labels;
use crate::{TenantId, Timestamp, id};

/// The most labels of an object, and the most annotations.
pub const MAX_LABELS: usize = 64;
/// The most bytes of the value of an annotation.
const MAX_ANNOTATION_BYTES: usize = 16 * 1024;

/// Fields of [`Metadata`] that users write, then those that the server does.
pub(super) const METADATA: &[&str] = &[
    "name",
    "tenant",
    "labels",
    "annotations",
    "uid",
    "generation",
    "resource_version",
    "created_at",
    "deleting_since",
    "finalizers",
];

/// Names, labels and what the server noted. What the server owns is ignored in what users send, but for
/// `resource_version`: a write that gives it is refused when the object has changed since.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct Metadata {
    /// One DNS label.
    #[schemars(regex(pattern = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"))]
    pub name: String,
    /// Of objects that belong to a tenant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<TenantId>,
    /// Selected by.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: Labels,
    /// Notes of tools and people; nothing selects by them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Never used again for another object.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// Grows with every change of the spec.
    #[serde(skip_serializing_if = "is_zero")]
    pub generation: u64,
    /// Grows with every change of the object.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resource_version: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub created_at: Option<Timestamp>,
    /// It is being deleted: it goes when its finalizers are done.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub deleting_since: Option<Timestamp>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub finalizers: Vec<String>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Reads what users may say of an object: its name, tenant, labels and annotations, and the version that they saw.
pub(super) fn read(node: &Node<'_, '_>, kind: Option<&Kind>) -> Option<Metadata> {
    let fields = node.fields(METADATA)?;
    let name = fields.get("name", |node| {
        let text = node.text()?;
        match id::check_name(text) {
            Ok(()) => Some(text.to_owned()),
            Err(rule) => node.refuse(rule),
        }
    });
    let tenant = tenant(&fields, kind);
    let labels = fields.or("labels", Labels::new(), |node| self::labels(&node));
    let annotations = fields.or("annotations", BTreeMap::new(), |node| {
        pairs(&node, |value| {
            (value.len() <= MAX_ANNOTATION_BYTES).then_some(()).ok_or("must be at most 16 KiB")
        })
    });
    let resource_version =
        fields.or("resource_version", String::new(), |node| match node.text()?.parse::<u64>() {
            Ok(_) => node.text().map(str::to_owned),
            Err(_) => node.refuse("must be a version that the server gave, or absent"),
        });
    Some(Metadata {
        name: name?,
        tenant: tenant?,
        labels: labels?,
        annotations: annotations?,
        resource_version: resource_version?,
        ..Metadata::default()
    })
}

fn tenant(fields: &Fields<'_, '_>, kind: Option<&Kind>) -> Option<Option<TenantId>> {
    match kind.map(|kind| kind.scope) {
        Some(Scope::Cluster) => match fields.node("tenant") {
            Some(node) => node.refuse("must be absent: objects of this kind belong to the cluster"),
            None => Some(None),
        },
        // A request may name the tenant elsewhere.
        Some(Scope::Tenant) | None => fields.maybe("tenant", |node| node.parse()),
    }
}

/// Reads labels: names and values that selectors can name.
pub(super) fn labels(node: &Node<'_, '_>) -> Option<Labels> {
    pairs(node, check_label_value)
}

fn pairs(
    node: &Node<'_, '_>,
    check: impl Fn(&str) -> Result<(), &'static str>,
) -> Option<BTreeMap<String, String>> {
    if node.len() > MAX_LABELS {
        return node.refuse(format_args!("must have at most {MAX_LABELS} entries"));
    }
    let mut pairs = Some(BTreeMap::new());
    for (key, value) in node.entries()? {
        let read = match check_label_key(key) {
            Err(rule) => value.refuse_as(format_args!("the key {rule}"), "another key"),
            Ok(()) => value.text().and_then(|text| match check(text) {
                Ok(()) => Some(text),
                Err(rule) => value.refuse(rule),
            }),
        };
        match (read, &mut pairs) {
            (Some(text), Some(pairs)) => {
                pairs.insert(key.to_owned(), text.to_owned());
            }
            _ => pairs = None,
        }
    }
    pairs
}

/// Accepts `team`, `app.kubernetes.io/name`: 1 to 63 letters, digits and `-_.`, after an optional DNS name and a slash.
pub fn check_label_key(text: &str) -> Result<(), &'static str> {
    const RULE: &str = "must be 1 to 63 letters, digits and -_. that begin and end with a letter or digit, after an optional DNS \
                        name and a slash";
    let (prefix, name) = text.rsplit_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    let is_prefix = |prefix: &str| {
        let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
        (1..=253).contains(&prefix.len()) && prefix.bytes().all(allowed)
    };
    if is_label(name) && !name.is_empty() && prefix.is_none_or(is_prefix) { Ok(()) } else { Err(RULE) }
}

/// Accepts up to 63 letters, digits and `-_.`.
pub fn check_label_value(text: &str) -> Result<(), &'static str> {
    const RULE: &str = "must be at most 63 letters, digits and -_. that begin and end with a letter or digit";
    if is_label(text) { Ok(()) } else { Err(RULE) }
}

fn is_label(text: &str) -> bool {
    let edge = |b: Option<&u8>| b.is_none_or(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= 63
        && edge(bytes.first())
        && edge(bytes.last())
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}
