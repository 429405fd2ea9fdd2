//! What a declared object makes of the stored one: a function of the two.

use mvm_proto::object::{API_VERSION, Declared, Metadata, Object, Outcome};
use mvm_proto::{Problem, Timestamp};
use serde_json::Value;

use crate::refuse;

/// What a caller means by a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Create it, or change it.
    Apply,
    /// It must not be there yet.
    Create,
}

/// The object as it is to be stored, without what the rules of its kind add.
pub(super) fn decide(
    before: Option<&Object>,
    declared: &Declared,
    mode: Mode,
    uid: impl FnOnce() -> String,
    now: Timestamp,
) -> Result<(Outcome, Object), Problem> {
    let Declared { kind, metadata, spec, .. } = declared;
    let seen = &metadata.resource_version;
    let Some(before) = before else {
        if !seen.is_empty() {
            return Err(refuse::no_object(kind, metadata.tenant.as_ref(), &metadata.name));
        }
        let object = Object {
            api_version: API_VERSION.to_owned(),
            kind: kind.name.to_owned(),
            metadata: Metadata {
                uid: uid(),
                generation: 1,
                created_at: Some(now),
                finalizers: kind.finalizers.iter().map(|name| (*name).to_owned()).collect(),
                ..metadata.clone()
            },
            spec: spec.clone(),
            status: Value::Null,
        };
        return Ok((Outcome::Created, object));
    };
    if mode == Mode::Create {
        return Err(refuse::already_exists(&before.reference()));
    }
    if !seen.is_empty() && *seen != before.metadata.resource_version {
        return Err(refuse::stale(&before.reference(), seen, &before.metadata.resource_version));
    }
    if before.metadata.deleting_since.is_some() {
        return Err(refuse::being_deleted(&before.reference()));
    }
    let same_spec = before.spec == *spec;
    let same_names =
        before.metadata.labels == metadata.labels && before.metadata.annotations == metadata.annotations;
    if same_spec && same_names {
        return Ok((Outcome::Unchanged, before.clone()));
    }
    let refused = kind.refused_changes(&before.spec, spec);
    if !refused.is_empty() {
        return Err(refuse::invalid(&before.reference()).with_errors(refused));
    }
    let mut after = before.clone();
    after.metadata.labels.clone_from(&metadata.labels);
    after.metadata.annotations.clone_from(&metadata.annotations);
    after.metadata.generation += u64::from(!same_spec);
    after.spec.clone_from(spec);
    Ok((Outcome::Configured, after))
}
