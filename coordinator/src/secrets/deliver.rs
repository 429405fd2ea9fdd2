//! What one session's node is given of the bundles that it asks for: one bundle at a time, in pieces, with room for a document
//! between any two. The session asks what to send; nothing is sent here.

use std::collections::VecDeque;
use std::time::Duration;

use mvm_proto::wire::session::v1::{SecretsBundle, SecretsPiece, SecretsRefused, coordinator_frame};
use mvm_proto::wire::{MAX_SECRETS_WANTED, SECRETS_PIECE_BYTES};
use mvm_proto::{Digest, Problem, TenantId};
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::Bundle;

/// A list of bundles is looked at this often at most: each bundle is read from the store and decrypted.
const LIST_EVERY: Duration = Duration::from_millis(250);

/// What there is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Next {
    pub(crate) tenant: TenantId,
    pub(crate) digest: Digest,
}

#[derive(Debug, Default)]
pub(crate) struct Delivery {
    /// The newest list, which takes the place of the one before.
    listed: Option<Vec<SecretsBundle>>,
    looked_at: Option<Instant>,
    wanted: VecDeque<SecretsBundle>,
    sending: Option<Sending>,
    refused: Option<SecretsRefused>,
}

#[derive(Debug)]
struct Sending {
    of: SecretsBundle,
    bytes: Zeroizing<Vec<u8>>,
    sent: usize,
}

impl Delivery {
    /// The node lacks these. An error is a list that no agent sends.
    pub(crate) fn want(&mut self, bundles: Vec<SecretsBundle>) -> Result<(), String> {
        if bundles.len() > MAX_SECRETS_WANTED {
            return Err(format!("a frame asks for more than {MAX_SECRETS_WANTED} bundles of secrets"));
        }
        self.listed = Some(bundles);
        Ok(())
    }

    /// When there is a bundle to be made; none: nothing is asked for, or one is being sent.
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        if self.sending.is_some() || self.refused.is_some() {
            return None;
        }
        if !self.wanted.is_empty() && self.listed.is_none() {
            return Some(now);
        }
        self.listed.as_ref()?;
        Some(self.looked_at.map_or(now, |at| at + LIST_EVERY))
    }

    /// The bundle to make now.
    pub(crate) fn next(&mut self, now: Instant) -> Option<Next> {
        if let Some(listed) = self.listed.take() {
            self.looked_at = Some(now);
            self.wanted = listed.into();
        }
        while let Some(of) = self.wanted.front() {
            match (of.tenant_id.parse(), of.digest.parse()) {
                (Ok(tenant), Ok(digest)) => return Some(Next { tenant, digest }),
                // What is no name of anything is of nothing.
                _ => drop(self.wanted.pop_front()),
            }
        }
        None
    }

    /// The bundle that [`Delivery::next`] named was made, or not.
    pub(crate) fn made(&mut self, made: Result<Bundle, Problem>) {
        let Some(of) = self.wanted.pop_front() else { return };
        match made {
            Ok(bundle) => self.sending = Some(Sending { of, bytes: bundle.bytes, sent: 0 }),
            Err(problem) => {
                let problem = serde_json::to_vec(&problem).unwrap_or_default();
                self.refused = Some(SecretsRefused { bundle: Some(of), problem });
            }
        }
    }

    /// The next frame, if there is one.
    pub(crate) fn frame(&mut self) -> Option<coordinator_frame::Body> {
        if let Some(refused) = self.refused.take() {
            return Some(coordinator_frame::Body::SecretsRefused(refused));
        }
        let sending = self.sending.as_mut()?;
        let end = (sending.sent + SECRETS_PIECE_BYTES).min(sending.bytes.len());
        let piece = SecretsPiece {
            bundle: Some(sending.of.clone()),
            total: sending.bytes.len() as u64,
            offset: sending.sent as u64,
            data: sending.bytes[sending.sent..end].to_vec().into(),
        };
        sending.sent = end;
        if end == sending.bytes.len() {
            self.sending = None;
        }
        Some(coordinator_frame::Body::SecretsPiece(piece))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(count: usize) -> Vec<SecretsBundle> {
        let of = |n: usize| Digest::of(&n.to_be_bytes()).to_string();
        (0..count).map(|n| SecretsBundle { tenant_id: "acme".to_owned(), digest: of(n) }).collect()
    }

    fn bundle(bytes: usize) -> Bundle {
        let bytes = Zeroizing::new(vec![7; bytes]);
        Bundle { digest: Digest::of(&bytes), bytes }
    }

    #[tokio::test(start_paused = true)]
    async fn a_bundle_goes_out_in_pieces_and_the_next_one_after_it() {
        let mut delivery = Delivery::default();
        let now = Instant::now();
        assert_eq!(delivery.due(now), None);
        delivery.want(wanted(2)).unwrap();
        assert_eq!(delivery.due(now), Some(now));
        assert_eq!(delivery.next(now).unwrap().digest, Digest::of(&0_usize.to_be_bytes()));
        delivery.made(Ok(bundle(2 * SECRETS_PIECE_BYTES + 1)));
        assert_eq!(delivery.due(now), None, "one at a time");
        let mut sizes = Vec::new();
        while let Some(coordinator_frame::Body::SecretsPiece(piece)) = delivery.frame() {
            sizes.push((piece.offset, piece.data.len()));
        }
        let piece = SECRETS_PIECE_BYTES;
        assert_eq!(sizes, [(0, piece), (piece as u64, piece), (2 * piece as u64, 1)]);
        assert_eq!(delivery.due(now), Some(now));
        assert_eq!(delivery.next(now).unwrap().digest, Digest::of(&1_usize.to_be_bytes()));
        delivery.made(Err(Problem::new(404, "secrets_unknown", "", "")));
        assert!(matches!(delivery.frame(), Some(coordinator_frame::Body::SecretsRefused(_))));
        assert!(delivery.frame().is_none() && delivery.due(now).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn lists_without_end_are_looked_at_at_a_pace_and_the_newest_counts() {
        let mut delivery = Delivery::default();
        let now = Instant::now();
        delivery.want(wanted(1)).unwrap();
        assert!(delivery.next(now).is_some());
        delivery.made(Err(Problem::new(404, "secrets_unknown", "", "")));
        assert!(delivery.frame().is_some());
        for count in [3, 2, 1] {
            delivery.want(wanted(count)).unwrap();
        }
        assert_eq!(delivery.due(now), Some(now + LIST_EVERY));
        assert!(delivery.next(now + LIST_EVERY).is_some());
        assert_eq!(delivery.wanted.len(), 1);
        assert!(delivery.want(wanted(MAX_SECRETS_WANTED + 1)).is_err());
        let odd = SecretsBundle { tenant_id: "No Name".to_owned(), digest: "x".to_owned() };
        delivery.want(vec![odd]).unwrap();
        assert!(delivery.next(now).is_none() && delivery.due(now).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn an_empty_bundle_has_a_piece() {
        let mut delivery = Delivery::default();
        delivery.want(wanted(1)).unwrap();
        delivery.next(Instant::now());
        delivery.made(Ok(bundle(0)));
        assert!(delivery.frame().is_some() && delivery.frame().is_none());
    }
}
