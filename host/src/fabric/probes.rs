//! Finding out by trying: packets as a hostile guest of the tenant would send them, from a port of their own.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use mvm_proto::document::EgressMode;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::frame::{self, Carries, Sender};
use super::{Open, firewall_error, link_error};
use crate::HostError;
use crate::firewall::Reason;
use crate::network::{Mac, Port, Probe, TenantNet};

/// Before each frame on a TAP that was opened with one; all zero: no offload.
const VNET_HEADER: usize = 10;
const LONGEST_FRAME: usize = 2048;

/// The host answers within microseconds; a busy one, within this.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);
/// How long nothing must come back from what must not pass.
const SILENT_FOR: Duration = Duration::from_millis(50);

/// Of most clouds, and of Azure's platform.
const METADATA: [Ipv4Addr; 2] = [Ipv4Addr::new(169, 254, 169, 254), Ipv4Addr::new(168, 63, 129, 16)];
/// A network for documentation, which no host has.
const WORLD: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 9);
const SSH: u16 = 22;

/// A TAP in our own hands.
struct Wire {
    tap: File,
}

impl Wire {
    fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        self.tap.write_all(&[&[0; VNET_HEADER][..], frame].concat())
    }

    /// The first frame of which `wanted` says something, within so long.
    fn receive<T>(&mut self, within: Duration, wanted: impl Fn(&[u8]) -> Option<T>) -> io::Result<Option<T>> {
        let deadline = Instant::now() + within;
        let mut buffer = [0; VNET_HEADER + LONGEST_FRAME];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(left.subsec_nanos()) };
            let ready =
                poll(&mut [PollFd::from_borrowed_fd(self.tap.as_fd(), PollFlags::IN)], Some(&timeout))?;
            if ready == 0 {
                return Ok(None);
            }
            let length = self.tap.read(&mut buffer)?;
            if let Some(found) = buffer.get(VNET_HEADER..length).and_then(&wanted) {
                return Ok(Some(found));
            }
        }
    }
}

impl Open {
    /// Tries what must and what must not pass. The port is gone afterwards, whatever happens.
    pub(super) async fn probe(
        &mut self,
        net: &TenantNet,
        port: &Port,
        others: &[TenantNet],
    ) -> Result<Vec<Probe>, HostError> {
        self.ensure_net(net).await?;
        self.ensure_port(net, port).await?;
        let tried = self.try_all(net, port, others).await;
        self.remove_port(port).await?;
        tried
    }

    async fn try_all(
        &mut self,
        net: &TenantNet,
        port: &Port,
        others: &[TenantNet],
    ) -> Result<Vec<Probe>, HostError> {
        let tap = self.links.attach_tap(&port.tap()).await.map_err(link_error)?;
        let mut wire = Wire { tap: File::from(tap) };
        self.open_port(port).await?;
        let own = Sender { mac: port.mac(), address: port.address };
        let gateway = net.subnet.gateway();
        let io = |cause| HostError::Io { attempt: format!("probe {}", net.bridge()), cause };

        wire.send(&frame::arp_request(own, gateway)).map_err(io)?;
        let via = wire.receive(ANSWER_WITHIN, |seen| frame::arp_answer(seen, gateway)).map_err(io)?;
        let mut probes = vec![Probe::passing("the gateway answers ARP", via.is_some())];
        let via = via.unwrap_or_else(|| Mac::of(net.net_id, 1));
        wire.send(&frame::ipv4(own, via, gateway, Carries::Echo)).map_err(io)?;
        let answered = wire
            .receive(ANSWER_WITHIN, |seen| frame::is_from(seen, gateway).then_some(()))
            .map_err(io)?
            .is_some();
        probes.push(Probe::passing("the gateway answers a ping", answered));

        for (what, frame, reason) in forbidden(net, own, via, others) {
            let before = self.dropped(reason)?;
            wire.send(&frame).map_err(io)?;
            let answer = |seen: &[u8]| frame::is_answer(seen).then_some(());
            let answered = wire.receive(SILENT_FOR, answer).map_err(io)?.is_some();
            let counted = self.dropped(reason)? > before;
            let routed = matches!(reason, Reason::CrossTenant | Reason::DeniedRange | Reason::Egress);
            probes.push(Probe::forbidden(what, reason.name(), counted, answered, routed));
        }
        Ok(probes)
    }

    fn dropped(&mut self, reason: Reason) -> Result<u64, HostError> {
        let seen = self.firewall.inspect().map_err(firewall_error)?;
        Ok(seen.dropped.get(&reason).map_or(0, |tally| tally.packets))
    }
}

/// Everything that must not pass, and as what it is counted.
fn forbidden(net: &TenantNet, own: Sender, via: Mac, others: &[TenantNet]) -> Vec<(String, Vec<u8>, Reason)> {
    let packet = |to, carries| frame::ipv4(own, via, to, carries);
    let gateway = net.subnet.gateway();
    let liar = Mac::of(net.net_id, u32::from(u16::MAX));
    let mut tries = vec![
        ("the host's services".to_owned(), packet(gateway, Carries::TcpSyn { port: SSH }), Reason::ToHost),
        (
            "another hardware address".to_owned(),
            frame::ipv4(Sender { mac: liar, ..own }, via, gateway, Carries::Echo),
            Reason::SpoofMac,
        ),
        (
            "another source address".to_owned(),
            frame::ipv4(Sender { address: net.subnet.builder(), ..own }, via, gateway, Carries::Echo),
            Reason::SpoofIp,
        ),
        (
            "the gateway's address by ARP".to_owned(),
            frame::arp_request(Sender { address: gateway, ..own }, own.address),
            Reason::SpoofArp,
        ),
        ("IPv6".to_owned(), frame::ipv6(own.mac), Reason::Ipv6),
        ("a tagged frame".to_owned(), frame::tagged(own, gateway), Reason::Ethertype),
    ];
    tries.extend(METADATA.map(|address| {
        let probe = packet(address, Carries::TcpSyn { port: 80 });
        (format!("the metadata address {address}"), probe, Reason::DeniedRange)
    }));
    if net.egress == EgressMode::None {
        tries.push(("the world".to_owned(), packet(WORLD, Carries::Udp { port: 53 }), Reason::Egress));
    }
    for other in others {
        let name = format!("the gateway of {}", other.tenant);
        tries.push((name, packet(other.subnet.gateway(), Carries::Echo), Reason::ToHost));
        if let Some(instance) = other.subnet.instance_address(*other.subnet.instance_offsets().start()) {
            let name = format!("an instance of {}", other.tenant);
            tries.push((name, packet(instance, Carries::TcpSyn { port: 80 }), Reason::CrossTenant));
        }
    }
    tries
}
