//! A node with two tenants of two guests each, and the world outside, in namespaces of their own.
//!
//! A guest is a namespace behind a pair of links whose node's end is named like a TAP: to the bridge it is a port like
//! any other, and whole connections can be made from it as well as frames of any shape.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

use mvm_host::firewall::{Firewall, FirewallError, Inspection, Reason};
use mvm_host::network::{DEFAULT_MTU, Mac, Port, TenantNet, bridge_name, tap_name};
use mvm_proto::InstanceId;
use mvm_proto::document::EgressMode;
use parking_lot::Mutex;

use crate::firewall::frames::{Tap, ethernet};
use crate::firewall::space::{Space, wait_until};

pub(crate) const WORLD: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
pub(crate) const UPLINK: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
/// Tenant 1 may reach the world, tenant 2 may not.
pub(crate) const A: u16 = 1;
pub(crate) const B: u16 = 2;
pub(crate) const FIRST: u32 = 3;
pub(crate) const SECOND: u32 = 4;

pub(crate) struct Guest {
    pub(crate) space: Space,
    pub(crate) port: Port,
    pub(crate) tap: Arc<Tap>,
}

pub(crate) struct Lab {
    pub(crate) guests: BTreeMap<(u16, u32), Guest>,
    pub(crate) world: Space,
    pub(crate) world_tap: Arc<Tap>,
    pub(crate) node: Space,
    pub(crate) firewall: Arc<Mutex<Firewall>>,
}

pub(crate) fn net(net_id: u16) -> TenantNet {
    TenantNet {
        tenant: format!("tenant-{net_id}").parse().unwrap(),
        net_id,
        subnet: format!("10.77.{net_id}.0/24").parse().unwrap(),
        egress: if net_id == A { EgressMode::Nat } else { EgressMode::None },
        dns: false,
        isolate_ports: false,
        mtu: DEFAULT_MTU,
    }
}

pub(crate) fn port(net_id: u16, offset: u32) -> Port {
    let net = net(net_id);
    Port {
        tenant: net.tenant,
        instance: InstanceId::from_bits(u32::from(net_id) << 16 | offset),
        net_id,
        offset,
        address: Ipv4Addr::from_bits(net.subnet.network().to_bits() + offset),
        owner_uid: 0,
    }
}

pub(crate) fn gateway(net_id: u16) -> Ipv4Addr {
    net(net_id).subnet.gateway()
}

/// The bridge's own.
pub(crate) fn gateway_mac(net_id: u16) -> Mac {
    Mac::of(net_id, 1)
}

pub(crate) fn both_nets() -> Vec<TenantNet> {
    vec![net(A), net(B)]
}

pub(crate) fn all_ports() -> Vec<Port> {
    [(A, FIRST), (A, SECOND), (B, FIRST), (B, SECOND)].map(|(net, offset)| port(net, offset)).to_vec()
}

impl Lab {
    /// With the firewall up, and br_netfilter on or off.
    pub(crate) fn new(br_netfilter: bool) -> Self {
        let lab = Self::without_rules(br_netfilter);
        lab.firewall(|firewall| firewall.rebuild(&both_nets(), &all_ports())).unwrap();
        lab
    }

    pub(crate) fn without_rules(br_netfilter: bool) -> Self {
        let (node, world) = (Space::new(), Space::new());
        // Now, since it is news to links that are there already, and makes them talk.
        node.sysctl("ipv6/conf/all/forwarding", "1");
        let thread_id = world.thread_id;
        node.ip(&format!(
            "link add up0 type veth peer name wan0 netns {thread_id}\n\
             addr add {UPLINK}/24 dev up0\nlink set up0 up\n"
        ));
        // A route to the tenants, so that it is the firewall that keeps the world out.
        world.ip(&format!(
            "addr add {WORLD}/24 dev wan0\nlink set wan0 up\nroute add 10.77.0.0/16 via {UPLINK}\n"
        ));
        node.ip(&format!("route add default via {WORLD}\n"));
        for net_id in [A, B] {
            add_bridge(&node, net_id);
        }
        node.sysctl("ipv4/ip_forward", "1");
        // Redirects are of no use to guests that can't follow them, and would only be more frames to look at.
        node.sysctl("ipv4/conf/all/send_redirects", "0");
        for tables in ["iptables", "ip6tables", "arptables"] {
            let on = if br_netfilter { "1" } else { "0" };
            node.sysctl(&format!("bridge/bridge-nf-call-{tables}"), on);
        }
        let mut guests = BTreeMap::new();
        for port in all_ports() {
            guests.insert((port.net_id, port.offset), add_guest(&node, port));
        }
        let world_tap = Arc::new(world.run(|| Tap::open("wan0")));
        let firewall = Arc::new(Mutex::new(node.run(|| Firewall::open().unwrap())));
        Self { guests, world, world_tap, node, firewall }
    }

    /// Works on the firewall; its socket stays in the node's namespace wherever it is used.
    pub(crate) fn firewall<T>(
        &self,
        act: impl FnOnce(&mut Firewall) -> Result<T, FirewallError>,
    ) -> Result<T, FirewallError> {
        act(&mut self.firewall.lock())
    }

