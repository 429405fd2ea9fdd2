//! The kernel's settings per link, and the one that makes a node a router.

use std::fs;
use std::path::{Path, PathBuf};

use super::LinkError;

/// A setting of a link: its family and name below `/proc/sys/net`, and what it must be.
pub(super) type Setting = (&'static str, i32);

/// A bridge answers for its own address alone, believes no redirects and drops what comes from the wrong side. It has
/// no IPv6 at all: guests have none, and a link-local address would be a way to the host past every IPv4 rule.
pub(super) const BRIDGE_SETTINGS: [Setting; 11] = [
    ("ipv6/disable_ipv6", 1),
    ("ipv6/addr_gen_mode", 1),
    ("ipv4/rp_filter", 1),
    ("ipv4/accept_redirects", 0),
    ("ipv4/send_redirects", 0),
    ("ipv4/accept_source_route", 0),
    ("ipv4/proxy_arp", 0),
    ("ipv4/arp_ignore", 1),
    ("ipv4/arp_announce", 2),
    ("ipv4/route_localnet", 0),
    ("ipv4/bc_forwarding", 0),
];

/// A TAP is a bridge's port and has no addresses; it must not make itself any.
pub(super) const TAP_SETTINGS: [Setting; 2] = [("ipv6/disable_ipv6", 1), ("ipv6/addr_gen_mode", 1)];

/// Sets one of the `wanted` settings of a link to what it must be.
pub(super) fn mend(link: &str, setting: &str, wanted: &[Setting]) -> Result<(), LinkError> {
    let (family, name) = setting.split_once('/').unwrap_or(("ipv4", setting));
    let path = Path::new("/proc/sys/net").join(family).join("conf").join(link).join(name);
    wanted.iter().filter(|(other, _)| *other == setting).try_for_each(|(_, value)| put(&path, *value))
}

/// Lets packets pass from one link to another; what may pass is the firewall's business, so that comes first.
/// Whether it was off.
pub fn enable_forwarding() -> Result<bool, LinkError> {
    let path = PathBuf::from("/proc/sys/net/ipv4/ip_forward");
    let failed = |cause| LinkError::Io { attempt: format!("read {}", path.display()), cause };
    if fs::read_to_string(&path).map_err(failed)?.trim() == "1" {
        return Ok(false);
    }
    put(&path, 1).map(|()| true)
}

fn put(path: &Path, value: i32) -> Result<(), LinkError> {
    let failed = |cause| LinkError::Io { attempt: format!("write {value} to {}", path.display()), cause };
    fs::write(path, value.to_string()).map_err(failed)
}
