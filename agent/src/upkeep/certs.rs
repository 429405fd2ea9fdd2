//! This node's certificates on disk: what `mvm agent certs init|request|rotate|status` do.
//!
//! One directory holds `ca.crt` (the pinned roots), `node.pem` (key and chain in one file, so that a crash can't mix
//! them), `trust.json` (whose documents this node obeys) and `enrolment.json` (where the certificate came from).
//! `node.pem` is written last: a node with a `node.pem` is enrolled, whatever happened on the way.

mod coordinator_call;
mod enrol;
mod error;
mod rotate;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use mvm_pki::{Anchors, CertificateStatus, Credential, CsrNames, TrustStore, files};
use mvm_proto::{ClusterId, Digest, Timestamp};
use mvm_transport::Target;
use serde::{Deserialize, Serialize};

pub(crate) use coordinator_call::verified;
pub use enrol::request;
pub use error::CertsError;
pub(crate) use rotate::CoordinatorRenewal;
pub use rotate::rotate;

/// Certificates are public; only the key beside them is not, and that file is written 0600 by its owner.
const PUBLIC_MODE: u32 = 0o644;

/// The files of a certificates directory.
#[derive(Debug, Clone)]
pub struct CertsDir(PathBuf);

impl CertsDir {
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    #[must_use]
    pub fn ca(&self) -> PathBuf {
        self.0.join("ca.crt")
    }

    #[must_use]
    pub fn node(&self) -> PathBuf {
        self.0.join("node.pem")
    }

    #[must_use]
    pub fn trust(&self) -> PathBuf {
        self.0.join("trust.json")
    }

    #[must_use]
    pub fn enrolment(&self) -> PathBuf {
        self.0.join("enrolment.json")
    }

    /// Operators' certificates that the coordinator said to refuse.
    #[must_use]
    pub fn removed_operators(&self) -> PathBuf {
        self.0.join("removed-operators.json")
    }

    /// Whether a certificate was ever issued to this node.
    #[must_use]
    pub fn is_enrolled(&self) -> bool {
        self.node().exists()
    }

    pub(crate) fn load(&self) -> Result<Loaded, CertsError> {
        if !self.is_enrolled() {
            return Err(CertsError::NotEnrolled { dir: self.0.clone() });
        }
        let damaged = |path: PathBuf| move |cause| CertsError::Damaged { path, cause: Box::new(cause) };
        let credential = Credential::load(&self.node()).map_err(damaged(self.node()))?;
        let anchors = Anchors::load(&self.ca()).map_err(damaged(self.ca()))?;
        let trust = TrustStore::load(&self.trust())
            .map_err(|cause| CertsError::Damaged { path: self.trust(), cause: Box::new(cause) })?;
        Ok(Loaded { credential, anchors, trust, enrolment: self.read_enrolment() })
    }

    /// Where the certificate came from; empty when that is not known, which only costs convenience.
    fn read_enrolment(&self) -> Enrolment {
        let bytes = std::fs::read(self.enrolment()).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    }

    /// Saves a certificate with the roots to judge others by; the certificate last.
    pub(crate) fn save(&self, credential: &Credential, anchors: &Anchors) -> std::io::Result<()> {
        anchors.save(&self.ca())?;
        credential.save(&self.node())
    }

    fn write_error(&self, cause: std::io::Error) -> CertsError {
        CertsError::Write { dir: self.0.clone(), cause }
    }
}

/// What an enrolled node has.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) credential: Credential,
    pub(crate) anchors: Anchors,
    pub(crate) trust: TrustStore,
    pub(crate) enrolment: Enrolment,
}

/// Remembered from the enrolment, so that `rotate` and `serve` need not be told again.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Enrolment {
    coordinator: Option<String>,
    dns: Vec<String>,
    ips: Vec<IpAddr>,
}

impl Enrolment {
    fn new(coordinator: &Target, names: &CsrNames) -> Self {
        Self { coordinator: Some(coordinator.to_string()), dns: names.dns.clone(), ips: names.ips.clone() }
    }

    pub(crate) fn coordinator(&self) -> Option<Target> {
        self.coordinator.as_deref().and_then(|text| text.parse().ok())
    }

    pub(crate) fn names(&self) -> CsrNames {
        CsrNames { dns: self.dns.clone(), ips: self.ips.clone() }
    }
}

/// What [`init`] did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InitReport {
    pub path: PathBuf,
    pub cluster: ClusterId,
    pub fingerprints: Vec<Digest>,
    /// The same root was pinned already.
    pub unchanged: bool,
}

/// Pins the root in `ca_pem`. A different root that is already pinned stays, unless `force`.
pub fn init(certs_dir: &Path, ca_pem: &Path, force: bool) -> Result<InitReport, CertsError> {
    let dir = CertsDir::new(certs_dir);
    let anchors = Anchors::load(ca_pem)
        .map_err(|cause| CertsError::NotARoot { path: ca_pem.to_owned(), cause: Box::new(cause) })?;
    let pinned = dir.ca().exists().then(|| Anchors::load(&dir.ca()));
    let unchanged = match pinned {
        None => false,
        Some(Ok(pinned)) if pinned == anchors => true,
        Some(_) if force => false,
        Some(_) => return Err(CertsError::OtherRootPinned { path: dir.ca() }),
    };
    if !unchanged {
        files::create_private_dir(certs_dir).map_err(|cause| dir.write_error(cause))?;
        anchors.save(&dir.ca()).map_err(|cause| dir.write_error(cause))?;
    }
    Ok(InitReport {
        path: dir.ca(),
        cluster: anchors.cluster().clone(),
        fingerprints: anchors.fingerprints(),
        unchanged,
    })
}

/// What this node's certificate looks like at `now`.
pub fn status(certs_dir: &Path, now: Timestamp) -> Result<CertificateStatus, CertsError> {
    let loaded = CertsDir::new(certs_dir).load()?;
    Ok(CertificateStatus::of(&loaded.credential, &loaded.anchors, Some(&loaded.trust), now))
}

/// How many addresses are asked for at most: a coordinator refuses requests with a flood of names, and a host with
/// hundreds of bridges has hundreds of addresses.
const MAX_DEFAULT_ADDRESSES: usize = 8;

/// The names by which this machine may be reached: its host name, loopback, and the addresses of its interfaces
/// without link-local ones. What a request asks for when the operator names nothing.
#[must_use]
pub fn default_names() -> CsrNames {
    let plain = |name: &String| {
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.')
    };
    let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).filter(plain);
    let mut dns = vec!["localhost".to_owned()];
    dns.extend(host.filter(|name| name != "localhost"));

    let mut ips: Vec<IpAddr> = nix::ifaddrs::getifaddrs()
        .into_iter()
        .flatten()
        .filter_map(|interface| interface.address)
        .filter_map(|address| {
            let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))
        })
        .filter(|ip| !ip.is_loopback() && !is_link_local(ip))
        .take(MAX_DEFAULT_ADDRESSES)
        .collect();
    ips.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
    ips.push(IpAddr::V6(Ipv6Addr::LOCALHOST));
    ips.sort_unstable();
    ips.dedup();
    CsrNames { dns, ips }
}

fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}
