//! From text to a declared object: strict, and with everything that is wrong at once.

use serde_json::Value;

use super::API_VERSION;
use super::kind::{Kind, Scope, kind_named};
use super::metadata::{self, Metadata};
use super::secret::GivenValues;
use crate::FieldError;
use crate::json::{Json, Node, Report};

/// The largest object, as text.
pub const MAX_OBJECT_BYTES: usize = 256 * 1024;

const OBJECT: &[&str] = &["api_version", "kind", "metadata", "spec", "status"];

/// An object as a user declared it: valid by itself, with all defaults filled in.
#[derive(Debug, Clone)]
pub struct Declared {
    pub kind: &'static Kind,
    /// What the server owns is not in it, but for the version that the user saw, if one was given.
    pub metadata: Metadata,
    pub spec: Value,
    /// The values of a Secret, which are in no spec.
    pub given: GivenValues,
}

/// Reads one object. `status` and what the server owns of the metadata may be there, as in what `get` shows; they are
/// not taken over.
pub fn read(bytes: &[u8]) -> Result<Declared, Vec<FieldError>> {
    let report = Report::default();
    let declared =
        Json::read(bytes, MAX_OBJECT_BYTES, &report).and_then(|json| object(&Node::root(&json, &report)));
    match (declared, report.into_errors()) {
        (Some(declared), errors) if errors.is_empty() => Ok(declared),
        (_, errors) => Err(errors),
    }
}

/// The same from a tree that was read already.
pub fn read_tree(json: &Json<'_>) -> Result<Declared, Vec<FieldError>> {
    let report = Report::default();
    match (object(&Node::root(json, &report)), report.into_errors()) {
        (Some(declared), errors) if errors.is_empty() => Ok(declared),
        (_, errors) => Err(errors),
    }
}

fn object(node: &Node<'_, '_>) -> Option<Declared> {
    let fields = node.fields(OBJECT)?;
    let version = fields.get("api_version", |node| match node.text()? {
        API_VERSION => Some(()),
        _ => node.refuse(format_args!("must be `{API_VERSION}`")),
    });
    let kind = fields.get("kind", |node| {
        let named = kind_named(node.text()?);
        match named {
            // Objects say their kind as the tables and schemas do.
            Ok(kind) if node.text() == Some(kind.name) => Some(kind),
            Ok(kind) => node.refuse(format_args!("must be written `{}`", kind.name)),
            Err(rule) => node.refuse(rule),
        }
    });
    let metadata = fields.get("metadata", |node| {
        let metadata = metadata::read(&node, kind)?;
        if kind.is_some_and(|kind| kind.scope == Scope::Tenant) && metadata.tenant.is_none() {
            return node
                .refuse_as("must have the field tenant, as objects of this kind belong to one", "none");
        }
        Some(metadata)
    });
    // A kind whose fields all have defaults may be declared without any.
    let spec = match (kind, fields.node("spec")) {
        (Some(kind), Some(node)) => kind.read(&node),
        (Some(kind), None) => {
            let empty = Json::Object(Vec::new());
            let report = Report::default();
            match (kind.read(&Node::root(&empty, &report)), report.is_empty()) {
                (Some(spec), true) => Some(spec),
                _ => fields.get("spec", |_| None),
            }
        }
        (None, _) => None,
    };
    version?;
    let (spec, given) = spec?;
    Some(Declared { kind: kind?, metadata: metadata?, spec, given })
}
