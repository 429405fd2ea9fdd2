//! What is known of the workload's health, and what the agent is told of both.

use super::State;
use crate::protocol::workload::State as Fares;
use crate::protocol::{self, Readiness, Workload};

#[derive(Debug, Default)]
pub(crate) struct Health {
    pub(crate) config: Option<protocol::Health>,
    /// A thread carries the checks out.
    pub(crate) watched: bool,
    /// Grows with every run and every other check: what was found before does not count.
    pub(crate) round: u64,
    /// The workload was healthy once in this run.
    pub(crate) passed: bool,
    /// Why it is not healthy.
    pub(crate) failing: Option<String>,
}

impl Health {
    pub(crate) fn begin_run(&mut self) {
        self.round += 1;
        self.passed = false;
        self.failing = None;
    }
}

impl State {
    /// What the agent is told: the readiness, why, and how the workload fares.
    pub(crate) fn told(&self) -> (Readiness, String, Workload) {
        let fares = |state: Fares| Workload { state: state.into(), run: self.workload.run };
        let as_it_is = (self.readiness, self.message.clone(), fares(self.workload.fares));
        if self.health.config.is_none() || self.workload.fares != Fares::Running {
            return as_it_is;
        }
        if let Some(why) = &self.health.failing {
            let message = format!("the workload is unhealthy: {why}");
            return (Readiness::Failed, message, fares(Fares::Unhealthy));
        }
        if self.health.passed || self.readiness == Readiness::Failed {
            return as_it_is;
        }
        (Readiness::Starting, String::new(), fares(Fares::Running))
    }
}
