//! One node of a rollout: what its document names, what it may still follow, and what it said of itself.

use mvm_proto::Digest;

use super::super::offers::{DocumentNumber, Most as _};
use super::Grant;

/// What a node's document says of a pool's revision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Named {
    pub revision: Digest,
    /// The secrets that its instances are given.
    pub secrets: Option<Digest>,
    /// None: the document says nothing of it, and the node goes by its own rule.
    pub grant: Option<Grant>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RolloutNode {
    /// How many instances are to run there.
    pub wanted: u32,
    /// What its newest document names; none: it has none with the pool yet.
    pub named: Option<Named>,
    /// The most that any document grants that it may still follow. None: it said that nothing is left to replace by any of them.
    pub open: Option<Grant>,
    pub report: Report,
    /// Nothing is heard of it: what it has counts as not serving, and it is begun with nothing.
    pub away: bool,
    /// Its agent knows no grants.
    pub whole: bool,
}

/// What a node said last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Since it follows its newest document: what it says is of that one's revision.
    pub of_newest: bool,
    pub serving: u32,
    /// Of its document's revision, in all phases.
    pub current: u32,
    /// Running, and their program does not work.
    pub down: u32,
    /// Of an older revision: what it has left to replace.
    pub outdated: u32,
    /// Running, or on their way, beyond what is wanted.
    pub surge: u32,
    /// Why instances of its document's revision fail.
    pub failing: Option<String>,
}

impl RolloutNode {
    /// Whether it has nothing to replace by any document that it may follow: what it was granted changes nothing any more.
    #[must_use]
    pub(super) fn is_spent(&self) -> bool {
        self.named.is_none() || self.open.is_none() || (self.report.of_newest && self.report.outdated == 0)
    }

    /// What it may still use of what was granted.
    pub(super) fn open_grant(&self) -> Grant {
        self.open.filter(|_| !self.is_spent()).unwrap_or_default()
    }

    /// Of what is wanted here, how much does not serve, or may not.
    pub(super) fn unavailable(&self) -> u32 {
        let serving = if self.away { 0 } else { self.report.serving };
        self.wanted.saturating_sub(serving).max(self.open_grant().unavailable)
    }

    /// How many run beyond what is wanted here, or may.
    pub(super) fn surge(&self) -> u32 {
        self.report.surge.max(self.open_grant().surge)
    }

    /// Whether some of it does not work: replacing that costs nothing.
    pub(super) fn is_broken(&self) -> bool {
        self.report.down > 0
    }
}

/// What a document that a node may follow says of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OfferedRevision {
    /// None: it is not known.
    pub revision: Option<Digest>,
    pub secrets: Option<Digest>,
    pub grant: Grant,
}

/// The most that a node may use of what it was offered, oldest first. `clean_at` is the document of which it said that nothing is
/// left to replace: as long as documents after that one name the same, what they grant is of no use, and None is returned.
#[must_use]
pub fn open_grant(
    offers: impl IntoIterator<Item = (DocumentNumber, OfferedRevision)>,
    clean_at: Option<DocumentNumber>,
) -> Option<Grant> {
    let most = |rest: &[(DocumentNumber, OfferedRevision)]| {
        rest.iter().map(|(_, offer)| offer.grant).reduce(|most, other| most.most(&other)).unwrap_or_default()
    };
    let offers: Vec<_> = offers.into_iter().collect();
    // An offer stands for all documents up to the next one. A node that forgot its numbers may follow any of them.
    let followed = clean_at.and_then(|at| {
        offers.iter().rposition(|(number, _)| *number > DocumentNumber::default() && *number <= at)
    });
    let Some(at) = followed else { return Some(most(&offers)) };
    let same = |offer: &OfferedRevision| {
        let now = &offers[at].1;
        now.revision.is_some() && (now.revision, now.secrets) == (offer.revision, offer.secrets)
    };
    let first = offers[at..].iter().position(|(_, offer)| !same(offer))?;
    Some(most(&offers[at + first..]))
}
