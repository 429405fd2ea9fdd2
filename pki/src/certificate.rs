//! Facts read from a certificate, by one parser. Nothing here says whether the certificate is to be believed.

use mvm_proto::{ClusterId, Digest, Timestamp, digest};
use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

/// The scheme of every identity and of the cluster name in authorities' certificates.
pub(crate) const SCHEME: &str = "spiffe://";

/// No caller reads more, and a peer decides how many it sends.
const MAX_PRESENTED_NAMES: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the certificate can't be read")]
pub(crate) struct Unreadable;

/// What everyone needs to know of a certificate that they hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(crate) subject: String,
    pub(crate) serial_hex: String,
    pub(crate) not_before: Timestamp,
    pub(crate) not_after: Timestamp,
    pub(crate) is_authority: bool,
    pub(crate) public_key: Vec<u8>,
}

pub(crate) fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, Unreadable> {
    match X509Certificate::from_der(certificate) {
        Ok(([], parsed)) => Ok(parsed),
        _ => Err(Unreadable),
    }
}

pub(crate) fn facts(certificate: &CertificateDer<'_>) -> Result<Facts, Unreadable> {
    let parsed = parse(certificate)?;
    let seconds = |time: i64| Timestamp::from_unix_ms(time.saturating_mul(1000));
    Ok(Facts {
        subject: parsed.subject().to_string(),
        serial_hex: digest::hex(parsed.raw_serial()),
        not_before: seconds(parsed.validity().not_before.timestamp()),
        not_after: seconds(parsed.validity().not_after.timestamp()),
        is_authority: parsed.is_ca(),
        public_key: parsed.public_key().subject_public_key.data.to_vec(),
    })
}

/// Whether the certificate says what it is for.
pub(crate) fn names_purposes(certificate: &CertificateDer<'_>) -> bool {
    parse(certificate).is_ok_and(|parsed| matches!(parsed.extended_key_usage(), Ok(Some(_))))
}

/// The digest by which a certificate is pinned and named.
pub(crate) fn fingerprint(certificate: &CertificateDer<'_>) -> Digest {
    Digest::of(certificate)
}

/// Every URI name in the certificate.
pub(crate) fn uris(certificate: &CertificateDer<'_>) -> Result<Vec<String>, Unreadable> {
    let parsed = parse(certificate)?;
    let names = parsed.subject_alternative_name().map_err(|_| Unreadable)?;
    let uri = |name: &GeneralName<'_>| match name {
        GeneralName::URI(uri) => Some((*uri).to_owned()),
        _ => None,
    };
    Ok(names.map_or_else(Vec::new, |names| names.value.general_names.iter().filter_map(uri).collect()))
}

/// The DNS names and addresses in the certificate, as people write them.
pub(crate) fn hosts(certificate: &CertificateDer<'_>) -> Vec<String> {
    let host = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(dns) => Some(dns.escape_default().to_string()),
        GeneralName::IPAddress(bytes) => address(bytes),
        _ => None,
    };
    let Ok(parsed) = parse(certificate) else { return Vec::new() };
    let Ok(Some(names)) = parsed.subject_alternative_name() else { return Vec::new() };
    names.value.general_names.iter().filter_map(host).take(MAX_PRESENTED_NAMES).collect()
}

fn address(bytes: &[u8]) -> Option<String> {
    let four = <[u8; 4]>::try_from(bytes).map(|b| std::net::IpAddr::from(b).to_string());
    let sixteen = <[u8; 16]>::try_from(bytes).map(|b| std::net::IpAddr::from(b).to_string());
    four.or(sixteen).ok()
}

/// The cluster that an authority's certificate is for: its one URI name, `spiffe://<cluster>`.
pub(crate) fn cluster_of_authority(certificate: &CertificateDer<'_>) -> Option<ClusterId> {
    match uris(certificate).ok()?.as_slice() {
        [uri] => uri.strip_prefix(SCHEME)?.parse().ok(),
        _ => None,
    }
}
