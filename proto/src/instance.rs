//! The life of an instance: its phases and the moves between them.
//!
//! ```text
//! created -> ready -> running <-> warm <-> sleeping
//!                       ^  |       |         |
//!                       |  v       v         v
//!                       +- stopped <---------+     (a waking one is warm until its guest knows who it is)
//! any of them but destroyed -> failed -> stopped | destroyed
//! ```

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Has an id, an address and directories; nothing of it runs.
    Created,
    /// Its artifacts and drives are in place.
    Ready,
    Running,
    /// Paused and resident; resumes in milliseconds.
    Warm,
    /// Snapshotted to disk; costs no memory.
    Sleeping,
    Stopped,
    /// Something went wrong; the record says what.
    Failed,
    Destroyed,
}

/// A move that the life of an instance does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an instance can't go from {from} to {to}")]
pub struct IllegalTransition {
    pub from: Phase,
    pub to: Phase,
}

impl Phase {
    pub const ALL: [Phase; 8] = [
        Phase::Created,
        Phase::Ready,
        Phase::Running,
        Phase::Warm,
        Phase::Sleeping,
        Phase::Stopped,
        Phase::Failed,
        Phase::Destroyed,
    ];

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

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Created => "created",
            Phase::Ready => "ready",
            Phase::Running => "running",
            Phase::Warm => "warm",
            Phase::Sleeping => "sleeping",
            Phase::Stopped => "stopped",
            Phase::Failed => "failed",
            Phase::Destroyed => "destroyed",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a phase of an instance")]
pub struct UnknownPhase;

impl FromStr for Phase {
    type Err = UnknownPhase;
    fn from_str(text: &str) -> Result<Self, UnknownPhase> {
        Self::ALL.into_iter().find(|phase| phase.as_str() == text).ok_or(UnknownPhase)
    }
}

/// What a person may do to one instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ManualAction {
    Start,
    Stop,
    Warm,
    Sleep,
    Wake,
    Destroy,
}

impl ManualAction {
    pub const ALL: [Self; 6] = [Self::Start, Self::Stop, Self::Warm, Self::Sleep, Self::Wake, Self::Destroy];

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Warm => "warm",
            Self::Sleep => "sleep",
            Self::Wake => "wake",
            Self::Destroy => "destroy",
        }
    }

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

impl fmt::Display for ManualAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be one of start, stop, warm, sleep, wake, destroy")]
pub struct UnknownAction;

impl FromStr for ManualAction {
    type Err = UnknownAction;
    fn from_str(text: &str) -> Result<Self, UnknownAction> {
        Self::ALL.into_iter().find(|action| action.as_str() == text).ok_or(UnknownAction)
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
    fn a_phase_reads_back_from_its_own_text() {
        for phase in Phase::ALL {
            assert_eq!(phase.to_string().parse(), Ok(phase));
        }
    }
}
