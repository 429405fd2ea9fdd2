//! The tenants' networks on this host: keeps links and firewall consistent.
//!
//! A task ([`mend_task`]) gets every change of the rules from the kernel and repairs at once what another program changed.
//! After a change by mvm it reads nothing: the rules' generation is then the one that was last verified.
//!
//! Only one process per network namespace may do this, because two would undo each other's work. The owner holds an abstract
//! socket name that the kernel releases with the process, so no lock outlives its owner.

mod frame;
mod probes;
mod removal;
mod trial;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::{Arc, Weak};

use mvm_proto::document::EgressMode;
use mvm_proto::text::chain;
use mvm_proto::{InstanceId, TenantId};
use tokio::sync::Mutex;
use tokio::task::AbortHandle;

use super::firewall::{self, Firewall, FirewallError, Reason, Tally, Watch};
use super::links::{LinkError, Links, Stray, enable_forwarding};
use super::network::{
    AddressRange, Dropped, NetworkFound, NetworkWanted, OrphanLink, Port, TenantNet, Traffic, net_of_bridge,
    owner_of, place_of_tap,
};
use super::{HostError, Operation, Outcome};

pub use removal::remove_firewall;
pub use trial::try_network;

/// An abstract name, of which each network namespace has its own.
const CLAIM: &[u8] = b"mvm-networks";

/// How many repairs between two looks are told one by one.
const TOLD_REPAIRS: usize = 64;

type Shared = Mutex<Option<Open>>;

#[derive(Debug, Default)]
pub(super) struct Fabric {
    open: Arc<Shared>,
}

#[derive(Debug)]
struct Open {
    links: Links,
    firewall: Firewall,
    nets: BTreeMap<u16, TenantNet>,
    /// By the name of their TAP.
    ports: BTreeMap<String, Port>,
    /// What no tenant reaches besides what none ever does.
    denied: Vec<AddressRange>,
    /// What was put right since the last look.
    mended: Vec<String>,
    /// Whether what an earlier owner left was compared with what is wanted.
    compared: bool,
    /// Links of ours under names that lead nowhere, as the last look found them.
    strays: Vec<Stray>,
    mending: AbortHandle,
    _claim: UnixListener,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.mending.abort();
    }
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn link_error(cause: LinkError) -> HostError {
    HostError::Network { reason: chain(&cause) }
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn firewall_error(cause: FirewallError) -> HostError {
    HostError::Network { reason: chain(&cause) }
}

impl Fabric {
    /// The guest's end of a TAP of ours, for the VMM that it is for.
    pub(super) async fn attach(&self, tap: &str) -> Result<OwnedFd, HostError> {
        let mut open = self.open.lock().await;
        self.opened(&mut open)?.links.attach_tap(tap).await.map_err(link_error)
    }

    pub(super) async fn perform(&self, operation: &Operation) -> Result<Outcome, HostError> {
        let mut open = self.open.lock().await;
        let open = self.opened(&mut open)?;
        match operation {
            Operation::EnsureNet { net } => open.ensure_net(net).await.map(|_| Outcome::Done),
            Operation::RemoveNet { net } => open.remove_net(net).await.map(|()| Outcome::Done),
            Operation::EnsurePort { net, port } => open.ensure_port(net, port).await.map(|_| Outcome::Done),
            Operation::OpenPort { port } => open.open_port(port).await.map(|()| Outcome::Done),
            Operation::RemovePort { port } => open.remove_port(port).await.map(|()| Outcome::Done),
            Operation::RemoveLink { name } => open.remove_link(name).await.map(|()| Outcome::Done),
            Operation::ProbeNet { net, port, others } => {
                open.probe(net, port, others).await.map(Outcome::Probed)
            }
            Operation::KeepNetwork { wanted } => open.keep(wanted).await.map(Outcome::Network),
            other => Err(HostError::Refused(format!("{other:?} is not a network operation"))),
        }
    }

    /// Connects at first use: who has no networks claims none.
    fn opened<'a>(&self, open: &'a mut Option<Open>) -> Result<&'a mut Open, HostError> {
        match open {
            Some(open) => Ok(open),
            none => Ok(none.insert(Open::new(Arc::downgrade(&self.open))?)),
        }
    }
}

/// Puts the rules right whenever someone else has changed them.
async fn mend_task(mut watch: Watch, fabric: Weak<Shared>) {
    loop {
        if let Err(error) = watch.changed().await {
            tracing::error!(error = %chain(&error), "firewall changes are found only by the regular check");
            return;
        }
        let Some(fabric) = fabric.upgrade() else { return };
        if let Some(open) = fabric.lock().await.as_mut() {
            open.mend();
        }
    }
}

