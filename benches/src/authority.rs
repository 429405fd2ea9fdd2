//! Keys and certificates for what runs inside this process: one coordinator, one node.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, SystemTime};

use anyhow::Result;
use mvm_pki::{
    Anchors, Authority, Credential, CsrNames, ExpectedPeer, Identity, LeafKey, LeafProfile, LiveAnchors,
    LiveCredential, Role, RootAuthority,
};
use mvm_proto::{ClusterId, Timestamp};

/// The name that the coordinator's certificate carries.
pub const SERVER_NAME: &str = "localhost";
const LEAF_LIFE: Duration = Duration::from_secs(3600);

/// A cluster's certificates, in memory.
#[derive(Debug)]
pub struct Certificates {
    pub cluster: ClusterId,
    pub anchors: Anchors,
    pub coordinator: LiveCredential,
    pub node: LiveCredential,
}

impl Certificates {
    pub fn make(now: Timestamp) -> Result<Self> {
        let cluster: ClusterId = "bench".parse()?;
        let root = RootAuthority::create(&cluster, now)?;
        let issuing = root.create_issuing(now)?;
        let coordinator = leaf(&issuing, &cluster, Role::Coordinator, "coordinator", now)?;
        let node = leaf(&issuing, &cluster, Role::Node, "node-a", now)?;
        Ok(Self { anchors: root.anchors(), coordinator, node, cluster })
    }

    #[must_use]
    pub fn live_anchors(&self) -> LiveAnchors {
        LiveAnchors::new(self.anchors.clone())
    }

    /// What a node expects of its coordinator.
    #[must_use]
    pub fn expected(&self) -> ExpectedPeer {
        ExpectedPeer { cluster: self.cluster.clone(), role: Role::Coordinator, name: None, check_host: true }
    }
}

fn leaf(
    issuing: &Authority,
    cluster: &ClusterId,
    role: Role,
    name: &str,
    now: Timestamp,
) -> Result<LiveCredential> {
    let key = LeafKey::generate()?;
    let profile = LeafProfile {
        identity: Identity::new(cluster.clone(), role, name)?,
        dns: vec![SERVER_NAME.to_owned()],
        ips: vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
        life: LEAF_LIFE,
    };
    let issued = issuing.issue(&key.csr_der(&CsrNames::default())?, &profile, now)?;
    Ok(LiveCredential::new(Credential::new(key, issued.chain)?))
}

#[must_use]
pub fn now() -> Timestamp {
    Timestamp::from(SystemTime::now())
}
