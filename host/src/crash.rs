//! Points at which a test makes this process end as kill -9 would: around every durable write and every effect.
//!
//! `MVM_CRASH_AT=name` ends the process the first time that it passes the point of that name, `name:3` the third
//! time. Each crate lists its own points. Release builds have no such points at all.

/// Ends this process here, if a test asked for it.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn point(_known: &[&[&str]], _name: &'static str) {}

/// Ends this process here, if a test asked for it.
#[cfg(debug_assertions)]
pub fn point(known: &[&[&str]], name: &'static str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    static ASKED: OnceLock<Option<(String, AtomicU32)>> = OnceLock::new();
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
