//! Asks the coordinator for the bundles of secrets that this node lacks, and puts together what comes of them.
//!
//! Some are asked for at once, and others when these were answered. What does not come is asked for again after a while: the
//! coordinator may have been about to send another document.

use std::collections::BTreeSet;
use std::time::Duration;

use mvm_proto::guest::MAX_SECRETS_BYTES;
use mvm_proto::wire::MAX_SECRETS_WANTED;
use mvm_proto::wire::session::v1::{SecretsBundle, SecretsPiece, SecretsRefused, SecretsWanted, agent_frame};
use mvm_proto::{Digest, TenantId};
use tokio::sync::watch;
use tokio::time::Instant;
use zeroize::Zeroizing;

/// After this long without an answer, or after one that is none, a bundle is asked for again.
const ASK_AGAIN: Duration = Duration::from_secs(10);

type Wanted = (TenantId, Digest);

/// A bundle that came whole.
#[derive(Debug)]
pub(super) struct Arrived {
    pub(super) tenant: TenantId,
    pub(super) digest: Digest,
    pub(super) bytes: Zeroizing<Vec<u8>>,
}

#[derive(Debug)]
pub(super) struct SecretsFeed {
    lacking: watch::Receiver<BTreeSet<Wanted>>,
    /// Whether the coordinator has any.
    is_on: bool,
    /// Asked for, and not answered yet.
    open: BTreeSet<Wanted>,
    /// Answered, whether or not they came.
    answered: BTreeSet<Wanted>,
    again: Option<Instant>,
    incoming: Option<(Wanted, usize, Zeroizing<Vec<u8>>)>,
}

impl SecretsFeed {
    pub(super) fn new(lacking: watch::Receiver<BTreeSet<Wanted>>, is_on: bool) -> Self {
        let (open, answered) = (BTreeSet::new(), BTreeSet::new());
        Self { lacking, is_on, open, answered, again: None, incoming: None }
    }

    /// Waits until there is something to ask for. Cancel-safe.
    pub(super) async fn next(&mut self) -> agent_frame::Body {
        if !self.is_on {
            return std::future::pending().await;
        }
        loop {
            if let Some(wanted) = self.ask() {
                return agent_frame::Body::SecretsWanted(wanted);
            }
            let again = self.again;
            tokio::select! {
                changed = self.lacking.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
                () = tokio::time::sleep_until(again.unwrap_or_else(Instant::now)), if again.is_some() => {
                    (self.again, self.incoming) = (None, None);
                    self.open.clear();
                    self.answered.clear();
                }
            }
        }
    }

    fn ask(&mut self) -> Option<SecretsWanted> {
        let lacking = self.lacking.borrow_and_update().clone();
        self.open.retain(|wanted| lacking.contains(wanted));
        self.answered.retain(|wanted| lacking.contains(wanted));
        if lacking.is_empty() {
            self.again = None;
        }
        if !self.open.is_empty() {
            return None;
        }
        self.open = lacking.difference(&self.answered).take(MAX_SECRETS_WANTED).cloned().collect();
        if self.open.is_empty() {
            return None;
        }
        self.again = Some(Instant::now() + ASK_AGAIN);
        let bundle = |(tenant, digest): &Wanted| SecretsBundle {
            tenant_id: tenant.to_string(),
            digest: digest.to_string(),
        };
        Some(SecretsWanted { bundles: self.open.iter().map(bundle).collect() })
    }

    fn wanted(&self, bundle: Option<&SecretsBundle>) -> Option<Wanted> {
        let bundle = bundle?;
        let wanted = (bundle.tenant_id.parse().ok()?, bundle.digest.parse().ok()?);
        self.open.contains(&wanted).then_some(wanted)
    }

    fn answer(&mut self, wanted: Wanted) {
        self.open.remove(&wanted);
        self.answered.insert(wanted);
        self.again = Some(Instant::now() + ASK_AGAIN);
    }

    /// Takes in a piece; the bundle, if it was the last. One that was not asked for, or does not follow, is passed over.
    pub(super) fn take(&mut self, piece: &SecretsPiece) -> Option<Arrived> {
        let wanted = self.wanted(piece.bundle.as_ref())?;
        let total = usize::try_from(piece.total).ok().filter(|total| *total as u64 <= MAX_SECRETS_BYTES)?;
        if piece.offset == 0 {
            // Of its full size at once: a buffer that grows leaves copies behind.
            self.incoming = Some((wanted.clone(), total, Zeroizing::new(Vec::with_capacity(total))));
        }
        let (of, expected, bytes) = self.incoming.as_mut()?;
        let follows = *of == wanted && *expected == total && piece.offset == bytes.len() as u64;
        if !follows || bytes.len() + piece.data.len() > total {
            self.incoming = None;
            return None;
        }
        bytes.extend_from_slice(&piece.data);
        // It goes on arriving.
        self.again = Some(Instant::now() + ASK_AGAIN);
        if bytes.len() < total {
            return None;
        }
        let ((tenant, digest), _, bytes) = self.incoming.take()?;
        self.answer(wanted);
        Some(Arrived { tenant, digest, bytes })
    }

