//! How a pool's revision is rolled out, what is rolled out, and what is told of it.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::pool::{PoolImage, PoolResources, PoolSpec};
use crate::document::{
    DEFAULT_MIN_READY_SECONDS, MAX_MIN_READY_SECONDS, UpdateSleeping, Warmup, WorkloadOverride,
};
use crate::json::Node;
use crate::{NodeId, ProfileId};

const UPDATE: &[&str] = &[
    "max_unavailable",
    "max_surge",
    "min_ready_seconds",
    "progress_deadline_seconds",
    "on_failure",
    "paused",
    "sleeping",
];

/// The most of either limit: as many as a pool has in one phase.
const MAX_LIMIT: u32 = 100_000;
/// A rollout that comes no further is told within a day at the latest.
const MAX_PROGRESS_DEADLINE_SECONDS: u64 = 86_400;

/// The annotation that goes on with a rollout that paused itself: any value that it did not have before.
pub const RESUMED_ANNOTATION: &str = "rollout.mvm/resumed";
/// The annotation that the history shows as the cause of a revision.
pub const CAUSE_ANNOTATION: &str = "rollout.mvm/cause";

/// How a new revision replaces the instances of older ones, over all nodes together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct PoolUpdate {
    /// Of the running count, how many may not serve. A rollout takes none down beyond that, whatever the reason for which
    /// others do not serve.
    #[schemars(range(max = 100_000))]
    pub max_unavailable: u32,
    /// How many may run beyond the running count meanwhile. Not both limits may be 0.
    #[schemars(range(max = 100_000))]
    pub max_surge: u32,
    /// How long a new instance has to serve before the next one is replaced.
    #[schemars(range(max = 3600))]
    pub min_ready_seconds: u64,
    /// A rollout that comes no further for so long has failed.
    #[schemars(range(min = 1, max = 86_400))]
    pub progress_deadline_seconds: u64,
    /// What becomes of a rollout whose new instances fail.
    pub on_failure: OnRolloutFailure,
    /// Nothing is rolled out as long as it is set.
    pub paused: bool,
    /// When instances that sleep are brought to the new revision.
    pub sleeping: UpdateSleeping,
}

