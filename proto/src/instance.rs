//! The life of an instance: its phases and the moves between them.
//!
//! ```text
//! created -> ready -> running <-> warm <-> sleeping
//!                       ^  |       |         |
//!                       |  v       v         v
//!                       +- stopped <---------+     (a waking one is warm until its guest knows who it is)
//! any of them but destroyed -> failed -> stopped | destroyed
//! ```

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::document::Restart;
use crate::named::named;

named! {
    /// Where an instance is in its life.
    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "lowercase")]
    pub enum Phase {
        /// Has an id, an address and directories; nothing of it runs.
        Created = "created",
        /// Its artifacts and drives are in place.
        Ready = "ready",
        Running = "running",
        /// Paused and resident; resumes in milliseconds.
        Warm = "warm",
        /// Snapshotted to disk; costs no memory.
        Sleeping = "sleeping",
        Stopped = "stopped",
        /// Something went wrong; the record says what.
        Failed = "failed",
        Destroyed = "destroyed",
    }
}

/// A move that the life of an instance does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an instance can't go from {from} to {to}")]
pub struct IllegalTransition {
    pub from: Phase,
    pub to: Phase,
}

impl Phase {
    /// `to`, if an instance in this phase may go there. Staying is not a move.
    pub fn advance(self, to: Phase) -> Result<Phase, IllegalTransition> {
        use Phase::{Created, Destroyed, Failed, Ready, Running, Sleeping, Stopped, Warm};
        let legal = match self {
            Created => matches!(to, Ready | Failed | Destroyed),
            Ready => matches!(to, Running | Stopped | Failed | Destroyed),
            Running => matches!(to, Warm | Stopped | Failed),
            Warm => matches!(to, Running | Sleeping | Stopped | Failed),
            Sleeping => matches!(to, Warm | Running | Stopped | Failed),
            Stopped => matches!(to, Running | Failed | Destroyed),
            Failed => matches!(to, Stopped | Destroyed),
            Destroyed => false,
        };
        if legal { Ok(to) } else { Err(IllegalTransition { from: self, to }) }
    }
}

named! {
    /// What a person may do to one instance.
    pub enum ManualAction {
        Start = "start",
        Stop = "stop",
        Warm = "warm",
        Sleep = "sleep",
        Wake = "wake",
        Destroy = "destroy",
    }
}

impl ManualAction {
    /// The phase that an instance is in once this is done.
    #[must_use]
    pub fn leads_to(self) -> Phase {
        match self {
            Self::Start | Self::Wake => Phase::Running,
            Self::Stop => Phase::Stopped,
            Self::Warm => Phase::Warm,
            Self::Sleep => Phase::Sleeping,
            Self::Destroy => Phase::Destroyed,
        }
    }
}

named! {
    /// How the program of an instance fares.
    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "lowercase")]
    pub enum WorkloadState {
        Running = "running",
        /// It ended with exit code 0.
        Completed = "completed",
        /// It ended in any other way, or could not be started.
        Failed = "failed",
        /// It runs, and fails its health check.
        Unhealthy = "unhealthy",
    }
}

impl WorkloadState {
    /// Whether a pool with this policy has it started again.
    #[must_use]
    pub fn is_restarted(self, policy: Restart) -> bool {
        match policy {
            Restart::Always => self != Self::Running,
            Restart::OnFailure => matches!(self, Self::Failed | Self::Unhealthy),
            Restart::Never => false,
        }
    }
}

named! {
    /// How an instance came to run when a request woke it.
    pub enum WakeKind {
        /// It ran already.
        Running = "running",
        /// It was about to rest, which was called off.
        Kept = "kept",
        /// From warm: its processors were let go.
        Resumed = "resumed",
        /// From its snapshot.
        Woken = "woken",
        /// From the beginning, for its snapshot was of no use.
        Started = "started",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_but_destroyed_leads_to_destroyed_and_nothing_leads_out_of_it() {
        for start in Phase::ALL {
            let mut reached = vec![start];
            let mut next = 0;
            while next < reached.len() {
                for to in Phase::ALL {
                    if reached[next].advance(to).is_ok() && !reached.contains(&to) {
                        reached.push(to);
                    }
                }
                next += 1;
            }
            assert!(reached.contains(&Phase::Destroyed), "{start} never ends");
        }
        assert!(Phase::ALL.iter().all(|to| Phase::Destroyed.advance(*to).is_err()));
    }

    #[test]
    fn sleeping_is_reached_only_through_warm() {
        let into_sleep: Vec<_> =
            Phase::ALL.into_iter().filter(|from| from.advance(Phase::Sleeping).is_ok()).collect();
        assert_eq!(into_sleep, [Phase::Warm]);
    }

    #[test]
    fn a_name_is_the_same_in_messages_and_in_json() {
        let json = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        for phase in Phase::ALL {
            assert_eq!(phase.as_str().parse(), Ok(phase));
            assert_eq!(json(&serde_json::to_value(phase).unwrap()), phase.as_str());
        }
        for state in WorkloadState::ALL {
            assert_eq!(state.as_str().parse(), Ok(state));
            assert_eq!(json(&serde_json::to_value(state).unwrap()), state.as_str());
        }
    }
}
