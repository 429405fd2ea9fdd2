//! What a run leaves behind: one JSON file with every figure and what it was taken on.

use std::path::Path;

use anyhow::{Context, Result};
use mvm_proto::Timestamp;
use serde::Serialize;

use crate::machine::Machine;
use crate::row::Row;

#[derive(Debug, Serialize)]
pub struct Report {
    pub taken_at: Timestamp,
    pub machine: Machine,
    /// `release`, or `debug`, whose figures mean nothing.
    pub profile: &'static str,
    pub quick: bool,
    /// Cores that others kept busy just before.
    pub outside_load: f64,
    pub rows: Vec<Row>,
}

impl Report {
    pub fn write(&self, path: &Path) -> Result<()> {
        let told = || format!("could not write {}", path.display());
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).with_context(told)?;
        }
        std::fs::write(path, serde_json::to_vec_pretty(self)?).with_context(told)
    }
}

/// The profile that this was built in.
#[must_use]
pub fn profile() -> &'static str {
    if cfg!(debug_assertions) { "debug" } else { "release" }
}