    /// The coordinator has none of these now.
    pub(super) fn refused(&mut self, refused: &SecretsRefused) {
        if let Some(wanted) = self.wanted(refused.bundle.as_ref()) {
            self.answer(wanted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(n: u8) -> Wanted {
        ("acme".parse().unwrap(), Digest::of(&[n]))
    }

    fn of(n: u8) -> Option<SecretsBundle> {
        let (tenant, digest) = wanted(n);
        Some(SecretsBundle { tenant_id: tenant.to_string(), digest: digest.to_string() })
    }

    fn piece(n: u8, offset: u64, data: &'static [u8], total: u64) -> SecretsPiece {
        SecretsPiece { bundle: of(n), total, offset, data: data.to_vec().into() }
    }

    async fn asked(feed: &mut SecretsFeed) -> usize {
        let agent_frame::Body::SecretsWanted(wanted) = feed.next().await else { panic!("not that") };
        wanted.bundles.len()
    }

    fn is_idle(feed: &mut SecretsFeed) -> bool {
        use futures::FutureExt as _;
        feed.next().now_or_never().is_none()
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_lacking_is_asked_for_once_until_it_is_answered_or_time_passes() {
        let lacking = watch::Sender::new(BTreeSet::from([wanted(1), wanted(2)]));
        let mut feed = SecretsFeed::new(lacking.subscribe(), true);
        assert_eq!(asked(&mut feed).await, 2);
        assert!(is_idle(&mut feed));
        lacking.send_replace(BTreeSet::from([wanted(1), wanted(2), wanted(3)]));
        assert!(is_idle(&mut feed), "these come first");
        feed.refused(&SecretsRefused { bundle: of(1), problem: Vec::new() });
        assert!(feed.take(&piece(2, 0, b"ab", 4)).is_none());
        assert!(feed.take(&piece(1, 0, b"x", 1)).is_none(), "it was answered");
        let arrived = feed.take(&piece(2, 2, b"cd", 4)).unwrap();
        assert_eq!((arrived.digest, &**arrived.bytes), (wanted(2).1, &b"abcd"[..]));
        assert_eq!(asked(&mut feed).await, 1, "the third");
        lacking.send_replace(BTreeSet::from([wanted(1)]));
        assert!(is_idle(&mut feed));
        let begun = Instant::now();
        assert_eq!(asked(&mut feed).await, 1, "again");
        assert!(begun.elapsed() >= ASK_AGAIN - Duration::from_millis(1));
    }

    #[tokio::test(start_paused = true)]
    async fn pieces_that_do_not_follow_make_no_bundle() {
        let lacking = watch::Sender::new(BTreeSet::from([wanted(1), wanted(2)]));
        let mut feed = SecretsFeed::new(lacking.subscribe(), true);
        assert_eq!(asked(&mut feed).await, 2);
        for pieces in [
            vec![piece(1, 1, b"b", 2)],
            vec![piece(1, 0, b"abc", 2)],
            vec![piece(1, 0, b"a", 2), piece(1, 0, b"a", 2), piece(1, 2, b"b", 3)],
            vec![piece(1, 0, b"a", 2), piece(2, 1, b"b", 2), piece(1, 1, b"b", 2)],
            vec![piece(1, 0, b"a", MAX_SECRETS_BYTES + 1)],
            vec![piece(9, 0, b"a", 1)],
            vec![SecretsPiece::default()],
        ] {
            assert!(pieces.iter().all(|piece| feed.take(piece).is_none()), "{pieces:?}");
        }
        assert!(feed.take(&piece(1, 0, b"a", 1)).is_some(), "a new beginning is one");
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_than_the_frame_s_limit_is_asked_for_and_nothing_of_an_older_coordinator() {
        let many = (0..=255).map(wanted).collect::<BTreeSet<_>>();
        let lacking = watch::Sender::new(many);
        let mut feed = SecretsFeed::new(lacking.subscribe(), true);
        assert_eq!(asked(&mut feed).await, MAX_SECRETS_WANTED);
        assert!(is_idle(&mut SecretsFeed::new(lacking.subscribe(), false)));
    }
}
