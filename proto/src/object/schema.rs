//! The JSON Schema of each kind, generated from its types: for editors, and for the API's description.

use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::kind::Kind;
use super::{API_VERSION, KINDS, Metadata, ObjectEvent};
use crate::document::schema::drop_null;
use crate::problem::Problem;

/// The JSON Schema (draft 2020-12) of objects of this kind, as users write them and as the server shows them.
#[must_use]
pub fn kind_schema(kind: &Kind) -> Value {
    let mut generator = SchemaSettings::draft2020_12().into_generator();
    let mut schema = object_schema(kind, &mut generator);
    let definitions = generator.take_definitions(true);
    if let Value::Object(root) = &mut schema {
        root.insert("$schema".into(), "https://json-schema.org/draft/2020-12/schema".into());
        root.insert("$id".into(), format!("urn:mvm:schema:{}:v1", kind.name.to_lowercase()).into());
        root.insert("title".into(), format!("mvm {}", kind.name).into());
        if !definitions.is_empty() {
            root.insert("$defs".into(), Value::Object(definitions));
        }
    }
    drop_null(&mut schema);
    schema
}

/// The schemas of all kinds and of what else the API answers with, for OpenAPI's `components`.
#[must_use]
pub fn openapi_schemas() -> Map<String, Value> {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
    });
    let mut generator = settings.into_generator();
    let mut schemas = Map::new();
    for kind in &KINDS {
        schemas.insert(kind.name.to_owned(), object_schema(kind, &mut generator));
    }
    let _ = (generator.subschema_for::<Problem>(), generator.subschema_for::<ObjectEvent>());
    for (name, schema) in generator.take_definitions(true) {
        schemas.entry(name).or_insert(schema);
    }
    let mut schemas = Value::Object(schemas);
    drop_null(&mut schemas);
    match schemas {
        Value::Object(schemas) => schemas,
        _ => Map::new(),
    }
}

fn object_schema(kind: &Kind, generator: &mut SchemaGenerator) -> Value {
    let metadata = generator.subschema_for::<Metadata>();
    let spec = (kind.spec_schema)(generator);
    let status = (kind.status_schema)(generator);
    json!({
        "type": "object",
        "description": kind.about,
        "additionalProperties": false,
        "required": ["api_version", "kind", "metadata"],
        "properties": {
            "api_version": { "const": API_VERSION },
            "kind": { "const": kind.name },
            "metadata": metadata,
            "spec": spec,
            "status": status,
        }
    })
}
