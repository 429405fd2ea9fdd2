//! How one root vouches for another: the only way by which a root that is not trusted yet becomes trusted.
//!
//! An endorsement is a certificate, signed by a root's key itself, that names the digest of the other root's
//! certificate. It has a purpose of its own, so that it can neither take part in a TLS chain nor be mistaken for an
//! issuing authority. It is made where both root keys are at hand (`mvm coordinator root add`) and comes to nodes and
//! operators with every renewal. What is online, the issuing authority's key included, can make none.

use std::io;
use std::path::Path;
use std::time::Duration;

use mvm_proto::{ClusterId, Digest, Timestamp};
use rustls_pki_types::{CertificateDer, UnixTime};
use webpki::{EndEntityCert, KeyUsage};

use crate::certificate::{self, SCHEME};
use crate::credential::{Anchors, CredentialError};
use crate::live::Prepared;
use crate::tls::provider;
use crate::{files, pem};

/// How long an endorsement counts: a slow change of roots, with weeks between its steps. One that is over can be
/// made again.
pub const ENDORSEMENT_LIFE: Duration = Duration::from_secs(90 * 24 * 60 * 60);

/// The purpose of an endorsement, `2.25.7173741.1`; the arc 2.25 needs no registration.
pub(crate) const PURPOSE: [u64; 4] = [2, 25, 7_173_741, 1];
const PURPOSE_DER: &[u8] = &[0x69, 0x83, 0xb5, 0xec, 0x6d, 0x01];

/// More roots than any change of roots has; the peer that answers a renewal chooses how many it sends.
const MAX_ROOTS: usize = 8;
/// Both ways between one root and the next, for more changes than an endorsement's life sees.
const MAX_ENDORSEMENTS: usize = 24;

/// Endorsements, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Endorsements(Vec<CertificateDer<'static>>);

impl Endorsements {
    /// As [`Endorsements::to_pem`] wrote them; an empty text holds none.
    pub fn from_pem(text: &str) -> Result<Self, CredentialError> {
        pem::read_certificates(text).map(Self).ok_or(CredentialError::NoCertificate)
    }

    #[must_use]
    pub fn to_pem(&self) -> String {
        pem::certificates(&self.0)
    }

    /// Those in a file; none when there is no file.
    pub fn load(path: &Path) -> Result<Self, CredentialError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(cause) => return Err(CredentialError::File { path: path.to_owned(), cause }),
        };
        Self::from_pem(&text)
            .map_err(|cause| CredentialError::Content { path: path.to_owned(), cause: Box::new(cause) })
    }

    pub fn save(&self, path: &Path) -> io::Result<()> {
        files::write_public(path, self.to_pem().as_bytes())
    }

    /// Adds one; beyond the bound the oldest is dropped.
    pub fn add(&mut self, endorsement: CertificateDer<'static>) {
        self.0.push(endorsement);
        let surplus = self.0.len().saturating_sub(MAX_ENDORSEMENTS);
        self.0.drain(..surplus);
    }
}

/// The roots to trust after an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Followed {
    pub anchors: Anchors,
    /// Offered, but endorsed by no trusted root.
    pub left_out: Vec<Digest>,
}

/// The name by which an endorsement refers to a root.
pub(crate) fn name(cluster: &ClusterId, root: &Digest) -> String {
    format!("{SCHEME}{cluster}/root/{root}")
}

/// Of the roots in `offered`, those that are in `current` or that a trusted one endorses. Refused when none is.
pub fn follow(
    current: &Anchors,
    offered: &Anchors,
    endorsements: &Endorsements,
    now: Timestamp,
) -> Result<Followed, CredentialError> {
    if offered.cluster() != current.cluster() {
        return Err(CredentialError::MixedClusters);
    }
    if offered.certificates().len() > MAX_ROOTS || endorsements.0.len() > MAX_ENDORSEMENTS {
        return Err(CredentialError::TooManyRoots);
    }
    let mut trusted = current.clone();
    // Each round adds a root or is the last; one that was added may endorse the next.
    loop {
        let before = trusted.certificates().len();
        let prepared = Prepared::new(trusted.clone());
        for root in offered.certificates() {
            let expected = name(current.cluster(), &certificate::fingerprint(root));
            if endorsements.0.iter().any(|endorsement| endorses(&prepared, endorsement, &expected, now)) {
                trusted.add(root.clone())?;
            }
        }
        if trusted.certificates().len() == before {
            break;
        }
    }
    let (accepted, left_out): (Vec<_>, Vec<_>) =
        offered.certificates().iter().cloned().partition(|root| trusted.certificates().contains(root));
    let left_out: Vec<Digest> = left_out.iter().map(certificate::fingerprint).collect();
    let anchors = Anchors::new(accepted).map_err(|_| CredentialError::NotEndorsed(left_out.clone()))?;
    Ok(Followed { anchors, left_out })
}

/// Whether `endorsement` is signed by one of `trusted` itself, is in date, and names `expected` and nothing else.
fn endorses(trusted: &Prepared, endorsement: &CertificateDer<'_>, expected: &str, now: Timestamp) -> bool {
    let named = certificate::uris(endorsement).is_ok_and(|uris| uris == [expected]);
    if !named {
        return false;
    }
    let time = u64::try_from(now.unix_secs()).unwrap_or(0);
    let time = UnixTime::since_unix_epoch(Duration::from_secs(time));
    let algorithms = provider().signature_verification_algorithms.all;
    let usage = KeyUsage::required(PURPOSE_DER);
    // No intermediates: an issuing authority, whose key is online, has no say.
    EndEntityCert::try_from(endorsement).is_ok_and(|parsed| {
        parsed.verify_for_usage(algorithms, &trusted.trusted, &[], time, usage, None, None).is_ok()
    })
}
