//! Addresses and routes, by rtnetlink: Debian's kernels ignore `ip=`, and an image need not have `ip`.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

const NEW_LINK: u16 = 16;
const NEW_ADDRESS: u16 = 20;
const DELETE_ADDRESS: u16 = 21;
const NEW_ROUTE: u16 = 24;

/// Request, with an answer; create, or take the place of what is there.
const ACK: u16 = 1 | 4;
const REPLACE: u16 = ACK | 0x100 | 0x400;

const UP: u32 = 1;
const INET: u8 = 2;

/// Makes 127.0.0.1 work.
pub(crate) fn loopback_up() -> io::Result<()> {
    set_up(&Netlink::open()?, 1)
}

/// Gives the card its address; the one with this hardware address, else the first there is. No card is no error: an
/// instance may be without one, and a program that needs the network finds out.
pub(super) fn configure(
    mac: &str,
    address: Ipv4Addr,
    prefix: u8,
    gateway: Option<Ipv4Addr>,
) -> io::Result<()> {
    let Some((card, its_mac)) = find_card(mac) else { return Ok(()) };
    let netlink = Netlink::open()?;
    if let Some(mac) = parse_mac(mac).filter(|_| its_mac != mac.to_lowercase()) {
        // A fork has the hardware address of what it was forked from.
        set_mac(&netlink, card, mac)?;
    }
    set_up(&netlink, card)?;
    // A guest that woke as another instance has another's address still. The kernel's table says which.
    for (old, old_prefix) in addresses_of(card) {
        if (old, old_prefix) != (address, prefix) {
            let _ = netlink.ask(DELETE_ADDRESS, ACK, &address_message(card, old, old_prefix));
        }
    }
    netlink.ask(NEW_ADDRESS, REPLACE, &address_message(card, address, prefix))?;
    match gateway {
        Some(gateway) => netlink.ask(NEW_ROUTE, REPLACE, &route_message(card, gateway)),
        None => Ok(()),
    }
}

fn find_card(mac: &str) -> Option<(u32, String)> {
    let mut cards: Vec<(u32, String)> = Vec::new();
    for entry in fs::read_dir("/sys/class/net").ok()?.flatten() {
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        if entry.file_name() != "lo"
            && let Ok(index) = read("ifindex").trim().parse()
        {
            cards.push((index, read("address").trim().to_lowercase()));
        }
    }
    cards.sort();
    let by_mac = cards.iter().find(|(_, found)| *found == mac.to_lowercase());
    by_mac.or(cards.first()).cloned()
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

/// The addresses that a card has, asked by a dump of them all.
fn addresses_of(card: u32) -> Vec<(Ipv4Addr, u8)> {
    const GET_ADDRESS: u16 = 22;
    const DUMP: u16 = 1 | 0x300;
    let ask = || -> io::Result<Vec<u8>> {
        let netlink = Netlink::open()?;
        netlink.send(GET_ADDRESS, DUMP, &[INET, 0, 0, 0, 0, 0, 0, 0])?;
        netlink.receive()
    };
    let answer = ask().unwrap_or_default();
    let mut found = Vec::new();
    let mut rest = answer.as_slice();
    while let Some(length) = word(rest, 0).map(|length| length as usize).filter(|length| *length >= 16) {
        let Some(message) = rest.get(..length) else { break };
        if half(message, 4) == Some(NEW_ADDRESS) && word(message, 20) == Some(card) {
            let prefix = message.get(17).copied().unwrap_or(0);
            found
                .extend(attribute(message.get(24..).unwrap_or_default(), 2).map(|address| (address, prefix)));
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

fn attribute(mut rest: &[u8], kind: u16) -> Option<Ipv4Addr> {
    while let Some(length) = half(rest, 0).map(usize::from).filter(|length| *length >= 4) {
        if half(rest, 2) == Some(kind) {
            let bytes: [u8; 4] = rest.get(4..8)?.try_into().ok()?;
            return Some(bytes.into());
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
    None
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes)
}

fn set_up(netlink: &Netlink, card: u32) -> io::Result<()> {
    netlink.ask(NEW_LINK, ACK, &link_message(card, UP))
}

/// While the card is down: not every driver takes another address while it is up.
fn set_mac(netlink: &Netlink, card: u32, mac: [u8; 6]) -> io::Result<()> {
    let mut message = link_message(card, 0);
    message.extend(10u16.to_ne_bytes());
    message.extend(1u16.to_ne_bytes());
    message.extend(mac);
    message.extend([0; 2]);
    netlink.ask(NEW_LINK, ACK, &message)
}

/// family, type; index; flags; which of them.
fn link_message(card: u32, up: u32) -> Vec<u8> {
    let mut message = vec![0; 4];
    message.extend(card.to_ne_bytes());
    message.extend(up.to_ne_bytes());
    message.extend(UP.to_ne_bytes());
    message
}

fn address_message(card: u32, address: Ipv4Addr, prefix: u8) -> Vec<u8> {
    let mut message = vec![INET, prefix, 0, 0];
    message.extend(card.to_ne_bytes());
    put_attribute(&mut message, 1, &address.octets());
    put_attribute(&mut message, 2, &address.octets());
    message
}

/// The default route: of the main table, by boot configuration, to anywhere, by way of a gateway.
fn route_message(card: u32, gateway: Ipv4Addr) -> Vec<u8> {
    let mut message = vec![INET, 0, 0, 0, 254, 3, 0, 1];
    message.extend(0u32.to_ne_bytes());
    put_attribute(&mut message, 5, &gateway.octets());
    put_attribute(&mut message, 4, &card.to_ne_bytes());
    message
}

fn put_attribute(message: &mut Vec<u8>, kind: u16, value: &[u8; 4]) {
    message.extend(8u16.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(value);
}

struct Netlink(OwnedFd);

impl Netlink {
    fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        // No protocol is number 0, which is the one for routes.
        Ok(Self(socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?))
    }

    fn send(&self, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        let mut message = Vec::new();
        message.extend(u32::try_from(16 + body.len()).unwrap_or(0).to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend([0; 8]);
        message.extend(body);
        sendto(&self.0, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        Ok(())
    }

    fn receive(&self) -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; 16 * 1024];
        let (length, _) = recv(&self.0, &mut buffer[..], RecvFlags::empty())?;
        buffer.truncate(length);
        Ok(buffer)
    }

    /// Sends a request and waits for its answer, which begins with an error number: 0 is success.
    fn ask(&self, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        self.send(kind, flags, body)?;
        let answer = self.receive()?;
        match word(&answer, 16).map(u32::cast_signed) {
            Some(0) => Ok(()),
            Some(error) => Err(io::Error::from_raw_os_error(-error)),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hardware_address_has_six_bytes() {
        assert_eq!(parse_mac("02:4d:00:07:00:0f"), Some([2, 0x4d, 0, 7, 0, 15]));
        for bad in ["", "02:4d:00:07:00", "02:4d:00:07:00:0f:01", "02:4d:00:07:00:xy"] {
            assert_eq!(parse_mac(bad), None);
        }
    }
}
