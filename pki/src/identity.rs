//! Identities: `spiffe://<cluster>/<role>/<name>`, the one URI name in a leaf certificate.

use std::fmt;
use std::str::FromStr;

use mvm_proto::{ClusterId, IdError, NodeId};
use rustls_pki_types::CertificateDer;

/// What a certificate's holder is; what it may do is decided per endpoint, above this crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
    #[error("the certificate can not be read")]
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
        write!(f, "spiffe://{}/{}/{}", self.cluster, self.role, self.name)
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
        let path = text.strip_prefix("spiffe://").ok_or(IdentityError::Shape)?;
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
    let _ = leaf;
    todo!()
}
