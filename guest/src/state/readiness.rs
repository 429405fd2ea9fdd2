//! What the workload says of itself, and what it counts for.

use super::State;
use crate::protocol::Readiness;

impl State {
    /// The workload said this. A workload that has ended says nothing any more, and `ready` is less than idle and busy.
    pub(crate) fn hear(&mut self, said: Readiness) {
        let known = matches!(self.readiness, Readiness::Ready | Readiness::Idle | Readiness::Busy);
        if self.readiness == Readiness::Failed || (known && said == Readiness::Ready) {
            return;
        }
        // A guest can't be ready before it has its identity: it is remembered until then, or until something newer.
        if self.readiness == Readiness::Starting && !self.workload.started {
            self.workload.said = Some(said);
            return;
        }
        self.workload.said = None;
        self.readiness = said;
        self.message.clear();
    }

    /// The workload was started, or there is none: what was said before counts. What it said since does in any case.
    pub(crate) fn hear_workload(&mut self, is_ready: bool) {
        if is_ready && self.readiness == Readiness::Starting {
            self.readiness = Readiness::Ready;
        }
        if let Some(said) = self.workload.said.take() {
            self.hear(said);
        }
    }
}
