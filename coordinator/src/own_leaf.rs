//! The coordinator's own certificate: made anew at every start, renewed at half of its life, swapped while running.
//!
//! The issuing authority is at hand, so the renewal that nodes ask for over the network is a function call here.

use std::net::IpAddr;
use std::sync::Arc;

use mvm_pki::{
    Authority, BoxError, Credential, CsrNames, Identity, LeafKey, LeafProfile, LiveAnchors, LiveCredential,
    Renew, Renewed, Role, renewal_task,
};
use mvm_proto::Timestamp;

use crate::init::{ClusterFile, issue_local};
use crate::metrics::Metrics;
use crate::paths::DataDir;
use crate::settings::CoordinatorSettings;
use crate::state::now;

/// What the certificate is to say: the names of `init` and those given to `serve`.
pub(crate) fn profile(
    cluster: &ClusterFile,
    settings: &CoordinatorSettings,
) -> Result<LeafProfile, BoxError> {
    let identity = Identity::new(cluster.cluster.clone(), Role::Coordinator, &cluster.name)?;
    let mut dns = cluster.dns.clone();
    dns.extend(settings.dns.iter().filter(|name| !cluster.dns.contains(name)).cloned());
    let mut ips = cluster.ips.clone();
    let listens_on: Option<IpAddr> = Some(settings.listen.ip()).filter(|ip| !ip.is_unspecified());
    ips.extend(settings.ips.iter().copied().chain(listens_on).filter(|ip| !cluster.ips.contains(ip)));
    ips.dedup();
    Ok(LeafProfile { identity, dns, ips, life: settings.leaf_life })
}

/// A fresh certificate, saved. Making one is cheaper than judging whether the old one still fits the settings.
pub(crate) fn start(
    data: &DataDir,
    authority: &Authority,
    profile: &LeafProfile,
    now: Timestamp,
) -> Result<LiveCredential, BoxError> {
    let credential = issue_local(authority, profile, now)?;
    credential.save(&data.leaf())?;
    Ok(LiveCredential::new(credential))
}

struct LocalRenewal {
    authority: Arc<Authority>,
    profile: LeafProfile,
}

impl Renew for LocalRenewal {
    async fn renew(&self, _key: &LeafKey, csr_der: Vec<u8>) -> Result<Renewed, BoxError> {
        let issued = self.authority.issue(&csr_der, &self.profile, now())?;
        Ok(Renewed { chain_pem: issued.chain_pem(), roots_pem: None })
    }
}

/// Renews until `shutdown`.
pub(crate) async fn own_leaf_task(
    data: DataDir,
    live: LiveCredential,
    anchors: LiveAnchors,
    authority: Arc<Authority>,
    profile: LeafProfile,
    metrics: Arc<Metrics>,
    shutdown: tokio_util::sync::CancellationToken,
) {
    metrics.set_certificate_expiry(live.current().not_after());
    let names = CsrNames { dns: profile.dns.clone(), ips: profile.ips.clone() };
    let save = move |credential: &Credential, _: &mvm_pki::Anchors| {
        metrics.set_certificate_expiry(credential.not_after());
        credential.save(&data.leaf())
    };
    renewal_task(live, anchors, save, LocalRenewal { authority, profile }, names, shutdown).await;
}
