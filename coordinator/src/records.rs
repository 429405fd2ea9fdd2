//! What the store holds, and under which keys. Values are JSON, so that a backup can be read by people.
//!
//! ```text
//! meta/epoch              how often a coordinator opened this store
//! meta/numbers_reset      the newest trust root whose reset of numbers was carried out
//! tokens/<token id>       join tokens: the hash of the secret, never the secret
//! nodes/<node id>         enrolled nodes, removed ones included
//! objects/<plural>/...    declared objects; see `objects`
//! placed/<tenant>/...      where instances are placed; see `placement`
//! held/<tenant>/<node>    nodes that have or had instances of a tenant; see `placement`
//! rollouts/<tenant>/<pool> revisions of a pool, and how far the newest is; see `placement`
//! moves/<id>              instances on their way between nodes; see `placement`
//! offers/<node id>        what the node may be following of each tenant; written with its document
//! operators/<name>        operators and their certificates, removed ones included
//! assigned/<node id>      numbers of the newest document; the guard of every document transaction
//! envelopes/<node id>     that document, signed, exactly as it is sent
//! status/<node id>        what the node last said of itself; written sparingly
//! ```

mod membership;
mod node;
mod operator;

use mvm_proto::control::TokenState;
use mvm_proto::status::{Mark, NodeInfo, NodeStatus};
use mvm_proto::{Digest, NodeId, Timestamp};
use serde::{Deserialize, Serialize};

pub(crate) use membership::IssuedRecord;
pub(crate) use node::{FixedNames, NodeRecord};
pub(crate) use operator::{IssuedOffline, OperatorRecord};

pub(crate) const EPOCH_KEY: &str = "meta/epoch";
pub(crate) const TOKENS: &str = "tokens/";
pub(crate) const NODES: &str = "nodes/";
pub(crate) const OBJECTS: &str = "objects/";
pub(crate) const OPERATORS: &str = "operators/";
pub(crate) const ASSIGNED: &str = "assigned/";
pub(crate) const STATUS: &str = "status/";
pub(crate) const OFFERS: &str = "offers/";

pub(crate) fn token_key(id: &str) -> String {
    format!("{TOKENS}{id}")
}
pub(crate) fn node_key(node: &NodeId) -> String {
    format!("{NODES}{node}")
}
pub(crate) fn operator_key(name: &str) -> String {
    format!("{OPERATORS}{name}")
}
pub(crate) fn assigned_key(node: &NodeId) -> String {
    format!("{ASSIGNED}{node}")
}
pub(crate) fn envelope_key(node: &NodeId) -> String {
    format!("envelopes/{node}")
}
pub(crate) fn offers_key(node: &NodeId) -> String {
    format!("{OFFERS}{node}")
}
pub(crate) fn status_key(node: &NodeId) -> String {
    format!("{STATUS}{node}")
}

/// A join token as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TokenRecord {
    pub(crate) token_id: String,
    pub(crate) node_id: NodeId,
    pub(crate) secret_hash: Digest,
    pub(crate) created_at: Timestamp,
    pub(crate) created_by: String,
    pub(crate) expires_at: Timestamp,
    pub(crate) used_at: Option<Timestamp>,
    pub(crate) revoked_at: Option<Timestamp>,
    /// Names that the node's certificate may carry besides those that every node's may.
    #[serde(default)]
    pub(crate) names: FixedNames,
}

impl TokenRecord {
    pub(crate) fn state(&self, now: Timestamp) -> TokenState {
        if self.used_at.is_some() {
            TokenState::Used
        } else if self.revoked_at.is_some() {
            TokenState::Revoked
        } else if now >= self.expires_at {
            TokenState::Expired
        } else {
            TokenState::Live
        }
    }

    /// When it ceased to be of use, if it has.
    pub(crate) fn ended_at(&self, now: Timestamp) -> Option<Timestamp> {
        self.used_at.or(self.revoked_at).or((now >= self.expires_at).then_some(self.expires_at))
    }
}

/// A place in the order of documents for one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Numbers {
    pub(crate) epoch: u64,
    pub(crate) generation: u64,
}

impl From<&Mark> for Numbers {
    fn from(mark: &Mark) -> Self {
        Self { epoch: mark.epoch, generation: mark.generation }
    }
}

/// The newest document of a node, without its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Assigned {
    #[serde(flatten)]
    pub(crate) numbers: Numbers,
    pub(crate) digest: Digest,
    pub(crate) issued_at: Timestamp,
    pub(crate) expires_at: Timestamp,
    /// Of what it says, without what the coordinator adds: what says the same is not issued again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<Digest>,
}

impl Assigned {
    pub(crate) fn mark(&self) -> Mark {
        Mark::new(self.numbers.epoch, self.numbers.generation, self.digest)
    }

    /// Half of its life: when it is issued again.
    pub(crate) fn reissue_at(&self) -> Timestamp {
        self.issued_at + self.expires_at.since(self.issued_at) / 2
    }
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StatusRecord {
    pub(crate) last_seen_at: Option<Timestamp>,
    pub(crate) info: Option<NodeInfo>,
    pub(crate) status: Option<NodeStatus>,
    pub(crate) accepted: Option<Mark>,
    pub(crate) converged: Option<Mark>,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_ms(seconds * 1000)
    }

    fn token() -> TokenRecord {
        TokenRecord {
            token_id: "00".into(),
            node_id: "n".parse().unwrap(),
            secret_hash: Digest::of(b""),
            created_at: at(0),
            created_by: "admin".into(),
            expires_at: at(600),
            used_at: None,
            revoked_at: None,
            names: FixedNames::default(),
        }
    }

    #[test]
    fn a_token_is_live_until_the_instant_it_expires() {
        assert_eq!(token().state(at(599)), TokenState::Live);
        assert_eq!(token().state(at(600)), TokenState::Expired);
        assert_eq!(token().ended_at(at(599)), None);
        assert_eq!(token().ended_at(at(700)), Some(at(600)));
    }

    #[test]
    fn a_used_token_stays_used_after_its_expiry() {
        let used = TokenRecord { used_at: Some(at(5)), ..token() };
        assert_eq!(used.state(at(6000)), TokenState::Used);
        assert_eq!(used.ended_at(at(6000)), Some(at(5)));
    }

    #[test]
    fn a_document_is_due_again_at_half_of_its_life() {
        let numbers = Numbers { epoch: 1, generation: 1 };
        let assigned = Assigned {
            numbers,
            digest: Digest::of(b""),
            issued_at: at(100),
            expires_at: at(100) + Duration::from_secs(60),
            content: None,
        };
        assert_eq!(assigned.reissue_at(), at(130));
        let text = serde_json::to_vec(&assigned).unwrap();
        assert_eq!(serde_json::from_slice::<Assigned>(&text).unwrap(), assigned);
    }
}