impl Open {
    fn new(shared: Weak<Shared>) -> Result<Self, HostError> {
        let claim = claim()?;
        let links = Links::connect().map_err(link_error)?;
        let firewall = Firewall::open().map_err(firewall_error)?;
        let watch = Watch::open().map_err(firewall_error)?;
        Ok(Self {
            links,
            firewall,
            nets: BTreeMap::new(),
            ports: BTreeMap::new(),
            denied: Vec::new(),
            mended: Vec::new(),
            compared: false,
            strays: Vec::new(),
            mending: tokio::spawn(mend_task(watch, shared)).abort_handle(),
            _claim: claim,
        })
    }

    /// The firewall knows a network before there is a link of it.
    async fn ensure_net(&mut self, net: &TenantNet) -> Result<Vec<String>, HostError> {
        if self.nets.get(&net.net_id) != Some(net) {
            self.firewall.add_net(net).map_err(firewall_error)?;
            self.nets.insert(net.net_id, net.clone());
        }
        if net.egress == EgressMode::Nat {
            enable_forwarding().map_err(link_error)?;
        }
        let repairs = self.links.ensure_bridge(net).await.map_err(link_error)?;
        Ok(repairs.iter().map(|repair| format!("{}: {repair}", net.bridge())).collect())
    }

    async fn remove_net(&mut self, net: &TenantNet) -> Result<(), HostError> {
        self.links.remove_bridge(net.net_id).await.map_err(link_error)?;
        self.firewall.remove_net(net.net_id).map_err(firewall_error)?;
        self.nets.remove(&net.net_id);
        Ok(())
    }

    async fn ensure_port(&mut self, net: &TenantNet, port: &Port) -> Result<Vec<String>, HostError> {
        if self.ports.get(&port.tap()) != Some(port) {
            self.firewall.add_port(port).map_err(firewall_error)?;
            self.ports.insert(port.tap(), port.clone());
        }
        let repairs = self.links.ensure_tap(port, net).await.map_err(link_error)?;
        Ok(repairs.iter().map(|repair| format!("{}: {repair}", port.tap())).collect())
    }

    async fn open_port(&mut self, port: &Port) -> Result<(), HostError> {
        self.links.open_tap(&port.tap()).await.map_err(link_error)
    }

    async fn remove_port(&mut self, port: &Port) -> Result<(), HostError> {
        self.links.remove_tap(&port.tap()).await.map_err(link_error)?;
        self.firewall.remove_port(port).map_err(firewall_error)?;
        self.ports.remove(&port.tap());
        Ok(())
    }

    /// What the firewall still knows of it goes when the whole is next compared.
    async fn remove_link(&mut self, name: &str) -> Result<(), HostError> {
        let removed = match (net_of_bridge(name), place_of_tap(name)) {
            (Some(net_id), _) => self.links.remove_bridge(net_id).await,
            (None, Some(_)) => self.links.remove_tap(name).await,
            (None, None) => match self.strays.iter().find(|stray| stray.name == name) {
                Some(stray) => self.links.remove_stray(stray).await,
                None => return Err(HostError::Refused(format!("{name} is not a link of ours"))),
            },
        };
        removed.map(|_| ()).map_err(link_error)
    }

    async fn keep(&mut self, wanted: &NetworkWanted) -> Result<NetworkFound, HostError> {
        let mut found = NetworkFound::default();
        // What is made for the first time was not broken.
        let known_nets: BTreeSet<u16> = self.nets.keys().copied().collect();
        let known_ports: BTreeSet<String> = self.ports.keys().cloned().collect();
        found.repairs.append(&mut self.mended);
        self.keep_firewall(wanted, &mut found)?;
        for net in &wanted.nets {
            let repairs = self.ensure_net(net).await?;
            found.repairs.extend(repairs.into_iter().filter(|_| known_nets.contains(&net.net_id)));
        }
        let nets: BTreeMap<u16, &TenantNet> = wanted.nets.iter().map(|net| (net.net_id, net)).collect();
        let seen = self.links.observe().await.map_err(link_error)?;
        let there: BTreeSet<&str> = seen.taps.iter().map(|tap| tap.name.as_str()).collect();
        for port in &wanted.ports {
            let Some(net) = nets.get(&port.net_id) else { continue };
            if !there.contains(port.tap().as_str()) {
                found.cut_off.push(port.instance.clone());
            }
            let repairs = self.ensure_port(net, port).await?;
            found.repairs.extend(repairs.into_iter().filter(|_| known_ports.contains(&port.tap())));
            self.open_port(port).await?;
        }
        let owned: BTreeSet<String> =
            wanted.ports.iter().map(Port::tap).chain(wanted.hands_off.iter().cloned()).collect();
        let orphan = |name: &str, alias: Option<&String>| OrphanLink {
            name: name.to_owned(),
            owner: alias.map_or("an unknown owner", |alias| owner_of(alias)).to_owned(),
        };
        let taps = seen.taps.iter().filter(|tap| !owned.contains(&tap.name));
        let taps = taps.map(|tap| orphan(&tap.name, tap.alias.as_ref()));
        let bridges = seen.bridges.iter().filter(|bridge| !nets.contains_key(&bridge.net_id));
        let bridges = bridges.map(|bridge| orphan(&bridge.name, bridge.alias.as_ref()));
        let strays = seen.strays.iter().map(|stray| orphan(&stray.name, Some(&stray.alias)));
        // Ports first: a bridge goes last.
        found.orphans = taps.chain(strays).chain(bridges).collect();
        self.strays = seen.strays;
        found.foreign = seen.foreign;
        Ok(found)
    }

