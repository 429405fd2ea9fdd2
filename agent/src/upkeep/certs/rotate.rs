//! Renewal: trades a certificate that still counts for a fresh one, by hand (`rotate`) or by the background worker.

use std::path::Path;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mvm_pki::{BoxError, CertificateStatus, CsrNames, LeafKey, LiveAnchors, LiveCredential, Renew, Renewed};
use mvm_proto::Timestamp;
use mvm_proto::text::chain;
use mvm_transport::{ALPN_H3, Target};
use serde::{Deserialize, Serialize};

use super::coordinator_call::{self, Call};
use super::{CertsDir, CertsError};

/// How long the background worker waits for one answer before it counts the attempt as failed.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Serialize)]
struct RenewRequest {
    csr: String,
}

#[derive(Deserialize)]
struct RenewAnswer {
    chain_pem: String,
    roots_pem: Option<String>,
    /// Older coordinators know of none.
    #[serde(default)]
    endorsements_pem: String,
}

impl From<RenewAnswer> for Renewed {
    fn from(answer: RenewAnswer) -> Self {
        let RenewAnswer { chain_pem, roots_pem, endorsements_pem } = answer;
        Self { chain_pem, roots_pem, endorsements_pem }
    }
}

async fn renew_at(
    coordinator: &Target,
    credential: &LiveCredential,
    anchors: &LiveAnchors,
    csr_der: Vec<u8>,
    timeout: Duration,
) -> Result<RenewAnswer, CertsError> {
    let tls = coordinator_call::verified(Some(credential), anchors, ALPN_H3)
        .map_err(|cause| CertsError::Key(cause.into()))?;
    let body = RenewRequest { csr: STANDARD.encode(csr_der) };
    Call { coordinator, tls, timeout }.post("/v1/renew", &body).await
}

/// Renews this node's certificate now. `coordinator` defaults to the one that issued it. A running agent notices the
/// new file and goes over to it without dropping a connection.
pub async fn rotate(
    certs_dir: &Path,
    coordinator: Option<&Target>,
    timeout: Duration,
) -> Result<CertificateStatus, CertsError> {
    let dir = CertsDir::new(certs_dir);
    let loaded = dir.load()?;
    let now = Timestamp::from(SystemTime::now());
    if loaded.credential.not_after() <= now {
        return Err(CertsError::Expired { not_after: loaded.credential.not_after() });
    }
    let remembered = loaded.enrolment.coordinator();
    let coordinator = coordinator.or(remembered.as_ref()).ok_or(CertsError::NoCoordinator)?;

    let key = LeafKey::generate().map_err(|cause| CertsError::Key(cause.into()))?;
    let names: CsrNames = loaded.enrolment.names();
    let csr = key.csr_der(&names).map_err(|cause| CertsError::Key(cause.into()))?;
    let identity = loaded.credential.identity().clone();
    let (live, anchors) = (LiveCredential::new(loaded.credential), LiveAnchors::new(loaded.anchors));
    let answer = renew_at(coordinator, &live, &anchors, csr, timeout).await?;

    let (credential, roots) = Renewed::from(answer)
        .accept(key, &identity, &anchors.current(), now)
        .map_err(|cause| CertsError::BadAnswer { coordinator: coordinator.clone(), detail: chain(&cause) })?;
    dir.save(&credential, &roots).map_err(|cause| dir.write_error(cause))?;
    Ok(CertificateStatus::of(&credential, &roots, Some(&loaded.trust), now))
}

/// How the background worker asks: `POST /v1/renew` on the coordinator, with the certificate that is to be replaced.
#[derive(Debug)]
pub(crate) struct CoordinatorRenewal {
    pub(crate) coordinator: Target,
    pub(crate) credential: LiveCredential,
    pub(crate) anchors: LiveAnchors,
}

impl Renew for CoordinatorRenewal {
    async fn renew(&self, _key: &LeafKey, csr_der: Vec<u8>) -> Result<Renewed, BoxError> {
        let answer =
            renew_at(&self.coordinator, &self.credential, &self.anchors, csr_der, RENEWAL_TIMEOUT).await?;
        Ok(answer.into())
    }
}
