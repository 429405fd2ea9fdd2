//! A stopwatch for the parts of a wake, from the request to the answer.

use std::time::Duration;

use mvm_planner::Action;
use mvm_proto::status::WakeTiming;
use mvm_proto::{Phase, WakeKind};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{StepError, was_cancelled};

/// The parts of a wake. One that comes twice counts for both times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Until its turn came: another step on the instance, and room for it.
    Queued,
    /// Its secrets read, its bounds made.
    Prepared,
    /// Its VMM started, its state loaded, its processors let go.
    Restored,
    /// Its guest answered.
    Greeted,
    /// Its guest has its secrets and knows who it is.
    Reborn,
    /// Its port is open.
    Opened,
    Ready,
    /// That its snapshot is given up is durable.
    Recorded,
}

const STAGES: usize = Stage::Recorded as usize + 1;

/// A wake that ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wake {
    pub kind: WakeKind,
    pub total: Duration,
}

/// What became of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepOutcome {
    Done,
    /// It was to put an instance to rest that was wanted again meanwhile.
    CalledOff,
    Failed,
}

impl StepOutcome {
    pub(crate) fn of(action: Action, result: &Result<Phase, StepError>) -> Self {
        match result {
            Ok(phase) if was_cancelled(action, *phase) => Self::CalledOff,
            Ok(_) => Self::Done,
            Err(_) => Self::Failed,
        }
    }

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::CalledOff => "called_off",
            Self::Failed => "failed",
        }
    }
}

/// A step that ended, by plan or by request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepEnd {
    pub action: Action,
    pub outcome: StepOutcome,
    pub took: Duration,
}

#[derive(Debug)]
pub struct Stopwatch {
    begun: Instant,
    last: Instant,
    stages: [Duration; STAGES],
    kind: Option<WakeKind>,
    /// Who waits for the instance to be up.
    waiter: Option<oneshot::Sender<WakeTiming>>,
    /// It is: what the step still does is no part of the wake.
    is_up: bool,
}

impl Stopwatch {
    #[must_use]
    pub fn start() -> Self {
        let now = Instant::now();
        Self {
            begun: now,
            last: now,
            stages: [Duration::ZERO; STAGES],
            kind: None,
            waiter: None,
            is_up: false,
        }
    }

    /// One that tells when the instance is up, which is before the last record of that is durable. Nothing is told of a
    /// step that ends otherwise.
    #[must_use]
    pub fn watched() -> (Self, oneshot::Receiver<WakeTiming>) {
        let (waiter, up) = oneshot::channel();
        (Self { waiter: Some(waiter), ..Self::start() }, up)
    }

    /// What passed since the last lap went to `stage`.
    pub(crate) fn lap(&mut self, stage: Stage) {
        if self.is_up {
            return;
        }
        let now = Instant::now();
        self.stages[stage as usize] += now - self.last;
        self.last = now;
    }

    /// The instance runs, and its record in memory says so.
    pub(crate) fn mark_up(&mut self) {
        self.is_up = true;
        if let Some(waiter) = self.waiter.take() {
            // The caller may have gone away.
            let _ = waiter.send(self.read());
        }
    }

    /// Says how the instance comes to run, unless that is known.
    pub(crate) fn set_kind(&mut self, kind: WakeKind) {
        self.kind.get_or_insert(kind);
    }

    /// What it took to begin so was for nothing.
    pub(crate) fn replace_kind(&mut self, kind: WakeKind) {
        self.kind = Some(kind);
    }

    /// The wake up to the last lap; absent: it was none.
    #[must_use]
    pub fn wake(&self) -> Option<Wake> {
        let kind = self.kind.filter(|kind| *kind != WakeKind::Running)?;
        Some(Wake { kind, total: self.last - self.begun })
    }

    /// For the caller.
    #[must_use]
    pub fn read(&self) -> WakeTiming {
        let stage = |stage: Stage| millis(self.stages[stage as usize]);
        let total_ms = millis(self.last - self.begun);
        WakeTiming {
            kind: self.kind.unwrap_or(WakeKind::Running).as_str().to_owned(),
            total_ms,
            waited_ms: total_ms,
            joined: false,
            queued_ms: stage(Stage::Queued),
            prepared_ms: stage(Stage::Prepared),
            restored_ms: stage(Stage::Restored),
            greeted_ms: stage(Stage::Greeted),
            reborn_ms: stage(Stage::Reborn),
            opened_ms: stage(Stage::Opened),
            ready_ms: stage(Stage::Ready),
            recorded_ms: stage(Stage::Recorded),
        }
    }
}

/// Milliseconds to the microsecond: what is finer is noise.
#[allow(clippy::cast_precision_loss, reason = "microseconds of a century fit a double's 53 bits")]
pub(crate) fn millis(time: Duration) -> f64 {
    time.as_micros() as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_parts_of_a_wake_add_up_to_the_whole() {
        let mut watch = Stopwatch::start();
        let laps = [(Stage::Queued, 3), (Stage::Restored, 40), (Stage::Recorded, 2), (Stage::Restored, 1)];
        for (stage, ms) in laps {
            tokio::time::advance(Duration::from_millis(ms)).await;
            watch.lap(stage);
        }
        assert_eq!(watch.wake(), None, "nothing was woken yet");
        watch.set_kind(WakeKind::Woken);
        watch.set_kind(WakeKind::Started);
        let timing = watch.read();
        let parts = [timing.queued_ms, timing.restored_ms, timing.recorded_ms, timing.total_ms];
        assert_eq!((timing.kind.as_str(), parts), ("woken", [3.0, 41.0, 2.0, 46.0]));
        watch.replace_kind(WakeKind::Started);
        let total = Duration::from_millis(46);
        assert_eq!(watch.wake(), Some(Wake { kind: WakeKind::Started, total }));
    }
}