impl Default for PoolUpdate {
    fn default() -> Self {
        Self {
            max_unavailable: 1,
            max_surge: 1,
            min_ready_seconds: DEFAULT_MIN_READY_SECONDS,
            progress_deadline_seconds: 600,
            on_failure: OnRolloutFailure::default(),
            paused: false,
            sleeping: UpdateSleeping::default(),
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnRolloutFailure {
    /// It stays where it is.
    #[default]
    Pause,
    /// It goes back to the last revision that was rolled out everywhere.
    Rollback,
}

impl PoolUpdate {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn read(node: &Node<'_, '_>) -> Option<Self> {
        const ON_FAILURE: [(&str, OnRolloutFailure); 2] =
            [("pause", OnRolloutFailure::Pause), ("rollback", OnRolloutFailure::Rollback)];
        const SLEEPING: [(&str, UpdateSleeping); 2] =
            [("background", UpdateSleeping::Background), ("on_wake", UpdateSleeping::OnWake)];
        let (fields, default) = (node.fields(UPDATE)?, Self::default());
        let limit = |name, default| fields.or(name, default, |node| node.integer32(0..=MAX_LIMIT));
        let max_unavailable = limit("max_unavailable", default.max_unavailable);
        let max_surge = limit("max_surge", default.max_surge);
        let min_ready_seconds = fields.or("min_ready_seconds", default.min_ready_seconds, |node| {
            node.integer(0..=MAX_MIN_READY_SECONDS)
        });
        let deadline = fields.or("progress_deadline_seconds", default.progress_deadline_seconds, |node| {
            node.integer(1..=MAX_PROGRESS_DEADLINE_SECONDS)
        });
        let on_failure = fields.or("on_failure", default.on_failure, |node| node.choice(&ON_FAILURE));
        let paused = fields.or("paused", false, |node| node.boolean());
        let sleeping = fields.or("sleeping", default.sleeping, |node| node.choice(&SLEEPING));
        if (max_unavailable, max_surge) == (Some(0), Some(0)) {
            return node
                .refuse("must allow some with max_unavailable or max_surge, or nothing is ever replaced");
        }
        Some(Self {
            max_unavailable: max_unavailable?,
            max_surge: max_surge?,
            min_ready_seconds: min_ready_seconds?,
            progress_deadline_seconds: deadline?,
            on_failure: on_failure?,
            paused: paused?,
            sleeping: sleeping?,
        })
    }
}

/// Everything of a pool's spec that makes its instances what they are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PoolTemplate {
    pub image: PoolImage,
    pub profile: ProfileId,
    pub resources: PoolResources,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup: Option<Box<Warmup>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<Box<WorkloadOverride>>,
    /// The Secrets that it names. Its instances are given their values as they are when they start.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub secrets: BTreeSet<String>,
}

impl PoolTemplate {
    #[must_use]
    pub fn of(spec: &PoolSpec) -> Self {
        Self {
            image: spec.image.clone(),
            profile: spec.profile.clone(),
            resources: spec.resources,
            warmup: spec.policies.warmup.clone(),
            workload: spec.policies.workload.clone(),
            secrets: spec.secrets.clone(),
        }
    }

    /// The spec with this in place of what it says.
    #[must_use]
    pub fn put_into(&self, spec: &PoolSpec) -> PoolSpec {
        let mut spec = spec.clone();
        spec.image.clone_from(&self.image);
        spec.profile.clone_from(&self.profile);
        spec.resources = self.resources;
        spec.policies.warmup.clone_from(&self.warmup);
        spec.policies.workload.clone_from(&self.workload);
        spec.secrets.clone_from(&self.secrets);
        spec
    }
}

/// How far a rollout is: in the status of its pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RolloutStatus {
    /// The number of the revision that is rolled out.
    pub revision: u64,
    /// The last one that was rolled out everywhere.
    pub settled: u64,
    pub phase: RolloutPhase,
    /// Nodes that have nothing of another revision, and all that the pool is placed on.
    pub nodes_done: u32,
    pub nodes: u32,
    /// Instances of the revision, in all phases.
    pub updated: u32,
    /// Those that serve, of any revision.
    pub serving: u32,
    /// Of the running count, those that do not serve.
    pub unavailable: u32,
    /// Those that run beyond the running count.
    pub surge: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RolloutPhase {
    #[default]
    Done,
    Progressing,
    /// A user paused it.
    Paused,
    /// New instances failed, or it came no further; it stays where it is.
    Failed,
    /// The same, and it goes back to the revision before.
    RollingBack,
    /// It went back.
    RolledBack,
}

impl RolloutPhase {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Progressing => "progressing",
            Self::Paused => "paused",
            Self::Failed => "failed",
            Self::RollingBack => "rolling_back",
            Self::RolledBack => "rolled_back",
        }
    }
}

/// One of a pool's revisions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PoolRevision {
    /// Counts up with every change; one that is declared again gets the next number.
    pub number: u64,
    /// When it was declared first, RFC 3339.
    pub created_at: String,
    /// The annotation `rollout.mvm/cause` of the pool then.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cause: String,
    /// The values of its Secrets are others than those of the revision before, which are not kept: it can't be gone back to
    /// them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub values_changed: bool,
    pub template: PoolTemplate,
}

/// A pool's rollout in all its detail: in explanations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RolloutDetail {
    pub status: RolloutStatus,
    /// Why it is not further.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Oldest first.
    pub history: Vec<PoolRevision>,
    pub nodes: Vec<NodeRollout>,
}

/// A rollout on one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodeRollout {
    pub node: NodeId,
    /// The revision that its document names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<u64>,
    /// `done`, `rolling` or `waiting`.
    pub state: String,
    /// What it waits for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// A rollout that declaring a pool would begin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PlannedRollout {
    /// `acme/workers`
    pub pool: String,
    pub nodes: u32,
    /// Running instances that would be replaced.
    pub running: u32,
    pub max_unavailable: u32,
    pub max_surge: u32,
}
