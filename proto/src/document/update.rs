//! How far a node may roll a pool to the revision that its document names.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The most seconds of [`Update::min_ready_seconds`]: a rollout waits for it once per instance.
pub const MAX_MIN_READY_SECONDS: u64 = 3600;

/// What a rollout may do to a pool on this node. A pool without one is rolled by the node's own rule: one instance after the
/// other, with a surge instance where there is room for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct Update {
    /// Of the running count, the most that may not serve because they are being replaced.
    #[schemars(range(max = 1000))]
    pub max_unavailable: u32,
    /// The most that may run beyond the running count, so that others can be replaced. With neither of the two nothing that
    /// serves, is warm or sleeps is replaced.
    #[schemars(range(max = 1000))]
    pub max_surge: u32,
    /// An instance of an older revision that does not serve is replaced, whatever the two limits say.
    pub replace_failed: bool,
    /// How long a new instance has to serve before the next one is replaced.
    #[schemars(range(max = 3600))]
    pub min_ready_seconds: u64,
    /// When an instance that sleeps is brought to the revision.
    pub sleeping: UpdateSleeping,
}

impl Default for Update {
    fn default() -> Self {
        Self {
            max_unavailable: 0,
            max_surge: 0,
            replace_failed: false,
            min_ready_seconds: DEFAULT_MIN_READY_SECONDS,
            sleeping: UpdateSleeping::default(),
        }
    }
}

/// A program that ends at once has ended by then.
pub const DEFAULT_MIN_READY_SECONDS: u64 = 5;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UpdateSleeping {
    /// One after the other, once nothing that runs or is warm is of an older revision.
    #[default]
    Background,
    /// When it is next brought up: it boots the revision of its document, and loses what it had in memory.
    OnWake,
}

impl Update {
    /// Whether what serves, is warm or sleeps may be replaced at all.
    #[must_use]
    pub fn may_roll(&self) -> bool {
        self.max_unavailable > 0 || self.max_surge > 0
    }
}
