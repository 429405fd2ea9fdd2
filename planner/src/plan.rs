//! A plan: what a node does next, what it does not do, and why. A value, in one order, that prints the same twice.

use std::fmt;

use mvm_proto::{InstanceId, Phase, PoolId, TenantId, Timestamp};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodePlan {
    /// May be carried out at once or one after the other: no step relies on what another one frees.
    pub steps: Vec<Step>,
    pub deferred: Vec<Deferred>,
    pub unmanaged: Vec<Unmanaged>,
    /// Limits that what exists passes already. Nothing is stopped for them, nothing more is started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub over_limit: Vec<OverLimit>,
    /// When time alone changes the plan.
    pub next_deadline: Option<Timestamp>,
}

impl NodePlan {
    /// Nothing to do: what is, is what was asked for or all that can be had of it now.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub tenant: TenantId,
    pub pool: PoolId,
    /// Absent: a new instance, whose id is made when the step is executed.
    pub instance: Option<InstanceId>,
    pub action: Action,
    /// Booted only for what comes next: to be put to this phase, or (running) to stand in during a replacement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staging: Option<Phase>,
    pub reason: String,
}

/// A step not taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deferred {
    pub tenant: TenantId,
    pub pool: PoolId,
    /// Absent: the step would have made a new instance, or no instance could be named.
    pub instance: Option<InstanceId>,
    pub action: Action,
    /// How many such steps.
    pub count: u32,
    pub reason: String,
}

/// An instance that the document neither names nor asks to prune.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unmanaged {
    pub tenant: TenantId,
    pub pool: PoolId,
    pub instance: InstanceId,
    pub phase: Phase,
}

/// A quota that was lowered below what is used, or a node that became smaller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverLimit {
    /// Absent: it is the node's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<TenantId>,
    /// Absent: it is not a single pool's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolId>,
    pub limit: String,
    pub allowed: u64,
    pub used: u64,
}

impl fmt::Display for OverLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}: {} in use", self.limit, self.allowed, self.used)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Nothing -> running.
    Create,
    /// Stopped, failed or never booted -> running, of the pool's current revision.
    Start,
    /// Sleeping -> running.
    Wake,
    /// Warm -> running. On a staged instance that runs: keep it running.
    Resume,
    /// Running -> warm.
    Warm,
    /// Running or warm -> sleeping.
    Sleep,
    /// Running, warm, sleeping or failed -> stopped. A snapshot is dropped.
    Stop,
    /// Stopped, failed or never booted -> gone, with its disk.
    Destroy,
    /// Boots the pool's current revision under the same id, and goes back to the phase it came from.
    Replace,
    /// Running -> running: the program in its guest is started again.
    Restart,
}

impl Action {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Action::Create => "create",
            Action::Start => "start",
            Action::Wake => "wake",
            Action::Resume => "resume",
            Action::Warm => "warm",
            Action::Sleep => "sleep",
            Action::Stop => "stop",
            Action::Destroy => "destroy",
            Action::Replace => "replace",
            Action::Restart => "restart",
        }
    }

    /// The phase an instance is in after this step; `from` is where it was.
    #[must_use]
    pub fn leads_to(self, from: Option<Phase>) -> Phase {
        match self {
            Action::Create | Action::Start | Action::Wake | Action::Resume | Action::Restart => {
                Phase::Running
            }
            Action::Warm => Phase::Warm,
            Action::Sleep => Phase::Sleeping,
            Action::Stop => Phase::Stopped,
            Action::Destroy => Phase::Destroyed,
            Action::Replace => from.unwrap_or(Phase::Running),
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.action, self.tenant, self.pool)?;
        if let Some(instance) = &self.instance {
            write!(f, "/{instance}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

impl fmt::Display for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.action)?;
        if let Some(instance) = &self.instance {
            write!(f, " {instance}")?;
        }
        if self.count > 1 {
            write!(f, " x{}", self.count)?;
        }
        write!(f, ": {}", self.reason)
    }
}
