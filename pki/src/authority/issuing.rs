//! The issuing authority, in the coordinator: turns proven certificate requests into leaves.

use std::path::Path;
use std::time::Duration;

use mvm_proto::{ClusterId, Timestamp, digest};
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyUsagePurpose,
    SanType, SerialNumber,
};
use rustls_pki_types::{CertificateDer, DnsName};

use super::request::ProvenKey;
use super::{AuthorityError, Issued, LeafProfile, MAX_NAMES, SKEW, Signer, date, random_serial, uri};

#[derive(Debug)]
pub struct Authority {
    signer: Signer,
}

impl Authority {
    pub(super) fn from_signer(signer: Signer) -> Self {
        Self { signer }
    }

    /// Reads `ca.crt` and `ca.key` from `dir`.
    pub fn load(dir: &Path) -> Result<Self, AuthorityError> {
        Signer::load(dir).map(Self::from_signer)
    }

    /// Writes `ca.crt` and `ca.key` (0600) to `dir`.
    pub fn save(&self, dir: &Path) -> Result<(), AuthorityError> {
        self.signer.save(dir)
    }

    #[must_use]
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.signer.certificate
    }

    /// The cluster that this authority issues for.
    #[must_use]
    pub fn cluster(&self) -> &ClusterId {
        &self.signer.cluster
    }

    #[must_use]
    pub fn not_after(&self) -> Timestamp {
        self.signer.facts.not_after
    }

    /// Issues a leaf to a peer that proves to hold the request's key. Every name in it comes from `profile`.
    pub fn issue(
        &self,
        csr_der: &[u8],
        profile: &LeafProfile,
        now: Timestamp,
    ) -> Result<Issued, AuthorityError> {
        self.signer.check_alive(now)?;
        let asked = profile.identity.cluster();
        if *asked != self.signer.cluster {
            return Err(AuthorityError::WrongCluster {
                authority: self.signer.cluster.clone(),
                asked: asked.clone(),
            });
        }
        let key = ProvenKey::of(csr_der)?;
        let serial = random_serial()?;
        let (not_before, not_after) = self.validity(profile.life, now)?;
        let mut params = leaf_params(profile)?;
        params.serial_number = Some(SerialNumber::from_slice(&serial));
        params.not_before = date(not_before);
        params.not_after = date(not_after);
        let issuer = Issuer::from_ca_cert_der(&self.signer.certificate, &*self.signer.key)
            .map_err(AuthorityError::Make)?;
        let leaf = params.signed_by(&key, &issuer).map_err(AuthorityError::Make)?;
        Ok(Issued {
            chain: vec![leaf.der().clone(), self.signer.certificate.clone()],
            serial_hex: digest::hex(&serial),
            not_before,
            not_after,
        })
    }

    /// From a little before now, for peers whose clocks are behind; never outside this authority's own validity.
    fn validity(&self, life: Duration, now: Timestamp) -> Result<(Timestamp, Timestamp), AuthorityError> {
        if life < Duration::from_secs(1) {
            return Err(AuthorityError::NoLife);
        }
        let whole = |time: Timestamp| Timestamp::from_unix_ms(time.unix_secs() * 1000);
        let not_before = whole(now - SKEW.min(life / 10)).max(self.signer.facts.not_before);
        let not_after = whole(now + life).min(self.signer.facts.not_after);
        Ok((not_before, not_after))
    }
}

fn leaf_params(profile: &LeafProfile) -> Result<CertificateParams, AuthorityError> {
    let found = profile.dns.len() + profile.ips.len();
    if found > MAX_NAMES {
        return Err(AuthorityError::TooManyNames { found });
    }
    let identity = &profile.identity;
    let mut params = CertificateParams::default();
    // For people who look at the certificate; nothing reads the subject.
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, identity.cluster().as_str());
    params.distinguished_name.push(DnType::OrganizationalUnitName, identity.role().to_string());
    params.distinguished_name.push(DnType::CommonName, identity.name());
    params.subject_alt_names.push(uri(identity.to_string())?);
    for dns in &profile.dns {
        params.subject_alt_names.push(dns_name(dns)?);
    }
    params.subject_alt_names.extend(profile.ips.iter().copied().map(SanType::IpAddress));
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// Whole names only: a wildcard would speak for hosts that are not listed.
fn dns_name(text: &str) -> Result<SanType, AuthorityError> {
    let wrong = || AuthorityError::Name(text.chars().take(64).collect());
    DnsName::try_from(text).map_err(|_| wrong())?;
    text.to_owned().try_into().map(SanType::DnsName).map_err(|_| wrong())
}
