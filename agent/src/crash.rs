//! Points at which a test makes the agent end as kill -9 would: around every durable write and every effect.
//!
//! `MVM_CRASH_AT=name` ends the process the first time that it passes the point of that name, `name:3` the third
//! time. Release builds have no such points at all.

/// Every point, in the order of the steps that pass them. The crash matrix ends an agent at each.
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
    "start.concluded",
    "warm.drained",
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
    "wake.intended",
    "wake.bounded",
    "wake.forgotten",
    "wake.restored",
    "wake.given_up",
    "wake.resumed",
    "wake.reborn",
    "wake.ready",
    "wake.concluded",
    "wake.discarded",
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
    "failure.cleared",
    "failure.recorded",
    "observe.recorded",
    "recover.removed",
    "recover.saved",
    "recover.done",
    "sweep.removed",
];

/// Points that only a request passes which comes while its instance is being put to rest. The node's tests end an agent
/// there.
pub const OF_REQUESTS: &[&str] = &["call_off.discarded", "call_off.resumed", "call_off.kept"];

/// Points that only a real guest's session passes. The tests with microVMs end an agent there.
pub const OF_SESSIONS: &[&str] = &["persist.content", "persist.index", "persist.head", "persist.brought"];

/// Points that only a snapshot in files passes, while it is compressed. The tests with microVMs end an agent there.
pub const OF_SNAPSHOTS: &[&str] = &["pack.written", "pack.named", "pack.noted", "pack.done"];

/// Points that only an instance on its way between nodes passes. The test of moves ends an agent there.
pub const OF_MOVES: &[&str] =
    &["export.marked", "import.begun", "import.received", "import.placed", "import.recorded"];

/// Ends this process here, if a test asked for it.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) fn point(_name: &'static str) {}

/// Ends this process here, if a test asked for it.
#[cfg(debug_assertions)]
pub(crate) fn point(name: &'static str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    static ASKED: OnceLock<Option<(String, AtomicU32)>> = OnceLock::new();
    let known = [ALL, OF_REQUESTS, OF_SESSIONS, OF_SNAPSHOTS, OF_MOVES];
    debug_assert!(known.iter().any(|points| points.contains(&name)), "{name} is not listed");
    let asked = ASKED.get_or_init(|| {
        let text = std::env::var("MVM_CRASH_AT").ok()?;
        let (name, passings) = text.split_once(':').unwrap_or((&text, "1"));
        Some((name.to_owned(), AtomicU32::new(passings.parse().unwrap_or(1))))
    });
    if let Some((at, left)) = asked
        && at == name
        && left.fetch_sub(1, Ordering::SeqCst) == 1
    {
        let _ = nix::sys::signal::kill(nix::unistd::getpid(), nix::sys::signal::Signal::SIGKILL);
        // The signal is already on its way: nothing more happens in this process.
        loop {
            std::thread::park();
        }
    }
}
