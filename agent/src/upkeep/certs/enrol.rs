//! Enrolment: trades a join token for this node's first certificate, or for a new one after an expiry.
//!
//! The root is pinned before anything secret is sent: by `ca.crt` when there is one, else by the fingerprint in the
//! token. Only then is a fully verified connection made, and only over that do token and request travel. The key is
//! made here and never leaves. Whose documents to obey is pinned too: the trust root whose digest is in the token.

use std::path::Path;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mvm_pki::{
    Anchors, CertificateStatus, Credential, CsrNames, Identity, JoinToken, LeafKey, LiveAnchors, Renewed,
    Role, TrustBundle, TrustStore, files,
};
use mvm_proto::text::chain;
use mvm_proto::{ClusterId, NodeId, Timestamp};
use mvm_transport::{ALPN_H3, Target};
use serde::{Deserialize, Serialize};

use super::coordinator_call::{self, Call};
use super::{CertsDir, CertsError, Enrolment, PUBLIC_MODE, default_names};

#[derive(Serialize)]
struct EnrolRequest<'a> {
    token: &'a str,
    csr: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_id: Option<&'a NodeId>,
}

#[derive(Deserialize)]
struct EnrolAnswer {
    chain_pem: String,
    roots_pem: String,
    /// Older coordinators know of none.
    #[serde(default)]
    endorsements_pem: String,
    cluster: ClusterId,
    node_id: NodeId,
    trust: TrustBundle,
}

/// Asks the coordinator for a certificate with a join token, and stores what it gives.
///
/// The node's id is the one that the token is bound to; `node_id` only checks that it is the expected one. Without
/// `names`, those of [`default_names`] are asked for.
pub async fn request(
    certs_dir: &Path,
    coordinator: &Target,
    token: &JoinToken,
    node_id: Option<NodeId>,
    names: CsrNames,
    timeout: Duration,
) -> Result<CertificateStatus, CertsError> {
    let names = if names == CsrNames::default() { default_names() } else { names };
    let dir = CertsDir::new(certs_dir);
    files::create_private_dir(certs_dir).map_err(|cause| dir.write_error(cause))?;
    let pinned = pinned_roots(&dir, coordinator, token, timeout).await?;
    let key = LeafKey::generate().map_err(|cause| CertsError::Key(cause.into()))?;
    let csr = key.csr_der(&names).map_err(|cause| CertsError::Key(cause.into()))?;

    let text = token.expose();
    let body = EnrolRequest { token: text.as_str(), csr: STANDARD.encode(csr), node_id: node_id.as_ref() };
    let tls = coordinator_call::verified(None, &LiveAnchors::new(pinned.clone()), ALPN_H3)
        .map_err(|cause| CertsError::Key(cause.into()))?;
    let answer: EnrolAnswer = Call { coordinator, tls, timeout }.post("/v1/enrol", &body).await?;

    let now = Timestamp::from(SystemTime::now());
    let received = check(coordinator, key, &answer, &pinned, node_id.as_ref(), now)?;
    let trust = follow_trust(&dir, coordinator, token, &answer, now)?;
    store(&dir, &received, &trust, &Enrolment::new(coordinator, &names))?;
    Ok(CertificateStatus::of(&received.credential, &received.anchors, Some(&trust), now))
}

/// The roots that the coordinator must prove itself by.
async fn pinned_roots(
    dir: &CertsDir,
    coordinator: &Target,
    token: &JoinToken,
    timeout: Duration,
) -> Result<Anchors, CertsError> {
    if dir.ca().exists() {
        let anchors = Anchors::load(&dir.ca())
            .map_err(|cause| CertsError::Damaged { path: dir.ca(), cause: Box::new(cause) })?;
        if !anchors.contains(&token.fingerprint()) {
            return Err(CertsError::TokenForOtherRoot { token: token.fingerprint(), path: dir.ca() });
        }
        return Ok(anchors);
    }
    let tls = coordinator_call::unverified().map_err(|cause| CertsError::Key(cause.into()))?;
    let bytes = Call { coordinator, tls, timeout }.get("/v1/ca").await?;
    let text = String::from_utf8_lossy(&bytes);
    Anchors::pinned(&text, &token.fingerprint())
        .map_err(|cause| CertsError::RootNotThere { coordinator: coordinator.clone(), cause })
}

struct Received {
    credential: Credential,
    anchors: Anchors,
}

/// Whether the answer is a certificate for this key, this cluster and the expected node, under a pinned root.
fn check(
    coordinator: &Target,
    key: LeafKey,
    answer: &EnrolAnswer,
    pinned: &Anchors,
    expected: Option<&NodeId>,
    now: Timestamp,
) -> Result<Received, CertsError> {
    let unusable = |detail: String| CertsError::BadAnswer { coordinator: coordinator.clone(), detail };
    if answer.cluster != *pinned.cluster() {
        return Err(CertsError::OtherCluster {
            coordinator: coordinator.clone(),
            expected: pinned.cluster().clone(),
            found: answer.cluster.clone(),
        });
    }
    if expected.is_some_and(|id| *id != answer.node_id) {
        return Err(unusable(format!("a certificate for node {}", answer.node_id)));
    }
    let identity = Identity::new(answer.cluster.clone(), Role::Node, answer.node_id.as_str())
        .map_err(|cause| unusable(cause.to_string()))?;
    let issued = Renewed {
        chain_pem: answer.chain_pem.clone(),
        roots_pem: Some(answer.roots_pem.clone()),
        endorsements_pem: answer.endorsements_pem.clone(),
    };
    let (credential, anchors) =
        issued.accept(key, &identity, pinned, now).map_err(|cause| unusable(chain(&cause)))?;
    Ok(Received { credential, anchors })
}

/// Whose documents to obey: pinned at the first enrolment by the digest in the token, and from then on only followed,
/// never replaced.
fn follow_trust(
    dir: &CertsDir,
    coordinator: &Target,
    token: &JoinToken,
    answer: &EnrolAnswer,
    now: Timestamp,
) -> Result<TrustStore, CertsError> {
    let not_there = |cause| CertsError::TrustRootNotThere { coordinator: coordinator.clone(), cause };
    answer.trust.root(token.trust_root()).map_err(not_there)?;
    let (trust, followed) = if dir.trust().exists() {
        let mut trust = TrustStore::load(&dir.trust())
            .map_err(|cause| CertsError::Damaged { path: dir.trust(), cause: Box::new(cause) })?;
        let followed = trust.update(&answer.trust, now).map_err(CertsError::Trust)?;
        (trust, followed)
    } else {
        TrustStore::pin_digest(&answer.trust, token.trust_root(), now).map_err(CertsError::Trust)?
    };
    if let Some(refused) = followed.images_refused {
        let code = refused.code();
        tracing::warn!(code, error = %refused, "could not use the coordinator's statement of images");
    }
    if *trust.cluster() == answer.cluster {
        return Ok(trust);
    }
    Err(CertsError::OtherCluster {
        coordinator: coordinator.clone(),
        expected: answer.cluster.clone(),
        found: trust.cluster().clone(),
    })
}

fn store(
    dir: &CertsDir,
    received: &Received,
    trust: &TrustStore,
    enrolment: &Enrolment,
) -> Result<(), CertsError> {
    trust.save(&dir.trust()).map_err(CertsError::Trust)?;
    let note = serde_json::to_vec_pretty(enrolment).unwrap_or_default();
    files::write_atomic(dir.enrolment(), &note, PUBLIC_MODE).map_err(|cause| dir.write_error(cause))?;
    dir.save(&received.credential, &received.anchors).map_err(|cause| dir.write_error(cause))
}
