//! The firewall around tenants: tables `mvm` of the families inet, bridge and arp, by netlink, each change one batch.
//!
//! The rules are the same for all tenants ([`inet`], [`bridge`], [`arp`]); networks and ports are elements of their sets
//! ([`elements`]), so that neither the cost of a packet nor that of a new tenant grows with their number. Traffic that
//! neither enters nor leaves by an interface with a name of ours is never touched. What is expected is kept here, so
//! that [`Firewall::inspect`] finds whatever someone else changed, and [`Firewall::rebuild`] puts it right.

mod arp;
mod bridge;
mod changes;
mod dump;
mod elements;
mod inet;
mod inspection;
mod link;
mod nets;
mod packet;
mod repair;
mod ruleset;
mod sys;
#[cfg(test)]
mod tests;
mod watch;
mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::Ipv4Addr;

pub use inspection::{Fault, Inspection, Tally, Traffic};
pub use packet::Reason;
pub use watch::Watch;

use crate::network::{AddressRange, Port, TenantNet};
use changes::Changes;
use inspection::FoundTables;
use link::Link;
use nets::Nets;
use repair::Depth;
use ruleset::{Family, Placed};

/// Someone else's change between our look and our batch makes the batch fail; then we look again.
const REPAIR_TRIES: u32 = 4;

#[derive(Debug, thiserror::Error)]
pub enum FirewallError {
    #[error("could not {attempt}; the firewall needs CAP_NET_ADMIN and a kernel with nf_tables")]
    Netlink {
        attempt: String,
        #[source]
        cause: io::Error,
    },
    #[error(
        "could not {attempt}: the kernel refused message {message} of the batch, and nothing was changed"
    )]
    Batch {
        attempt: String,
        message: u32,
        #[source]
        cause: io::Error,
    },
    #[error("could not {attempt}: the kernel did not answer")]
    Silent { attempt: String },
    #[error("the packet filter's rules changed during every read; another program keeps rewriting them")]
    Unsteady,
    #[error("the kernel's firewall rules differ from the written ones: {0}")]
    NotHeld(Fault),
    #[error("refused: {0}")]
    Refused(String),
}

/// The firewall of one network namespace. All changes to our tables go through one of these.
#[derive(Debug)]
pub struct Firewall {
    link: Link,
    nets: Nets,
    ports: BTreeMap<(u16, u32), Port>,
    /// What no tenant reaches besides what none ever does.
    denied: Vec<AddressRange>,
    /// The kernel's generation in which everything was last known to be right.
    verified: Option<u32>,
}

impl Firewall {
    /// In the network namespace of the calling thread. Nothing is changed before [`Self::rebuild`].
    pub fn open() -> Result<Self, FirewallError> {
        let (nets, ports, denied) = (Nets::default(), BTreeMap::new(), Vec::new());
        Ok(Self { link: Link::open()?, nets, ports, denied, verified: None })
    }

    /// What no tenant reaches from the next [`Self::rebuild`] on, besides what none ever does.
    pub fn deny(&mut self, ranges: &[AddressRange]) {
        self.denied = ranges.to_vec();
    }

    /// Makes the firewall be for exactly these networks and ports, whatever was there. At no instant does a packet
    /// meet fewer rules than before or after. Read back: when this returns, it holds.
    pub fn rebuild(&mut self, nets: &[TenantNet], ports: &[Port]) -> Result<(), FirewallError> {
        let mut fresh = (Nets::default(), BTreeMap::new());
        for net in nets {
            if fresh.0.insert(net)?.is_some() {
                return Err(FirewallError::Refused(format!("network {} is given twice", net.net_id)));
            }
        }
        for port in ports {
            check_port(port, &fresh.0)?;
            if fresh.1.insert((port.net_id, port.offset), port.clone()).is_some() {
                return Err(FirewallError::Refused(format!("port {} is given twice", port.tap())));
            }
        }
        (self.nets, self.ports) = fresh;
        self.repair()
    }

    /// Removes all tables of ours. Those that are not there are done.
    pub fn remove(self) -> Result<(), FirewallError> {
        let mut changes = Changes::new();
        for family in Family::ALL {
            // Added first, so that there is one to delete.
            changes.add_table(family);
            changes.delete_table(family);
        }
        self.link.commit("remove the firewall's tables", &changes.finish())
    }

    /// Adds a network, or changes one that is there. Its cost does not depend on how many there are.
    pub fn add_net(&mut self, net: &TenantNet) -> Result<(), FirewallError> {
        for port in self.ports_of(net.net_id) {
            check_place(port, net)?;
        }
        let before = self.nets.insert(net)?;
        let before = before.iter().flat_map(elements::of_net).collect();
        self.change("add a tenant's network", before, elements::of_net(net))
    }

    /// Removes a network and its ports; one that is not there is done.
    pub fn remove_net(&mut self, net_id: u16) -> Result<(), FirewallError> {
        let ports: Vec<_> = self.ports_of(net_id).map(|port| (port.net_id, port.offset)).collect();
        let ports: Vec<_> = ports.iter().filter_map(|place| self.ports.remove(place)).collect();
        let net = self.nets.remove(net_id);
        let of_ports = ports.iter().flat_map(elements::of_port);
        let before = net.iter().flat_map(elements::of_net).chain(of_ports).collect();
        self.change("remove a tenant's network", before, Vec::new())
    }

