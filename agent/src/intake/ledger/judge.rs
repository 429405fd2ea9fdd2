//! Whether a verified document may follow the one in force. Pure: time and identity arrive.

use std::time::Duration;

use mvm_proto::status::Mark;
use mvm_proto::{ClusterId, Digest, NodeId, Problem, SignedDocument, Timestamp};

/// How far a coordinator's clock may be ahead of this node's.
pub const MAX_SKEW: Duration = Duration::from_secs(5 * 60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Higher than everything accepted so far.
    New,
    /// The document in force, again.
    Same,
}

/// Why a verified document is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the document is for cluster {found}, this node belongs to {own}")]
    WrongCluster { own: ClusterId, found: ClusterId },
    #[error("the document is for node {found}, this is {own}")]
    WrongNode { own: NodeId, found: NodeId },
    #[error("the document was issued at {issued_at}, more than 5 minutes ahead of this node's {now}")]
    FromTheFuture { issued_at: Timestamp, now: Timestamp },
    #[error("the document expired at {expires_at}; it is {now} here")]
    Expired { expires_at: Timestamp, now: Timestamp },
    #[error("epoch {}, generation {} is older than epoch {}, generation {}, which was accepted",
        found.0, found.1, held.0, held.1)]
    Stale { held: (u64, u64), found: (u64, u64) },
    #[error("epoch {}, generation {} was already accepted with different content", held.0, held.1)]
    Conflict { held: (u64, u64), held_digest: String, found_digest: Digest },
}

impl Refused {
    #[must_use]
    pub fn to_problem(&self) -> Problem {
        let (status, code, remediation) = match self {
            Self::WrongCluster { .. } => (403, "wrong_cluster", "send it to a node of that cluster"),
            Self::WrongNode { .. } => (403, "wrong_node", "send it to the node that it names"),
            Self::FromTheFuture { .. } => (422, "from_the_future", "compare the clocks of both machines"),
            Self::Expired { .. } => {
                (422, "expired", "issue the document again; compare the clocks of both machines")
            }
            Self::Stale { .. } => (
                409,
                "stale_generation",
                "issue the document with a generation above this node's high-water mark",
            ),
            Self::Conflict { .. } => {
                (409, "generation_conflict", "issue the document again with the next generation")
            }
        };
        Problem::new(status, code, self.to_string(), remediation)
    }
}

/// The rules of acceptance, in the order in which they are checked.
pub fn judge(
    high_water: Option<&Mark>,
    document: &SignedDocument,
    digest: Digest,
    own: (&ClusterId, &NodeId),
    now: Timestamp,
) -> Result<Verdict, Refused> {
    let (cluster, node) = own;
    let provenance = &document.provenance;
    if provenance.cluster != *cluster {
        return Err(Refused::WrongCluster { own: cluster.clone(), found: provenance.cluster.clone() });
    }
    if document.desired.node_id != *node {
        return Err(Refused::WrongNode { own: node.clone(), found: document.desired.node_id.clone() });
    }
    if provenance.issued_at > now + MAX_SKEW {
        return Err(Refused::FromTheFuture { issued_at: provenance.issued_at, now });
    }
    if provenance.expires_at <= now {
        return Err(Refused::Expired { expires_at: provenance.expires_at, now });
    }
    let Some(held) = high_water else { return Ok(Verdict::New) };
    let found = (provenance.epoch, provenance.generation);
    match found.cmp(&held.order()) {
        std::cmp::Ordering::Greater => Ok(Verdict::New),
        std::cmp::Ordering::Less => Err(Refused::Stale { held: held.order(), found }),
        std::cmp::Ordering::Equal if held.digest == digest.to_string() => Ok(Verdict::Same),
        std::cmp::Ordering::Equal => Err(Refused::Conflict {
            held: held.order(),
            held_digest: held.digest.clone(),
            found_digest: digest,
        }),
    }
}
