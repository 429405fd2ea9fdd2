//! The program in a guest as the planner sees it: how it fares, how often it was started again, when it may be next.

use std::time::Duration;

use mvm_proto::{Timestamp, WorkloadState};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The wait before the second restart in a row; each further one doubles it. The first has none.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// A program that ran for this long is stable: its next end is the first one again.
const STABLE_AFTER: Duration = Duration::from_secs(600);

/// So many restarts in a row are tried in the same guest; the next ones boot a new one.
pub const RESTARTS_IN_PLACE: u32 = 3;

/// From so many restarts in a row on a program is in a crash loop.
const CRASH_LOOP: u32 = 3;

/// The program of one instance's guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    pub state: WorkloadState,
    /// When it entered this state.
    pub since: Timestamp,
    /// How often it was started again without having been stable in between.
    #[serde(default)]
    pub restarts: u32,
}

impl Workload {
    /// What is known of it after it was seen in a state.
    #[must_use]
    pub fn seen(before: Option<Self>, state: WorkloadState, now: Timestamp) -> Option<Self> {
        match before {
            None if state == WorkloadState::Running => None,
            None => Some(Self { state, since: now, restarts: 0 }),
            // However it is down, it is since it first was: the wait goes on.
            Some(before) if before.is_down() && state != WorkloadState::Running => {
                Some(Self { state, ..before })
            }
            Some(before) => {
                let was_stable = before.state == WorkloadState::Running && before.is_stable(now);
                Some(Self { state, since: now, restarts: if was_stable { 0 } else { before.restarts } })
            }
        }
    }

    /// The same after it was started again.
    #[must_use]
    pub fn restarted(self, now: Timestamp) -> Self {
        Self { state: WorkloadState::Running, since: now, restarts: self.restarts.saturating_add(1) }
    }

    #[must_use]
    pub fn is_down(&self) -> bool {
        self.state != WorkloadState::Running
    }

    /// When it may be started again.
    #[must_use]
    pub fn due_at(&self) -> Timestamp {
        let Some(doublings) = self.restarts.checked_sub(1) else { return self.since };
        self.since + FIRST_WAIT.saturating_mul(1 << doublings.min(16)).min(LONGEST_WAIT)
    }

    #[must_use]
    pub fn is_in_a_crash_loop(&self, now: Timestamp) -> bool {
        self.restarts >= CRASH_LOOP && (self.is_down() || !self.is_stable(now))
    }

    fn is_stable(&self, now: Timestamp) -> bool {
        now.since(self.since) >= STABLE_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_ms(seconds * 1000)
    }

    #[test]
    fn waits_double_with_each_restart_in_a_row_and_begin_anew_after_a_stable_run() {
        let mut workload = Workload::seen(None, WorkloadState::Failed, at(0)).unwrap();
        assert_eq!(Workload::seen(None, WorkloadState::Running, at(0)), None);
        let mut now = at(0);
        let mut waits = Vec::new();
        for _ in 0..12 {
            waits.push(workload.due_at().since(now).as_secs());
            let restarted = workload.restarted(workload.due_at());
            now = restarted.since + Duration::from_secs(5);
            workload = Workload::seen(Some(restarted), WorkloadState::Failed, now).unwrap();
        }
        assert_eq!(waits, [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        let restarted = workload.restarted(now);
        assert!(restarted.is_in_a_crash_loop(now) && workload.is_in_a_crash_loop(now + STABLE_AFTER));
        assert!(!restarted.is_in_a_crash_loop(now + STABLE_AFTER), "it is over once it is stable");
        let later = Workload::seen(Some(restarted), WorkloadState::Unhealthy, now + STABLE_AFTER).unwrap();
        assert_eq!((later.restarts, later.due_at()), (0, now + STABLE_AFTER));
    }
}
