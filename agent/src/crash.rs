//! Where a test makes the agent end; see [`mvm_host::crash`].

/// Every point but those of the lists below, in the order of the steps that pass them. The crash matrix ends an agent at
/// each, three times.
pub const ALL: &[&str] = &[
    "start.intended",
    "start.cleared",
    "start.bounded",
    "template.intended",
    "template.booted",
    "template.greeted",
    "template.saved",
    "template.ended",
    "template.recorded",
    "template.dropped",
    "start.begun",
    "start.booted",
    "start.reborn",
    "start.ready",
    "up.told",
    "start.concluded",
    "warm.drained",
    "warm.reclaimed",
    "warm.paused",
    "warm.kept",
    "resume.resumed",
    "resume.kept",
    "sleep.drained",
    "sleep.paused",
    "sleep.intended",
    "sleep.snapshotted",
    "sleep.concluded",
    "sleep.killed",
    "sleep.released",
    "call_off.discarded",
    "call_off.resumed",
    "call_off.kept",
    "wake.bounded",
    "wake.forgotten",
    "wake.restored",
    "wake.given_up",
    "wake.resumed",
    "wake.reborn",
    "wake.ready",
    "wake.concluded",
    "wake.discarded",
    "restart.counted",
    "restart.restarted",
    "stop.intended",
    "stop.asked",
    "stop.stopped",
    "stop.released",
    "stop.concluded",
    "stop.discarded",
    "destroy.intended",
    "destroy.removed",
    "destroy.released",
    "destroy.deleted",
    "export.marked",
    "import.begun",
    "import.received",
    "import.placed",
    "import.recorded",
    "failure.cleared",
    "failure.recorded",
    "observe.recorded",
    "recover.removed",
    "recover.saved",
    "recover.done",
    "sweep.removed",
];

/// Points that only a real guest's session passes. The tests with microVMs end an agent at each, three times.
pub const SESSION_POINTS: &[&str] = &["persist.content", "persist.index", "persist.head", "persist.brought"];

/// Points that only a coordinator's order brings an agent to. The tests of drains end an agent at each, three times.
pub const TRANSFER_POINTS: &[&str] = &["transfer.marked"];

pub(crate) fn point(name: &'static str) {
    mvm_host::crash::point(&[ALL, SESSION_POINTS, TRANSFER_POINTS], name);
}
