//! Ethernet frames as an instance could send them, honest or not.

use std::net::Ipv4Addr;

use crate::network::Mac;

const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
const VLAN: u16 = 0x8100;

pub(super) const EVERYONE: Mac = Mac([0xff; 6]);

/// Who a frame says that it is from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sender {
    pub(super) mac: Mac,
    pub(super) address: Ipv4Addr,
}

/// What an IPv4 packet carries. Ports and payloads mean nothing: none of these is meant to arrive.
#[derive(Debug, Clone, Copy)]
pub(super) enum Carries {
    Echo,
    TcpSyn { port: u16 },
    Udp { port: u16 },
}

fn ethernet(from: Mac, to: Mac, kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(14 + payload.len());
    frame.extend(to.0);
    frame.extend(from.0);
    frame.extend(kind.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Who has `wanted`?
pub(super) fn arp_request(from: Sender, wanted: Ipv4Addr) -> Vec<u8> {
    let mut body = vec![0, 1, 8, 0, 6, 4, 0, 1];
    body.extend(from.mac.0);
    body.extend(from.address.octets());
    body.extend([0; 6]);
    body.extend(wanted.octets());
    ethernet(from.mac, EVERYONE, ARP, &body)
}

/// The hardware address that answers for `wanted`, if this frame is that answer.
pub(super) fn arp_answer(frame: &[u8], wanted: Ipv4Addr) -> Option<Mac> {
    let body = frame.get(14..42)?;
    let is_answer = frame.get(12..14)? == ARP.to_be_bytes() && body[6..8] == [0, 2];
    let mac = <[u8; 6]>::try_from(&body[8..14]).ok()?;
    (is_answer && body[14..18] == wanted.octets()).then_some(Mac(mac))
}

/// A packet from one address to another, by way of the hardware address `via`.
pub(super) fn ipv4(from: Sender, via: Mac, to: Ipv4Addr, carries: Carries) -> Vec<u8> {
    let (protocol, payload) = match carries {
        Carries::Echo => (1, echo()),
        Carries::TcpSyn { port } => (6, tcp_syn(from.address, to, port)),
        // Without a checksum, which UDP over IPv4 may leave out.
        Carries::Udp { port } => {
            (17, [&40_000_u16.to_be_bytes()[..], &port.to_be_bytes(), &8_u16.to_be_bytes(), &[0, 0]].concat())
        }
    };
    let length = u16::try_from(20 + payload.len()).unwrap_or(u16::MAX);
    let mut packet = vec![0x45, 0];
    packet.extend(length.to_be_bytes());
    packet.extend([0, 1, 0, 0, 64, protocol, 0, 0]);
    packet.extend(from.address.octets());
    packet.extend(to.octets());
    let sum = checksum(&packet);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend(payload);
    ethernet(from.mac, via, IPV4, &packet)
}

/// Whether this frame is an IPv4 packet from `address`.
pub(super) fn is_from(frame: &[u8], address: Ipv4Addr) -> bool {
    frame.get(12..14) == Some(&IPV4.to_be_bytes()) && frame.get(26..30) == Some(&address.octets())
}

/// Whether this frame is an IPv4 packet that answers anything: all but the word that something can't be reached.
pub(super) fn is_answer(frame: &[u8]) -> bool {
    let ipv4 = frame.get(12..14) == Some(&IPV4.to_be_bytes());
    let unreachable = frame.get(23) == Some(&1) && frame.get(34) == Some(&3);
    ipv4 && !unreachable
}

pub(super) fn ipv6(from: Mac) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0, 0, 0, 59, 64];
    packet.extend([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    packet.extend([0xff, 0x02, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    ethernet(from, EVERYONE, IPV6, &packet)
}

/// A frame that claims to come from another network on the same wire.
pub(super) fn tagged(from: Sender, to: Ipv4Addr) -> Vec<u8> {
    let inner = ipv4(from, EVERYONE, to, Carries::Echo);
    let mut payload = vec![0, 7];
    payload.extend(&inner[12..]);
    ethernet(from.mac, EVERYONE, VLAN, &payload)
}

fn echo() -> Vec<u8> {
    let mut message = vec![8, 0, 0, 0, 0x6d, 0x76, 0, 1];
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    message
}

fn tcp_syn(from: Ipv4Addr, to: Ipv4Addr, port: u16) -> Vec<u8> {
    let mut segment = Vec::new();
    segment.extend(40_000_u16.to_be_bytes());
    segment.extend(port.to_be_bytes());
    segment.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x02, 0x72, 0x10, 0, 0, 0, 0]);
    let pseudo = [&from.octets()[..], &to.octets(), &[0, 6, 0, 20], &segment].concat();
    let sum = checksum(&pseudo);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    segment
}

/// The Internet's: ones' complement of the ones' complement sum of all 16-bit words.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    let mut sum: u32 = words.map(u32::from).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_wire() {
        // The worked example of a well-known IPv4 header.
        let header =
            [0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0, 0xc7];
        assert_eq!(checksum(&header), 0xb861);
    }

    #[test]
    fn that_something_can_not_be_reached_is_no_answer() {
        let from = Sender { mac: Mac::of(7, 1), address: Ipv4Addr::new(10, 7, 0, 1) };
        let mut packet = ipv4(from, Mac::of(7, 3), Ipv4Addr::new(10, 7, 0, 3), Carries::Echo);
        assert!(is_answer(&packet));
        packet[34] = 3;
        assert!(!is_answer(&packet) && !is_answer(&arp_request(from, from.address)));
    }

    #[test]
    fn an_answer_is_taken_from_the_one_that_was_asked_only() {
        let sender = Sender { mac: Mac::of(7, 3), address: Ipv4Addr::new(10, 7, 0, 3) };
        let gateway = Ipv4Addr::new(10, 7, 0, 1);
        let question = arp_request(sender, gateway);
        assert_eq!(arp_answer(&question, gateway), None);
        let mut answer = arp_request(Sender { mac: Mac::of(7, 1), address: gateway }, sender.address);
        answer[21] = 2;
        assert_eq!(arp_answer(&answer, gateway), Some(Mac::of(7, 1)));
        assert_eq!(arp_answer(&answer, sender.address), None);
        assert_eq!(arp_answer(&answer[..30], gateway), None);
    }
}
