//! Who is who, and whose word counts: authorities, credentials, identities, rotation, document signing and trust.
//!
//! Two separate systems live here. Certificates ([`authority`], [`credential`], [`tls`]) say who is at the other end
//! of a connection. Signatures ([`signing`], [`trust`]) say whose documents a node obeys. Neither can stand in for
//! the other: a stolen TLS key signs no document, and a signing key opens no connection.
//!
//! Absent on purpose: cryptography of our own, X.509 revocation lists (leaves live for a day, the coordinator refuses what
//! was removed and tells its agents), TLS resumption and 0-RTT (both would skip the check of the peer's certificate).

pub mod authority;
pub mod batch;
mod certificate;
pub mod credential;
pub mod endorsement;
pub mod files;
pub mod identity;
pub mod live;
pub mod mac;
mod pem;
pub mod refusal;
pub mod renewal_task;
mod renewed;
pub mod rotation;
pub mod signing;
pub mod status;
pub mod tls;
pub mod token;
pub mod trust;

pub use authority::{Authority, AuthorityError, Issued, LEAF_LIFE, LeafProfile, RootAuthority};
pub use credential::{Anchors, Credential, CredentialError, CsrNames, LeafKey};
pub use identity::{Identity, IdentityError, Role, identity_of};
pub use live::{LiveAnchors, LiveCredential};
pub use refusal::{Refusal, refusal_of};
pub use renewal_task::{BoxError, Renew, renewal_task};
pub use renewed::{Renewed, RenewedError};
pub use signing::{PublicKey, SigningError, SigningKey, seal};
pub use status::CertificateStatus;
pub use tls::{ClientAuth, ExpectedPeer, TlsError};
pub use token::{JoinToken, TokenError, random_bytes};
pub use trust::{ImagesMetadata, RootChange, RootMetadata, TrustBundle, TrustError, TrustStore};
