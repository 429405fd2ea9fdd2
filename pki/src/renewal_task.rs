//! Renews a process's certificate in the background, for as long as the process runs.
//!
//! One task per credential. It sleeps until half of the certificate's life is over, makes a new key, asks the
//! authority through [`Renew`], saves key and chain together, and only then swaps them into [`LiveCredential`]; live
//! connections keep the certificate they were made with. A swap from elsewhere (an operator who rotates by hand)
//! makes it plan anew. When renewal fails it tries again with growing waits, also past expiry, and what is in use
//! stays in use.

#[cfg(test)]
mod tests;

use std::error::Error;
use std::future::Future;
use std::io;
use std::time::{Duration, SystemTime};

use mvm_proto::Timestamp;
use mvm_proto::text::chain;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::credential::{Anchors, Credential, CsrNames, LeafKey};
use crate::live::{LiveAnchors, LiveCredential};
use crate::renewed::{Renewed, RenewedError};
use crate::rotation;

pub type BoxError = Box<dyn Error + Send + Sync>;

/// An authority that has not answered by then will not.
const RENEW_DEADLINE: Duration = Duration::from_secs(30);
/// How long the task sleeps at most before it looks at the clock again: a machine that was suspended, or whose clock
/// was set, is noticed within this time.
const MAX_NAP: Duration = Duration::from_secs(60);
/// No two renewals follow each other faster, and none within a tenth of the new certificate's life: with an authority
/// whose clock is far behind ours, a new certificate can look half spent.
const MIN_GAP: Duration = Duration::from_secs(1);
const MIN_GAP_PART: u32 = 10;

/// Asks the authority that can renew this process's certificate.
pub trait Renew: Send + Sync + 'static {
    /// Trades a certificate request for a new chain. `key` is the request's; it must not leave the process.
    fn renew(
        &self,
        key: &LeafKey,
        csr_der: Vec<u8>,
    ) -> impl Future<Output = Result<Renewed, BoxError>> + Send;
}

#[derive(Debug, thiserror::Error)]
enum RenewalError {
    #[error("the authority did not answer within {RENEW_DEADLINE:?}")]
    Deadline,
    #[error("could not reach the authority")]
    Ask(#[source] BoxError),
    #[error("the authority's answer is invalid; certificate and roots are unchanged")]
    Answer(#[source] RenewedError),
    #[error("could not save the new certificate; the old one stays in use")]
    Save(#[source] io::Error),
    #[error("could not create a new key")]
    Key(#[source] BoxError),
}

/// Keeps `live` renewed until `shutdown`. `save` is called with every new certificate before it is used, and blocks
/// for as long as two small files take to reach the disk.
pub async fn renewal_task<R: Renew>(
    live: LiveCredential,
    anchors: LiveAnchors,
    save: impl Fn(&Credential, &Anchors) -> io::Result<()> + Send + Sync,
    renew: R,
    names: CsrNames,
    shutdown: CancellationToken,
) {
    let clock = || Timestamp::from(SystemTime::now());
    Renewal { live, anchors, save, renew, names, shutdown, clock, chance: fastrand::f64 }.run().await;
}

/// The task with its clock and its dice as arguments.
struct Renewal<R, S, C, J> {
    live: LiveCredential,
    anchors: LiveAnchors,
    save: S,
    renew: R,
    names: CsrNames,
    shutdown: CancellationToken,
    clock: C,
    chance: J,
}

/// Why the task woke.
enum Wake {
    Due,
    Swapped,
    Shutdown,
}

impl<R, S, C, J> Renewal<R, S, C, J>
where
    R: Renew,
    S: Fn(&Credential, &Anchors) -> io::Result<()> + Send + Sync,
    C: Fn() -> Timestamp + Send + Sync,
    J: Fn() -> f64 + Send + Sync,
{
    async fn run(self) {
        let mut swaps = self.live.changed();
        let mut not_before = Instant::now();
        let mut failures = 0;
        loop {
            match self.wait(not_before, &mut swaps).await {
                Wake::Shutdown => return,
                Wake::Swapped => {
                    (failures, not_before) = (0, Instant::now());
                    continue;
                }
                Wake::Due => {}
            }
            let attempt = tokio::select! {
                biased;
                () = self.shutdown.cancelled() => return,
                attempt = self.attempt() => attempt,
            };
            let pause = match attempt {
                Ok(()) => {
                    failures = 0;
                    swaps.mark_unchanged();
                    self.gap()
                }
                Err(error) => {
                    failures += 1;
                    self.report(&error, failures)
                }
            };
            not_before = Instant::now() + pause;
        }
    }

    /// Until the certificate in use is due and `not_before` has passed.
    async fn wait(&self, not_before: Instant, swaps: &mut tokio::sync::watch::Receiver<u64>) -> Wake {
        loop {
            let current = self.live.current();
            let jitter = rotation::jitter_of(&current.fingerprint());
            let due = rotation::renew_at(current.not_before(), current.not_after(), jitter);
            let left = due.since((self.clock)()).max(not_before.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Wake::Due;
            }
            tokio::select! {
                biased;
                () = self.shutdown.cancelled() => return Wake::Shutdown,
                Ok(()) = swaps.changed() => return Wake::Swapped,
                () = sleep(left.min(MAX_NAP)) => {}
            }
        }
    }

    async fn attempt(&self) -> Result<(), RenewalError> {
        let made = |cause| RenewalError::Key(Box::new(cause));
        // A new key each time: one that leaked is worthless after the next renewal.
        let key = LeafKey::generate().map_err(made)?;
        let request = key.csr_der(&self.names).map_err(made)?;
        let renewed = timeout(RENEW_DEADLINE, self.renew.renew(&key, request)).await;
        let renewed = renewed.map_err(|_| RenewalError::Deadline)?.map_err(RenewalError::Ask)?;
        let identity = self.live.current().identity().clone();
        let (credential, anchors) = renewed
            .accept(key, &identity, &self.anchors.current(), (self.clock)())
            .map_err(RenewalError::Answer)?;
        (self.save)(&credential, &anchors).map_err(RenewalError::Save)?;
        info!(
            identity = %credential.identity(),
            serial = credential.serial_hex(),
            not_after = %credential.not_after(),
            "renewed the certificate"
        );
        // The anchors first, so that no handshake shows the new certificate while its root is unknown here.
        if anchors != *self.anchors.current() {
            self.anchors.swap(anchors);
        }
        self.live.swap(credential);
        Ok(())
    }

    fn gap(&self) -> Duration {
        let current = self.live.current();
        MIN_GAP.max(current.not_after().since(current.not_before()) / MIN_GAP_PART)
    }

    fn report(&self, error: &RenewalError, failures: u32) -> Duration {
        let not_after = self.live.current().not_after();
        let remaining = not_after.since((self.clock)());
        let pause = rotation::retry_after(failures, remaining, (self.chance)());
        warn!(
            error = %chain(error), failures, %not_after, expired = remaining.is_zero(), retry_in = ?pause,
            "could not renew the certificate"
        );
        pause
    }
}