    /// Compares all rules with what they should be, and makes them anew if anything differs.
    fn keep_firewall(&mut self, wanted: &NetworkWanted, found: &mut NetworkFound) -> Result<(), HostError> {
        // Someone is at work on these: what is known of them stays.
        let moving = wanted.hands_off.iter().filter_map(|tap| self.ports.remove_entry(tap));
        let mut ports: BTreeMap<String, Port> = moving.collect();
        ports.extend(wanted.ports.iter().map(|port| (port.tap(), port.clone())));
        let nets: BTreeMap<u16, TenantNet> =
            wanted.nets.iter().map(|net| (net.net_id, net.clone())).collect();
        let as_wanted =
            self.compared && nets == self.nets && ports == self.ports && wanted.denied == self.denied;
        (self.nets, self.ports) = (nets, ports);
        self.denied.clone_from(&wanted.denied);
        if !as_wanted {
            self.rebuild()?;
        }
        let seen = self.firewall.inspect().map_err(firewall_error)?;
        if !seen.intact() {
            self.rebuild()?;
            found.repairs.extend(seen.faults.iter().map(|fault| format!("firewall: {fault}")));
        }
        self.compared = true;
        found.dropped = seen.dropped.iter().map(|(reason, tally)| dropped(*reason, *tally)).collect();
        let tenants = seen.tenants.iter().map(|(tenant, seen)| traffic(tenant, None, *seen));
        let instances = self.ports.values().filter_map(|port| {
            let seen = seen.instances.get(&port.instance)?;
            Some(traffic(&port.tenant, Some(port.instance.clone()), *seen))
        });
        found.traffic = tenants.chain(instances).collect();
        Ok(())
    }

    /// After a change of the rules, by mvm or by another program.
    fn mend(&mut self) {
        // Before the first look it is not known what should be there.
        if !self.compared || self.firewall.unchanged().is_ok_and(|unchanged| unchanged) {
            return;
        }
        let mended = self.firewall.inspect().map_err(firewall_error).and_then(|seen| {
            if !seen.intact() {
                self.rebuild()?;
            }
            Ok(seen.faults)
        });
        match mended {
            Ok(faults) => {
                for fault in &faults {
                    tracing::warn!(%fault, "another program changed the firewall; the rules are restored");
                }
                // Once each, however often someone did it.
                let fresh = faults.iter().map(|fault| format!("firewall: {fault}"));
                let fresh: Vec<_> = fresh.filter(|repair| !self.mended.contains(repair)).collect();
                self.mended.extend(fresh);
                self.mended.truncate(TOLD_REPAIRS);
            }
            // The next look tries again.
            Err(error) => tracing::error!(error = %chain(&error), "could not repair the firewall"),
        }
    }

    fn rebuild(&mut self) -> Result<(), HostError> {
        self.firewall.deny(&self.denied);
        let nets: Vec<TenantNet> = self.nets.values().cloned().collect();
        let ports: Vec<Port> = self.ports.values().cloned().collect();
        self.firewall.rebuild(&nets, &ports).map_err(firewall_error)
    }
}

fn dropped(reason: Reason, tally: Tally) -> Dropped {
    Dropped { reason: reason.name().to_owned(), packets: tally.packets, bytes: tally.bytes }
}

fn traffic(tenant: &TenantId, instance: Option<InstanceId>, seen: firewall::Traffic) -> Traffic {
    Traffic {
        tenant: tenant.clone(),
        instance,
        sent_packets: seen.sent.packets,
        sent_bytes: seen.sent.bytes,
        received_packets: seen.received.packets,
        received_bytes: seen.received.bytes,
    }
}

fn claim() -> Result<UnixListener, HostError> {
    let address = SocketAddr::from_abstract_name(CLAIM);
    let claimed = address.and_then(|address| UnixListener::bind_addr(&address));
    claimed.map_err(|cause| match cause.kind() {
        io::ErrorKind::AddrInUse => HostError::Refused(
            "another agent keeps the networks of this network namespace; stop it, or run this one with --network none"
                .to_owned(),
        ),
        _ => HostError::Io { attempt: "claim the networks of this namespace".to_owned(), cause },
    })
}
