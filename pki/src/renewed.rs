//! An authority's answer to a renewal, and whether it may replace what is in use.
//!
//! The answer comes over a connection whose other end showed a coordinator's certificate. That is not enough to
//! believe its roots: a certificate and its key can be stolen. A root is taken over only if a root that is trusted
//! already endorses it, and the new chain has to lead to a root that stays trusted.

use mvm_proto::Timestamp;

use crate::credential::{Anchors, Credential, LeafKey};
use crate::endorsement::{self, Endorsements, Followed};
use crate::identity::Identity;
use crate::renewal_task::BoxError;
use crate::tls;

/// What an authority answers to a renewal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Renewed {
    pub chain_pem: String,
    /// The roots to trust from now on; `None` leaves them.
    pub roots_pem: Option<String>,
    /// Why to trust those that are new; see [`endorsement`].
    pub endorsements_pem: String,
}

#[derive(Debug, thiserror::Error)]
pub enum RenewedError {
    #[error("the answer can't be used")]
    Unusable(#[source] BoxError),
    #[error("the new certificate is for {found}, not for {expected}")]
    OtherIdentity { expected: Identity, found: Identity },
    #[error("the new certificate does not lead to a root that is trusted here or endorsed by one that is")]
    Chain(#[source] BoxError),
}

impl Renewed {
    /// The credential of `key` and the roots to trust from now on, if the answer is for `expected` and follows from
    /// the roots in `current`.
    pub fn accept(
        &self,
        key: LeafKey,
        expected: &Identity,
        current: &Anchors,
        now: Timestamp,
    ) -> Result<(Credential, Anchors), RenewedError> {
        let unusable = |cause: BoxError| RenewedError::Unusable(cause);
        let credential =
            Credential::with_chain_pem(key, &self.chain_pem).map_err(|cause| unusable(cause.into()))?;
        if credential.identity() != expected {
            let (expected, found) = (expected.clone(), credential.identity().clone());
            return Err(RenewedError::OtherIdentity { expected, found });
        }
        let anchors = match &self.roots_pem {
            Some(roots) => self.follow(roots, current, now).map_err(unusable)?,
            None => current.clone(),
        };
        tls::verify_issued(&anchors, &credential).map_err(|refusal| RenewedError::Chain(refusal.into()))?;
        Ok((credential, anchors))
    }

    fn follow(&self, roots_pem: &str, current: &Anchors, now: Timestamp) -> Result<Anchors, BoxError> {
        let offered = Anchors::from_pem(roots_pem)?;
        let endorsements = Endorsements::from_pem(&self.endorsements_pem)?;
        let Followed { anchors, left_out } = endorsement::follow(current, &offered, &endorsements, now)?;
        for root in left_out {
            tracing::warn!(%root, "a renewal offered a root that no trusted root endorses; it is not trusted");
        }
        Ok(anchors)
    }
}
