//! Verifies each tenant's network: compares links and rules, and with `--deep` also sends probes.

use std::collections::BTreeSet;

use mvm_host::network::{Port, Probe, TenantNet, vmm_user};
use mvm_host::{Host as _, HostError, Operation, Outcome};
use mvm_proto::{DesiredState, InstanceId};
use serde::{Deserialize, Serialize};

use super::{Isolation, NetworkMode};
use crate::instance::records::Records;

/// A name that no instance of ours is given twice in a lifetime: a probe is on the wire for moments.
const PROBE_ID: u32 = u32::MAX;

/// How many other tenants one tenant's probes try to reach: all rules are the same for all of them.
const OTHERS: usize = 3;

/// What holds of all networks of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkReport {
    /// Whether instances have networks here at all.
    pub enabled: bool,
    pub holds: bool,
    pub tenants: Vec<TenantNetworkReport>,
    /// What was found broken, and is mended now.
    pub repaired: Vec<String>,
    /// Links that have names of ours and are not ours.
    pub foreign: Vec<String>,
}

/// What holds of one tenant's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantNetworkReport {
    pub tenant: String,
    pub bridge: String,
    pub subnet: String,
    pub egress: String,
    pub instances: usize,
    pub checks: Vec<Probe>,
}

impl Isolation {
    /// Looks at every link and rule, mends what is wrong and says so; `deep` also sends packets that must and must not
    /// pass, from a port of its own in each network.
    pub async fn verify(
        &self,
        desired: Option<&DesiredState>,
        records: &Records,
        deep: bool,
    ) -> Result<NetworkReport, HostError> {
        if self.settings.network == NetworkMode::None {
            return Ok(NetworkReport::default());
        }
        let mut all = Vec::new();
        records.for_each(|record, moving| all.push((record.clone(), moving.is_some())));
        let wanted = self.wanted(desired, all.iter().map(|(record, moving)| (record, *moving))).network;
        let keep = Operation::KeepNetwork { wanted: wanted.clone() };
        let Outcome::Network(found) = self.host.perform(&keep).await? else {
            return Err(HostError::Refused("the host returned no network inspection".to_owned()));
        };
        let mut report = NetworkReport { enabled: true, holds: true, ..NetworkReport::default() };
        for net in &wanted.nets {
            let mine = wanted.ports.iter().filter(|port| port.net_id == net.net_id);
            let cut_off = mine.clone().filter(|port| found.cut_off.contains(&port.instance)).count();
            let bridge = net.bridge();
            let broken: Vec<_> = found.repairs.iter().filter(|repair| repair.starts_with(&bridge)).collect();
            let mut checks = vec![
                check("bridge and address", broken.is_empty(), "repaired just now"),
                check("rules", !found.repairs.iter().any(|r| r.starts_with("firewall")), "repaired just now"),
                check(
                    "instances are connected",
                    cut_off == 0,
                    "another program deleted a VM's TAP: stop and start the instance",
                ),
            ];
            if deep {
                checks.extend(
                    self.probe(net, &wanted.nets, &all.iter().map(|(r, _)| r.offset).collect()).await?,
                );
            }
            report.holds &= checks.iter().all(|check| check.holds);
            report.tenants.push(TenantNetworkReport {
                tenant: net.tenant.to_string(),
                bridge,
                subnet: net.subnet.to_string(),
                egress: format!("{:?}", net.egress).to_lowercase(),
                instances: mine.count(),
                checks,
            });
        }
        report.repaired = found.repairs;
        report.foreign = found.foreign;
        Ok(report)
    }

    async fn probe(
        &self,
        net: &TenantNet,
        nets: &[TenantNet],
        taken: &BTreeSet<u32>,
    ) -> Result<Vec<Probe>, HostError> {
        // From the end: instances are given addresses from the beginning.
        let free = net.subnet.instance_offsets().rev().find(|offset| !taken.contains(offset));
        let Some((offset, address)) =
            free.and_then(|offset| Some((offset, net.subnet.instance_address(offset)?)))
        else {
            return Ok(vec![check("probes", false, "no free address to send probes from")]);
        };
        let port = Port {
            tenant: net.tenant.clone(),
            instance: InstanceId::from_bits(PROBE_ID),
            net_id: net.net_id,
            offset,
            address,
            owner_uid: vmm_user(net.net_id, offset),
        };
        let others = nets.iter().filter(|other| other.net_id != net.net_id).take(OTHERS).cloned().collect();
        match self.host.perform(&Operation::ProbeNet { net: net.clone(), port, others }).await? {
            Outcome::Probed(probes) => Ok(probes),
            _ => Err(HostError::Refused("the host did not probe the network".to_owned())),
        }
    }
}

fn check(what: &str, holds: bool, otherwise: &str) -> Probe {
    let detail = if holds { "as it should be" } else { otherwise };
    Probe { what: what.to_owned(), holds, detail: detail.to_owned() }
}
