//! What is particular to a kind, as data.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::KINDS;
use super::secret::GivenValues;
use crate::FieldError;
use crate::json::{Node, nearest};

/// Whether an object belongs to a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    Cluster,
    Tenant,
}

/// One column of a table of objects.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    pub title: &'static str,
    /// Where the value is: `status.counts.running`.
    pub path: &'static str,
    /// Shown only when asked for more.
    pub wide: bool,
}

impl Column {
    #[must_use]
    pub const fn new(title: &'static str, path: &'static str) -> Self {
        Self { title, path, wide: false }
    }

    #[must_use]
    pub const fn wide(title: &'static str, path: &'static str) -> Self {
        Self { title, path, wide: true }
    }
}

/// The spec of a kind. A new kind is an implementation of this and a line in [`KINDS`].
pub trait Spec: Serialize + DeserializeOwned + JsonSchema + 'static {
    const NAME: &'static str;
    /// Also the collection in the API.
    const PLURAL: &'static str;
    const SHORT: &'static str;
    const SCOPE: Scope;
    /// One sentence for people.
    const ABOUT: &'static str;
    const COLUMNS: &'static [Column];
    /// What must have been done before an object that was deleted is gone.
    const FINALIZERS: &'static [&'static str] = &[];
    type Status: JsonSchema + 'static;

    /// Reads a spec strictly, with defaults filled in; everything that is wrong is in the node's report.
    fn read(node: &Node<'_, '_>) -> Option<Self>;

    /// What of a change from `self` to `next` is refused.
    fn refused_changes(&self, _next: &Self) -> Vec<FieldError> {
        Vec::new()
    }

    /// Takes out what is written and never read back.
    fn take_given(&mut self) -> GivenValues {
        GivenValues::default()
    }
}

/// A kind of object.
#[derive(Debug)]
pub struct Kind {
    pub name: &'static str,
    pub plural: &'static str,
    pub short: &'static str,
    pub scope: Scope,
    pub about: &'static str,
    pub columns: &'static [Column],
    pub finalizers: &'static [&'static str],
    read: fn(&Node<'_, '_>) -> Option<(Value, GivenValues)>,
    refused_changes: fn(&Value, &Value) -> Vec<FieldError>,
    pub(super) spec_schema: fn(&mut SchemaGenerator) -> Schema,
    pub(super) status_schema: fn(&mut SchemaGenerator) -> Schema,
}

impl Kind {
    pub(super) const fn of<S: Spec>() -> Self {
        Self {
            name: S::NAME,
            plural: S::PLURAL,
            short: S::SHORT,
            scope: S::SCOPE,
            about: S::ABOUT,
            columns: S::COLUMNS,
            finalizers: S::FINALIZERS,
            read: |node| {
                let mut spec = S::read(node)?;
                let given = spec.take_given();
                Some((serde_json::to_value(spec).ok()?, given))
            },
            refused_changes: |from, to| match (S::deserialize(from), S::deserialize(to)) {
                (Ok(from), Ok(to)) => from.refused_changes(&to),
                _ => Vec::new(),
            },
            spec_schema: |generator| generator.subschema_for::<S>(),
            status_schema: |generator| generator.subschema_for::<S::Status>(),
        }
    }

    /// Reads a spec of this kind, with defaults filled in. Values that are never read back come beside it.
    #[must_use]
    pub fn read(&self, node: &Node<'_, '_>) -> Option<(Value, GivenValues)> {
        (self.read)(node)
    }

    /// What of a change of a spec is refused.
    #[must_use]
    pub fn refused_changes(&self, from: &Value, to: &Value) -> Vec<FieldError> {
        (self.refused_changes)(from, to)
    }

    #[must_use]
    pub fn is_tenant_scoped(&self) -> bool {
        self.scope == Scope::Tenant
    }
}

/// The kind that people call this: by its name, plural or short name, in any case.
pub fn kind_named(text: &str) -> Result<&'static Kind, String> {
    let lower = text.to_lowercase();
    let is_called = |kind: &&Kind| {
        [kind.plural, kind.short].contains(&lower.as_str())
            || kind.name.to_lowercase() == lower
            || kind.plural.replace('-', "") == lower
            || kind.plural.trim_end_matches('s') == lower
    };
    KINDS.iter().find(is_called).ok_or_else(|| {
        let names = || KINDS.iter().map(|kind| kind.plural);
        let near = nearest(&lower, names().chain(KINDS.iter().map(|kind| kind.name)));
        let near = near.map(|near| format!("; did you mean {near}?")).unwrap_or_default();
        format!("there is no such kind{near} The kinds are {}", names().collect::<Vec<_>>().join(", "))
            .replace("kind The", "kind. The")
    })
}
