//! The JSON Schema of the document, generated from its types, for editors and other people's tools.
//!
//! What a schema can say, it says; the decoder is the rule. Everything that the decoder accepts is valid under the
//! schema. Beyond it the decoder checks what compares fields (uniqueness, overlaps, sums) and refuses integers that
//! are written with a fraction (`1.0`), which JSON Schema takes for integers.

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value};

use super::{DesiredState, Provenance};

/// The schema's name. A URN, because it need not be fetched from anywhere: `mvm schema desired-state` prints it.
pub const SCHEMA_ID: &str = "urn:mvm:schema:desired-state:v1";

const DESCRIPTION: &str = "What one mvm node is meant to run. The coordinator adds cluster, epoch, generation, \
                           issued_at and expires_at when it signs the document; a local file leaves all but \
                           cluster out.";

/// The JSON Schema (draft 2020-12) of a desired-state document, as users write it and as coordinators sign it.
#[must_use]
pub fn desired_state_schema() -> Value {
    let mut generator = SchemaSettings::draft2020_12().into_generator();
    let assigned = generator.root_schema_for::<Provenance>().to_value();
    let mut schema = generator.into_root_schema_for::<DesiredState>().to_value();
    drop_null(&mut schema);
    if let Value::Object(root) = &mut schema {
        root.insert("$id".into(), SCHEMA_ID.into());
        root.insert("title".into(), "mvm desired state".into());
        root.insert("description".into(), DESCRIPTION.into());
        if let (Some(Value::Object(to)), Some(Value::Object(from))) =
            (root.get_mut("properties"), assigned.get("properties"))
        {
            to.extend(from.clone());
        }
    }
    schema
}

/// An optional field may be absent, but it may not be null: the generator allows both.
pub fn drop_null(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            drop_null_type(members);
            members.values_mut().for_each(drop_null);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_null),
        _ => {}
    }
}

fn drop_null_type(members: &mut Map<String, Value>) {
    if let Some(Value::Array(types)) = members.get("type")
        && let [only] = &types.iter().filter(|name| *name != "null").collect::<Vec<_>>()[..]
    {
        let only = (*only).clone();
        members.insert("type".into(), only);
    }
    let null = |schema: &Value| schema.get("type").is_some_and(|name| name == "null");
    if let Some(Value::Array(choices)) = members.get("anyOf")
        && choices.iter().any(null)
        && let [Value::Object(only)] = &choices.iter().filter(|c| !null(c)).cloned().collect::<Vec<_>>()[..]
    {
        members.remove("anyOf");
        members.extend(only.clone());
    }
}