    /// Opens the firewall for an instance's port; its network must be there.
    pub fn add_port(&mut self, port: &Port) -> Result<(), FirewallError> {
        check_port(port, &self.nets)?;
        let before = self.ports.insert((port.net_id, port.offset), port.clone());
        let before = before.iter().flat_map(elements::of_port).collect();
        self.change("add an instance's port", before, elements::of_port(port))
    }

    /// Closes it; one that is not there is done.
    pub fn remove_port(&mut self, port: &Port) -> Result<(), FirewallError> {
        let before = self.ports.remove(&(port.net_id, port.offset));
        let before = before.iter().flat_map(elements::of_port).collect();
        self.change("remove an instance's port", before, Vec::new())
    }

    /// Reads all of it, compares it with what it should be, and says what it counted.
    pub fn inspect(&mut self) -> Result<Inspection, FirewallError> {
        let (found, generation) = self.look()?;
        let inspection = inspection::inspect(&found, self.nets.values(), self.ports.values(), &self.denied);
        self.verified = inspection.intact().then_some(generation);
        Ok(inspection)
    }

    /// Whether the rules of this network namespace are unchanged since they were last verified: one small
    /// question, for every pass. If false, inspect.
    pub fn unchanged(&self) -> Result<bool, FirewallError> {
        Ok(self.verified == Some(self.link.generation()?))
    }

    fn ports_of(&self, net_id: u16) -> impl Iterator<Item = &Port> {
        self.ports.range((net_id, 0)..=(net_id, u32::MAX)).map(|(_, port)| port)
    }

    /// Elements only. When the tables are not what they should be, all of them are repaired instead.
    fn change(
        &mut self,
        attempt: &str,
        before: Vec<Placed>,
        after: Vec<Placed>,
    ) -> Result<(), FirewallError> {
        let after: BTreeSet<_> = after.into_iter().collect();
        let gone: BTreeSet<_> = before.into_iter().filter(|placed| !after.contains(placed)).collect();
        let mut changes = Changes::new();
        // Added first, so that there is one to delete.
        changes.add_elements(&gone);
        changes.delete_elements(&gone);
        changes.add_elements(&after);
        if changes.is_empty() {
            return Ok(());
        }
        match self.link.commit(attempt, &changes.finish()) {
            Ok(()) => {
                let generation = self.link.generation()?;
                self.verified = self.verified.filter(|verified| next(*verified) == generation).map(next);
                Ok(())
            }
            Err(error @ FirewallError::Batch { .. }) => {
                tracing::warn!(%error, "the firewall's tables differ from the expected ones; repairing all of them");
                self.repair()
            }
            Err(error) => Err(error),
        }
    }

    fn look(&self) -> Result<(FoundTables, u32), FirewallError> {
        self.link.steady(|| {
            let mut found = FoundTables::new();
            let mut whole = true;
            for family in Family::ALL {
                let (table, steady) = dump::read(&self.link, family)?;
                found.insert(family, table);
                whole &= steady;
            }
            Ok((found, whole))
        })
    }

    fn repair(&mut self) -> Result<(), FirewallError> {
        self.verified = None;
        let wanted = elements::all(self.nets.values(), self.ports.values(), &self.denied);
        for tries_left in (0..REPAIR_TRIES).rev() {
            let (found, _) = self.look()?;
            let depth = if tries_left == 0 { Depth::Anew } else { Depth::InPlace };
            let changes = repair::changes(&found, &wanted, depth);
            match self.link.commit("write the firewall's tables", &changes.finish()) {
                Err(FirewallError::Batch { .. }) if tries_left > 0 => {}
                other => {
                    other?;
                    break;
                }
            }
        }
        match self.inspect()?.faults.into_iter().next() {
            Some(fault) => Err(FirewallError::NotHeld(fault)),
            None => Ok(()),
        }
    }
}

/// The generation after this one: zero is left out.
fn next(generation: u32) -> u32 {
    generation.checked_add(1).unwrap_or(1)
}

fn check_port(port: &Port, nets: &Nets) -> Result<(), FirewallError> {
    let net = nets.get(port.net_id);
    let net =
        net.ok_or_else(|| FirewallError::Refused(format!("port {} is of no known network", port.tap())))?;
    check_place(port, net)
}

/// An address that is not the port's own by its number would let it speak as another instance or as the gateway.
fn check_place(port: &Port, net: &TenantNet) -> Result<(), FirewallError> {
    let (subnet, tap) = (net.subnet, port.tap());
    let own = Ipv4Addr::from_bits(subnet.network().to_bits().wrapping_add(port.offset));
    let for_instances = subnet.instance_address(port.offset) == Some(own) || own == subnet.builder();
    if port.address == own && for_instances && subnet.contains(own) && port.tenant == net.tenant {
        return Ok(());
    }
    Err(FirewallError::Refused(format!(
        "port {tap} of {} with {} has no place in {subnet} of {}",
        port.tenant, port.address, net.tenant
    )))
}