    pub(crate) fn inspect(&self) -> Inspection {
        self.firewall(Firewall::inspect).unwrap()
    }

    pub(crate) fn dropped(&self) -> BTreeMap<Reason, u64> {
        let counts = self.inspect().dropped.into_iter();
        counts.map(|(reason, tally)| (reason, tally.packets)).filter(|(_, packets)| *packets > 0).collect()
    }

    pub(crate) fn guest(&self, net_id: u16, offset: u32) -> &Guest {
        &self.guests[&(net_id, offset)]
    }

    /// Where a frame with our mark has come to, other than from where it was sent. Forgets them.
    pub(crate) fn seen(&self, except: (u16, u32)) -> Vec<String> {
        let mut seen = Vec::new();
        for (place, guest) in &self.guests {
            if *place != except && !guest.tap.marked().is_empty() {
                seen.push(guest.port.tap());
            }
        }
        if !self.world_tap.marked().is_empty() {
            seen.push("world".to_owned());
        }
        seen
    }

    /// Sends `frames` from a guest: exactly so many are dropped for this reason and none for another, and no guest and
    /// nobody in the world sees any of them.
    #[track_caller]
    pub(crate) fn refused(
        &self,
        what: &str,
        from: (u16, u32),
        frames: &[Vec<u8>],
        reason: Reason,
        times: u64,
    ) {
        let before = self.dropped();
        self.guests[&from].tap.marked();
        for frame in frames {
            self.guests[&from].tap.send(frame);
        }
        let of = |counts: &BTreeMap<Reason, u64>| counts.get(&reason).copied().unwrap_or_default();
        let begun = std::time::Instant::now();
        while of(&self.dropped()) < of(&before) + times && begun.elapsed() < crate::firewall::space::PATIENCE
        {
            std::thread::yield_now();
        }
        let mut expected = before;
        *expected.entry(reason).or_default() += times;
        assert_eq!(self.dropped(), expected, "{what}");
        assert_eq!(self.seen(from), Vec::<String>::new(), "{what}");
        let came_back = self.guests[&from].tap.marked();
        let own: Vec<_> = frames.iter().map(|frame| frame[6..12].to_vec()).collect();
        let answers = came_back.iter().filter(|frame| !own.contains(&frame[6..12].to_vec()));
        assert_eq!(answers.count(), 0, "{what}: an answer");
    }

    /// Sends frames from a guest that arrive at another, with no drop counted but those for ARP at the host.
    #[track_caller]
    pub(crate) fn passes(&self, what: &str, from: (u16, u32), to: (u16, u32), frames: &[Vec<u8>]) {
        let before = self.dropped();
        self.guests[&to].tap.marked();
        for frame in frames {
            self.guests[&from].tap.send(frame);
        }
        let mut arrived = 0;
        wait_until(what, || {
            arrived += self.guests[&to]
                .tap
                .marked()
                .iter()
                .filter(|frame| frame[6..12] != port(to.0, to.1).mac().0)
                .count();
            arrived >= frames.len()
        });
        let but_arp = |mut counts: BTreeMap<Reason, u64>| {
            counts.remove(&Reason::ArpToHost);
            counts
        };
        assert_eq!(but_arp(self.dropped()), but_arp(before), "{what}");
        self.seen(from);
    }
}

pub(crate) fn add_bridge(node: &Space, net_id: u16) {
    let (bridge, mac) = (bridge_name(net_id), gateway_mac(net_id));
    node.ip(&format!("link add {bridge} address {mac} type bridge mcast_snooping 0\n"));
    node.ip(&format!("addr add {}/24 dev {bridge}\nlink set {bridge} up\n", gateway(net_id)));
}

/// Behind a port of its network's bridge.
pub(crate) fn add_guest(node: &Space, port: Port) -> Guest {
    let bridge = bridge_name(port.net_id);
    let guest = add_guest_to(node, port, &format!("master {bridge}"));
    node.wait_forwarding(&[&tap_name(guest.port.net_id, guest.port.offset)]);
    guest
}

pub(crate) fn add_guest_to(node: &Space, port: Port, master: &str) -> Guest {
    let space = Space::new();
    let (tap, thread_id, mac) = (tap_name(port.net_id, port.offset), space.thread_id, port.mac());
    node.ip(&format!("link add {tap} type veth peer name eth0 netns {thread_id}\n"));
    space.ip(&format!(
        "link set eth0 address {mac}\naddr add {}/24 dev eth0\nlink set eth0 up\nroute add default via {}\n",
        port.address,
        gateway(port.net_id),
    ));
    node.ip(&format!("link set {tap} {master} up\n"));
    let tap = Arc::new(space.run(|| Tap::open("eth0")));
    Guest { space, port, tap }
}

/// A frame with the port's own address as its source.
pub(crate) fn from_port(port: &Port, to: Mac, kind: u16, payload: &[u8]) -> Vec<u8> {
    ethernet(to, port.mac(), kind, payload)
}
