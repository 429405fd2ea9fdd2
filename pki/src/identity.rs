//! Identities: `spiffe://<cluster>/<role>/<name>`, the one URI name in a leaf certificate.
//!
//! The text has one spelling only: no escapes, no ports, no trailing slash. What is not exactly that is refused, so
//! that two different texts never mean the same peer.

use std::fmt;
use std::str::FromStr;

use mvm_proto::{ClusterId, IdError, NodeId};
use rustls_pki_types::CertificateDer;
use serde::{Deserialize, Serialize};

use crate::certificate::{self, SCHEME};

/// What a certificate's holder is; what it may do is decided per endpoint, above this crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Coordinator,
    Node,
    Operator,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    #[error("a role is `coordinator`, `node` or `operator`")]
    Role,
    #[error("an identity is `spiffe://<cluster>/<role>/<name>`")]
    Shape,
    #[error("the identity's {part} {cause}")]
    Part { part: &'static str, cause: IdError },
    #[error("the certificate carries {found} URI names, exactly one is needed")]
    NotExactlyOne { found: usize },
    #[error("the certificate can't be read")]
    Unreadable,
}

/// Who someone is. Valid by construction.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    cluster: ClusterId,
    role: Role,
    name: NodeId,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Coordinator => "coordinator",
            Self::Node => "node",
            Self::Operator => "operator",
        })
    }
}

impl FromStr for Role {
    type Err = IdentityError;
    fn from_str(text: &str) -> Result<Self, IdentityError> {
        match text {
            "coordinator" => Ok(Self::Coordinator),
            "node" => Ok(Self::Node),
            "operator" => Ok(Self::Operator),
            _ => Err(IdentityError::Role),
        }
    }
}

impl Identity {
    pub fn new(cluster: ClusterId, role: Role, name: &str) -> Result<Self, IdError> {
        Ok(Self { cluster, role, name: name.parse()? })
    }

    #[must_use]
    pub fn cluster(&self) -> &ClusterId {
        &self.cluster
    }

    #[must_use]
    pub fn role(&self) -> Role {
        self.role
    }

    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// The node that this identity speaks for; only a node's identity does.
    #[must_use]
    pub fn node_id(&self) -> Option<NodeId> {
        (self.role == Role::Node).then(|| self.name.clone())
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}/{}", self.cluster, self.role, self.name)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Identity {
    type Err = IdentityError;
    fn from_str(text: &str) -> Result<Self, IdentityError> {
        let path = text.strip_prefix(SCHEME).ok_or(IdentityError::Shape)?;
        let mut parts = path.split('/');
        let (Some(cluster), Some(role), Some(name), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(IdentityError::Shape);
        };
        let part = |part| move |cause| IdentityError::Part { part, cause };
        let cluster = cluster.parse().map_err(part("cluster"))?;
        Self::new(cluster, role.parse()?, name).map_err(part("name"))
    }
}

/// The identity in a leaf certificate: its only URI name. The common name is not looked at.
///
/// Says nothing about whether the certificate is to be believed.
pub fn identity_of(leaf: &CertificateDer<'_>) -> Result<Identity, IdentityError> {
    let uris = certificate::uris(leaf).map_err(|_| IdentityError::Unreadable)?;
    match uris.as_slice() {
        [uri] => uri.parse(),
        _ => Err(IdentityError::NotExactlyOne { found: uris.len() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_identity_reads_back_from_its_own_text(
            cluster in "[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?",
            role in prop_oneof![Just(Role::Coordinator), Just(Role::Node), Just(Role::Operator)],
            name in "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
        ) {
            let identity = Identity::new(cluster.parse().unwrap(), role, &name).unwrap();
            prop_assert_eq!(identity.to_string().parse(), Ok(identity));
        }

        #[test]
        fn a_text_that_is_read_is_written_the_same(
            text in "(spiffe://)?[a-zA-Z0-9./%?#@: -]{0,12}(/node|/operator|/coordinator|/root|/)?[a-z0-9/%.-]{0,12}",
        ) {
            if let Ok(identity) = text.parse::<Identity>() {
                prop_assert_eq!(identity.to_string(), text);
            }
        }
    }

    #[test]
    fn texts_that_only_look_like_an_identity_are_refused() {
        for bad in [
            "",
            "spiffe://",
            "spiffe://c",
            "spiffe://c/node",
            "spiffe://c/node/",
            "spiffe://c/node/a/b",
            "spiffe://c/node/a/",
            "SPIFFE://c/node/a",
            "spiffe://c/Node/a",
            "spiffe://c//a",
            "spiffe:///node/a",
            "spiffe://c/node/../a",
            "spiffe://c/node/a%2fb",
            "spiffe://c:1/node/a",
            "spiffe://u@c/node/a",
            "spiffe://c/node/a?x",
            "spiffe://c/node/a#x",
            " spiffe://c/node/a",
            "https://c/node/a",
            "spiffe://c/admin/a",
        ] {
            assert!(bad.parse::<Identity>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn only_a_node_identity_speaks_for_a_node() {
        let cluster: ClusterId = "c".parse().unwrap();
        for (role, speaks) in [(Role::Node, true), (Role::Coordinator, false), (Role::Operator, false)] {
            let identity = Identity::new(cluster.clone(), role, "a").unwrap();
            assert_eq!(identity.node_id().is_some(), speaks);
        }
    }
}
