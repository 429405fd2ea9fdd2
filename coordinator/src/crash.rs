//! Steps at which a test makes a coordinator end as kill -9 would: before and after every transaction and every document that
//! is sent. The store's [`Backend`](crate::stored::Backend) and the sessions pass them; no step is listed by hand, so a new
//! transaction has its two steps at once.
//!
//! A step is named by what it does: `before.audit+objects/pools` is before a transaction that writes under these prefixes,
//! `after.document` after a document was sent. `MVM_CRASH_AT=after.objects/pools` ends the process the first time that a step
//! after a transaction with this prefix is passed, `after.objects/pools:3` the third time. Tests in this process count
//! steps instead ([`CrashPoints::arm`]), and drop the coordinator's runtime when one is [`CrashPoints::hit`]: from that step on
//! nothing more is written or sent. Release builds have no such steps at all.

use mvm_store::Transaction;

pub use on::CrashPoints;

/// What a transaction writes: the kinds of its keys. Events are written with what they tell of, and name no step.
pub(crate) fn written(transaction: &Transaction) -> String {
    let kinds: std::collections::BTreeSet<&str> =
        transaction.changes().iter().map(|change| kind_of(change.key())).collect();
    let kinds = kinds.into_iter().filter(|kind| *kind != "events" || transaction.changes().len() == 1);
    kinds.collect::<Vec<_>>().join("+")
}

/// `objects/pools` of `objects/pools/acme/web`, `audit` of `audit/1`.
fn kind_of(key: &str) -> &str {
    let ends = if key.starts_with(crate::records::OBJECTS) { 2 } else { 1 };
    key.match_indices('/').nth(ends - 1).map_or(key, |(at, _)| &key[..at])
}

#[cfg(not(debug_assertions))]
mod on {
    /// Does nothing in release builds.
    #[derive(Debug, Clone, Default)]
    pub struct CrashPoints;

    impl CrashPoints {
        pub(crate) async fn before(&self, _what: impl FnOnce() -> String) {}
        pub(crate) async fn after(&self, _what: impl FnOnce() -> String) {}
    }
}

#[cfg(debug_assertions)]
mod on {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, OnceLock};

    use parking_lot::Mutex;
    use tokio::sync::watch;

    /// Where a coordinator ends; shared with the test that says so.
    #[derive(Debug, Clone, Default)]
    pub struct CrashPoints(Arc<Points>);

    #[derive(Debug, Default)]
    struct Points {
        steps: Mutex<Steps>,
        hit: watch::Sender<Option<String>>,
    }

    #[derive(Debug, Default)]
    struct Steps {
        /// How many steps are left until the one that ends it.
        left: Option<u32>,
        /// Only steps of this name count; none: all do.
        named: Option<String>,
        passed: Vec<String>,
    }

    impl CrashPoints {
        /// The `nth` step from now on ends the coordinator that runs next, or runs; 0: none does.
        pub fn arm(&self, nth: u32) {
            self.set(Steps { left: (nth > 0).then_some(nth), ..Steps::default() });
        }

        /// No step ends it from now on, unless one has: that one's name.
        #[must_use]
        pub fn disarm(&self) -> Option<String> {
            let mut steps = self.0.steps.lock();
            steps.left = None;
            self.0.hit.borrow().clone()
        }

        /// The next step of this name ends the coordinator.
        pub fn arm_named(&self, name: &str) {
            self.set(Steps { left: Some(1), named: Some(name.to_owned()), ..Steps::default() });
        }

        fn set(&self, steps: Steps) {
            let mut now = self.0.steps.lock();
            *now = steps;
            self.0.hit.send_replace(None);
        }

        /// The steps passed since [`CrashPoints::arm`].
        #[must_use]
        pub fn passed(&self) -> Vec<String> {
            self.0.steps.lock().passed.clone()
        }

        /// Waits until the step is reached; its name.
        pub async fn hit(&self) -> String {
            let mut hit = self.0.hit.subscribe();
            let found = hit.wait_for(Option::is_some).await;
            // `self` holds the sender.
            found.ok().and_then(|found| found.clone()).unwrap_or_default()
        }

        pub(crate) async fn before(&self, what: impl FnOnce() -> String) {
            self.pass("before", &what()).await;
        }

        pub(crate) async fn after(&self, what: impl FnOnce() -> String) {
            self.pass("after", &what()).await;
        }

        async fn pass(&self, side: &str, what: &str) {
            end_where_asked(side, what);
            let name = format!("{side}.{what}");
            let ended = {
                let mut steps = self.0.steps.lock();
                let counts = steps.named.as_ref().is_none_or(|named| *named == name);
                if counts && self.0.hit.borrow().is_none() {
                    steps.left = steps.left.map(|left| left.saturating_sub(1));
                }
                if steps.left == Some(0) {
                    self.0.hit.send_if_modified(|hit| hit.is_none() && hit.replace(name.clone()).is_none());
                }
                steps.passed.push(name);
                self.0.hit.borrow().is_some()
            };
            if ended {
                // Nothing after the step happens any more.
                std::future::pending::<()>().await;
            }
        }
    }

    fn end_where_asked(side: &str, what: &str) {
        static ASKED: OnceLock<Option<(String, String, AtomicU32)>> = OnceLock::new();
        let asked = ASKED.get_or_init(|| {
            let text = std::env::var("MVM_CRASH_AT").ok()?;
            let (name, nth) = text.split_once(':').unwrap_or((&text, "1"));
            let (side, kind) = name.split_once('.')?;
            Some((side.to_owned(), kind.to_owned(), AtomicU32::new(nth.parse().unwrap_or(1))))
        });
        if let Some((asked_side, kind, left)) = asked
            && asked_side == side
            && what.split('+').any(|written| written == kind)
            && left.fetch_sub(1, Ordering::SeqCst) == 1
        {
            let _ = nix::sys::signal::kill(nix::unistd::getpid(), nix::sys::signal::Signal::SIGKILL);
            // The signal is already on its way: nothing more happens in this process.
            loop {
                std::thread::park();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_is_named_by_the_kinds_of_its_keys() {
        let txn = Transaction::new().put("objects/pools/acme/web", "").put("audit/1-2", "").delete("meta/x");
        assert_eq!(written(&txn), "audit+meta+objects/pools");
    }
}
