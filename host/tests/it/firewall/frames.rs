//! Frames byte by byte, as a guest with no manners would send them, and a socket to send and see them.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};

use mvm_host::network::Mac;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrLike, bind, recv, sendto,
    socket,
};

pub(crate) const ICMP: u8 = 1;
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const BROADCAST: Mac = Mac([0xff; 6]);
/// In every payload, so that no other traffic is taken for ours.
pub(crate) const MARK: &[u8] = b"mvm-firewall-test-mark";

pub(crate) fn ethernet(to: Mac, from: Mac, kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = [&to.0[..], &from.0[..], &kind.to_be_bytes()[..], payload].concat();
    frame.resize(frame.len().max(60), 0);
    frame
}

/// An IPv4 packet; `fragment` is its offset in bytes and whether more follow.
pub(crate) fn ipv4(
    from: Ipv4Addr,
    to: Ipv4Addr,
    protocol: u8,
    fragment: (u16, bool),
    payload: &[u8],
) -> Vec<u8> {
    let mut header = vec![0x45, 0];
    header.extend((20 + payload.len() as u16).to_be_bytes());
    header.extend([0x12, 0x34]);
    header.extend(((fragment.0 / 8) | (u16::from(fragment.1) << 13)).to_be_bytes());
    header.extend([64, protocol, 0, 0]);
    header.extend(from.octets());
    header.extend(to.octets());
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    [&header[..], payload].concat()
}

fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// With a checksum over the addresses as TCP wants it; UDP takes it as well.
fn with_checksum(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, at: usize, mut segment: Vec<u8>) -> Vec<u8> {
    let length = (segment.len() as u16).to_be_bytes();
    let pseudo =
        [&from.octets()[..], &to.octets()[..], &[0, protocol][..], &length[..], &segment[..]].concat();
    let sum = checksum(&pseudo);
    segment[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    segment
}

pub(crate) fn udp(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), payload: &[u8]) -> Vec<u8> {
    let mut segment = [from.1.to_be_bytes(), to.1.to_be_bytes()].concat();
    segment.extend((8 + payload.len() as u16).to_be_bytes());
    segment.extend([0, 0]);
    segment.extend(payload);
    with_checksum(from.0, to.0, UDP, 6, segment)
}

/// The first packet of a connection.
pub(crate) fn tcp_syn(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16)) -> Vec<u8> {
    let mut segment = [from.1.to_be_bytes(), to.1.to_be_bytes()].concat();
    segment.extend([0, 0, 0, 7, 0, 0, 0, 0, 0x50, 0x02, 0xff, 0xff, 0, 0, 0, 0]);
    // Data in a first packet is unusual and allowed; it is how this one is known again.
    segment.extend(MARK);
    with_checksum(from.0, to.0, TCP, 16, segment)
}

pub(crate) fn echo_request(sequence: u16) -> Vec<u8> {
    let mut message = vec![8, 0, 0, 0, 0x77, 0x77];
    message.extend(sequence.to_be_bytes());
    message.extend(MARK);
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    message
}

/// Operation 1 asks, 2 answers.
pub(crate) fn arp(operation: u16, sender: (Mac, Ipv4Addr), target: (Mac, Ipv4Addr)) -> Vec<u8> {
    let mut message = vec![0, 1, 8, 0, 6, 4];
    message.extend(operation.to_be_bytes());
    message.extend(sender.0.0);
    message.extend(sender.1.octets());
    message.extend(target.0.0);
    message.extend(target.1.octets());
    message.extend(MARK);
    message
}

/// A socket that sends whole frames by a link and sees all that pass it.
pub(crate) struct Tap {
    socket: OwnedFd,
    link: LinkAddr,
}

impl Tap {
    /// Of the link with this name in the calling thread's namespace.
    pub(crate) fn open(name: &str) -> Self {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).unwrap();
        let mut links = nix::ifaddrs::getifaddrs().unwrap().filter(|link| link.interface_name == name);
        let link = links.find_map(|link| link.address?.as_link_addr().copied()).expect("the link is there");
        bind(socket.as_raw_fd(), &link).unwrap();
        Self { socket, link }
    }

    pub(crate) fn send(&self, frame: &[u8]) {
        assert_eq!(self.link.family(), Some(AddressFamily::Packet));
        loop {
            match sendto(self.socket.as_raw_fd(), frame, &self.link, MsgFlags::empty()) {
                Ok(_) => return,
                Err(Errno::EAGAIN | Errno::ENOBUFS) => std::thread::yield_now(),
                Err(error) => panic!("could not send a frame: {error}"),
            }
        }
    }

    /// Every frame with our mark that came by, or was sent, since the last look.
    pub(crate) fn marked(&self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let mut buffer = vec![0; 4096];
        while let Ok(length) = recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
            let frame = &buffer[..length];
            if frame.windows(MARK.len()).any(|window| window == MARK) {
                frames.push(frame.to_vec());
            }
        }
        frames
    }
}
