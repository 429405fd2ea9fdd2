//! The coordinator's own certificate: taken over at start while it fits, renewed at half of its life, swapped while
//! running.
//!
//! The issuing authority is at hand, so the renewal that nodes ask for over the network is a function call here.

use std::net::IpAddr;
use std::sync::Arc;

use mvm_pki::authority::SKEW;
use mvm_pki::rotation::renew_at;
use mvm_pki::tls::verify_issued;
use mvm_pki::{
    Anchors, Authority, BoxError, Credential, CsrNames, Identity, LeafKey, LeafProfile, LiveAnchors,
    LiveCredential, Renew, Renewed, Role, renewal_task,
};
use mvm_proto::Timestamp;

use crate::init::{ClusterFile, issue_local};
use crate::paths::DataDir;
use crate::settings::CoordinatorSettings;
use crate::stored::now;

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

/// The certificate of before while it fits, else a fresh one, saved.
pub(crate) fn start(
    data: &DataDir,
    authority: &Authority,
    anchors: &Anchors,
    profile: &LeafProfile,
    now: Timestamp,
) -> Result<LiveCredential, BoxError> {
    if let Some(credential) =
        Credential::load(&data.leaf()).ok().filter(|old| fits(old, authority, anchors, profile, now))
    {
        return Ok(LiveCredential::new(credential));
    }
    let credential = issue_local(authority, profile, now)?;
    credential.save(&data.leaf())?;
    Ok(LiveCredential::new(credential))
}

/// Whether a new certificate would say the same: identity, names, life, and the present issuing authority under a
/// trusted root; with at least half of its life ahead.
fn fits(
    old: &Credential,
    authority: &Authority,
    anchors: &Anchors,
    profile: &LeafProfile,
    now: Timestamp,
) -> bool {
    let mut hosts: Vec<String> =
        profile.dns.iter().cloned().chain(profile.ips.iter().map(IpAddr::to_string)).collect();
    let mut old_hosts = old.hosts();
    hosts.sort_unstable();
    old_hosts.sort_unstable();
    let issued_for = old.not_after().since(old.not_before());
    // Backdating makes a certificate a little older than its life.
    let life_fits = (profile.life..=profile.life + SKEW).contains(&issued_for);
    let fresh = old.not_before() <= now && now < renew_at(old.not_before(), old.not_after(), 0.0);
    old.identity() == &profile.identity
        && hosts == old_hosts
        && life_fits
        && fresh
        && old.chain().get(1) == Some(authority.certificate())
        && verify_issued(anchors, old).is_ok()
}

struct LocalRenewal {
    authority: Arc<Authority>,
    profile: LeafProfile,
}

impl Renew for LocalRenewal {
    async fn renew(&self, _key: &LeafKey, csr_der: Vec<u8>) -> Result<Renewed, BoxError> {
        let issued = self.authority.issue(&csr_der, &self.profile, now())?;
        Ok(Renewed { chain_pem: issued.chain_pem(), ..Renewed::default() })
    }
}

/// Renews until `shutdown`.
pub(crate) async fn own_leaf_task(
    data: DataDir,
    live: LiveCredential,
    anchors: LiveAnchors,
    authority: Arc<Authority>,
    profile: LeafProfile,
    shutdown: tokio_util::sync::CancellationToken,
) {
    let names = CsrNames { dns: profile.dns.clone(), ips: profile.ips.clone() };
    let save = move |credential: &Credential, _: &Anchors| credential.save(&data.leaf());
    renewal_task(live, anchors, save, LocalRenewal { authority, profile }, names, shutdown).await;
}
