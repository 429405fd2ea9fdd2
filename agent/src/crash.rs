//! Points at which a test makes the agent end as kill -9 would: around every durable write and every effect.
//!
//! `MVM_CRASH_AT=name` ends the process the first time that it passes the point of that name, `name:3` the third
//! time. Release builds have no such points at all.

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
pub const OF_SESSIONS: &[&str] = &["persist.content", "persist.index", "persist.head", "persist.brought"];

/// Points that only a snapshot in files passes, while it is compressed. The tests with microVMs end an agent at each,
/// three times.
pub const OF_SNAPSHOTS: &[&str] = &["pack.written", "pack.named", "pack.noted", "pack.done"];

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
    let known = [ALL, OF_SESSIONS, OF_SNAPSHOTS];
    debug_assert!(known.iter().any(|points| points.contains(&name)), "{name} is not listed");
    tracing::trace!(name, "passed");
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
