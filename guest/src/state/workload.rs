//! What is known of the workload.

use std::time::Instant;

use rustix::process::Pid;

use super::State;
use crate::account::Account;
use crate::program::Program;
use crate::protocol::workload::State as Fares;
use crate::protocol::{Readiness, WorkloadOverride};

#[derive(Debug, Default)]
pub(crate) struct Workload {
    /// It was started, or there is none to start.
    pub(crate) started: bool,
    /// Its process group, while it runs.
    pub(crate) group: Option<Pid>,
    /// What was said of it before it was started.
    pub(crate) said: Option<Readiness>,
    /// How often it was started, when it was last, and what became of that. Whether it is healthy is told apart from this.
    pub(crate) run: u32,
    pub(crate) started_at: Option<Instant>,
    pub(crate) fares: Fares,
    /// It is being ended to be started again: its end is no news.
    pub(crate) restarting: bool,
    /// What the pool says in place of the image.
    pub(crate) instead: Option<WorkloadOverride>,
    /// As whom it was last started; absent: as root.
    pub(crate) account: Option<Account>,
}

impl State {
    /// What is to be run, or why that can't be told.
    pub(crate) fn program(&self) -> Result<Program, String> {
        Program::of(self.config.as_ref()?, self.workload.instead.as_ref())
    }

    pub(crate) fn begin_run(&mut self) {
        // The first one may have said something before it was known to run.
        if self.workload.run > 0 {
            self.readiness = Readiness::Starting;
            self.workload.said = None;
        }
        self.message.clear();
        self.workload.run += 1;
        self.workload.started_at = Some(Instant::now());
        self.workload.fares = Fares::Running;
        self.health.begin_run();
    }

    pub(crate) fn workload_failed(&mut self, message: String) {
        self.workload.fares = Fares::Failed;
        self.readiness = Readiness::Failed;
        self.message = message;
    }
}
