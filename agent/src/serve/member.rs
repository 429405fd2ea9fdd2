//! The parts that only an enrolled node has: its certificate, renewal, and the reload of certificates from disk.

use mvm_pki::{CsrNames, LiveAnchors, LiveCredential};
use mvm_proto::status::NodeInfo;
use mvm_proto::{ClusterId, NodeId};
use mvm_transport::Target;

use super::credentials;
use super::error::AgentError;
use super::tasks::Tasks;
use crate::node::info;
use crate::serve::settings::AgentSettings;
use crate::upkeep::certs::{CertsDir, CoordinatorRenewal};

/// What an enrolled node is, beyond its settings.
pub(super) struct Member {
    pub(super) credential: LiveCredential,
    pub(super) anchors: LiveAnchors,
    pub(super) cluster: ClusterId,
    pub(super) coordinator: Option<Target>,
    /// What to ask for when the certificate is renewed.
    names: CsrNames,
}

impl Member {
    pub(super) fn knows_coordinator(&self) -> bool {
        self.coordinator.is_some()
    }

    /// Starts what keeps the certificate fresh.
    pub(super) fn spawn_upkeep(&self, tasks: &mut Tasks, certs: CertsDir) {
        let stop = tasks.stop_token();
        let (live, anchors) = (self.credential.clone(), self.anchors.clone());
        let reload = credentials::reload_task(certs.clone(), live.clone(), anchors.clone(), stop.clone());
        tasks.spawn("credentials", reload);
        let Some(coordinator) = self.coordinator.clone() else { return };
        let renewal = CoordinatorRenewal { coordinator, credential: live.clone(), anchors: anchors.clone() };
        let save = move |credential: &_, anchors: &_| certs.save(credential, anchors);
        let names = self.names.clone();
        tasks.spawn("renewal", mvm_pki::renewal_task(live, anchors, save, renewal, names, stop));
    }
}

/// The certificates, if this node has any. It may have none only if it lives from a file.
pub(super) fn load_member(settings: &AgentSettings, certs: &CertsDir) -> Result<Option<Member>, AgentError> {
    if !certs.is_enrolled() && settings.desired_file.is_some() {
        return Ok(None);
    }
    let loaded = certs.load().map_err(AgentError::Certs)?;
    let cluster = loaded.anchors.cluster().clone();
    let given = settings.names != CsrNames::default();
    let names = if given { settings.names.clone() } else { loaded.enrolment.names() };
    Ok(Some(Member {
        coordinator: settings.coordinator.clone().or_else(|| loaded.enrolment.coordinator()),
        credential: LiveCredential::new(loaded.credential),
        anchors: LiveAnchors::new(loaded.anchors),
        cluster,
        names,
    }))
}

/// The certificate's node id; without a certificate the one that was given, else the host name's.
pub(super) fn choose_node_id(
    settings: &AgentSettings,
    member: Option<&Member>,
    info: &NodeInfo,
) -> Result<NodeId, AgentError> {
    let given = settings.node_id.clone();
    let Some(member) = member else {
        return given
            .or_else(|| info::node_id_from_hostname(&info.hostname))
            .ok_or_else(|| AgentError::NoNodeId { hostname: info.hostname.clone() });
    };
    let identity = member.credential.current().identity().clone();
    let certified = identity.node_id().ok_or(AgentError::NotANode { identity })?;
    match given {
        Some(given) if given != certified => Err(AgentError::OtherNodeId { given, certified }),
        _ => Ok(certified),
    }
}
