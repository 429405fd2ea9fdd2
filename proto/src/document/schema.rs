//! The JSON Schema.
