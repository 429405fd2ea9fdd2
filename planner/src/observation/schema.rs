//! The JSON Schema of an observation, generated from its types, for editors and other people's tools.

use schemars::generate::SchemaSettings;
use serde_json::Value;

use super::Observation;

/// The schema's name. A URN, because it need not be fetched from anywhere: `mvm schema observation` prints it.
pub const SCHEMA_ID: &str = "urn:mvm:schema:observation:v1";

/// The JSON Schema (draft 2020-12) of what `mvm agent observe` prints and `mvm plan node --observed` reads.
#[must_use]
pub fn observation_schema() -> Value {
    let generator = SchemaSettings::draft2020_12().into_generator();
    let mut schema = generator.into_root_schema_for::<Observation>().to_value();
    mvm_proto::document::schema::drop_null(&mut schema);
    if let Value::Object(root) = &mut schema {
        root.insert("$id".into(), SCHEMA_ID.into());
        root.insert("title".into(), "mvm observation".into());
    }
    schema
}
