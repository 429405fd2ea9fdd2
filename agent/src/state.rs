//! Durable records.
