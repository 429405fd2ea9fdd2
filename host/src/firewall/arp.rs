//! The table `arp mvm`: a port's own ARP, past its bridge.
//!
//! The kernel takes frames to 01:80:c2:00:00:0e for traffic of the port itself before any hook of the bridge, and would
//! answer an ARP question in one with any address that the host has. Ports have no business with the host but by their
//! bridge, so that none of it is let in. Routed packets that come that way are dropped in the inet table.

use super::packet::{Reason, drop_for, iifname, is_tap};
use super::ruleset::{BaseKind, Chain, Family, Hook, Table, rule};

pub(super) fn table() -> Table {
    let rules = vec![rule([is_tap(iifname), drop_for(Reason::UnknownPort)])];
    let chains = vec![Chain::base("input", BaseKind::Filter, Hook::Prerouting, 0, rules)];
    let counters = vec![Reason::UnknownPort.name().to_owned()];
    Table { family: Family::Arp, chains, sets: Vec::new(), counters }
}
