//! Net ids and subnets of tenants: one of each in the whole cluster.
//!
//! What a deleted tenant had is given away again only when every node that had it confirmed its removal, and 30 days
//! later: interfaces, rules and what other programs remember of an address outlive a tenant.

use std::collections::BTreeSet;
use std::fmt;
use std::net::Ipv4Addr;
use std::ops::Range;
use std::time::Duration;

use mvm_proto::document::{MAX_TENANT_NET_ID, Subnet};
use mvm_proto::{NodeId, TenantId, Timestamp};
use serde::{Deserialize, Serialize};

/// How long a net id and a subnet rest after the last node confirmed that its tenant is gone.
pub const REUSE_AFTER: Duration = Duration::from_secs(30 * 24 * 60 * 60);

const NET_IDS: &str = "net ids";
const SUBNETS: &str = "/20 subnets of 10.240.0.0/12";
/// How many of them there are.
const DEFAULT_SUBNETS: u16 = 256;

/// What a tenant has, or had until it was deleted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantNetwork {
    pub tenant: TenantId,
    pub net_id: u16,
    pub subnet: Subnet,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removal: Option<Removal>,
}

/// The end of a tenant's network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Removal {
    /// Nodes that had the tenant and have not confirmed that nothing of it is left.
    waiting: BTreeSet<NodeId>,
    /// When the last of them did, or the tenant was deleted if no node had it.
    last_at: Timestamp,
}

impl Removal {
    /// A tenant that these nodes have is deleted.
    #[must_use]
    pub fn new(nodes: BTreeSet<NodeId>, now: Timestamp) -> Self {
        Self { waiting: nodes, last_at: now }
    }

    /// Nothing of the tenant is left on a node, or the node is removed from the cluster.
    pub fn confirm(&mut self, node: &NodeId, now: Timestamp) {
        if self.waiting.remove(node) {
            self.last_at = self.last_at.max(now);
        }
    }

    /// The nodes that have not confirmed it.
    #[must_use]
    pub fn waiting(&self) -> &BTreeSet<NodeId> {
        &self.waiting
    }

    /// From when on another tenant may have it; none while a node has not confirmed.
    #[must_use]
    pub fn free_from(&self) -> Option<Timestamp> {
        self.waiting.is_empty().then(|| self.last_at + REUSE_AFTER)
    }
}

impl TenantNetwork {
    /// Since when another tenant may have what this one had; none while it may not.
    fn free_since(&self, now: Timestamp) -> Option<Timestamp> {
        self.removal.as_ref().and_then(Removal::free_from).filter(|from| *from <= now)
    }
}

/// Why a tenant gets no network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetworkError {
    /// All are in use or rest.
    Exhausted { what: &'static str, all: usize, taken: Taken },
    /// The subnet that it names overlaps another one.
    Overlaps { wanted: Subnet, other: TenantNetwork },
}

/// How many are not free, and why.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Taken {
    pub in_use: usize,
    /// Of deleted tenants, until nodes confirm.
    pub unconfirmed: usize,
    /// Of deleted tenants, for 30 days.
    pub resting: usize,
    /// When the next one is free without anything else happening.
    pub next: Option<Timestamp>,
}

impl fmt::Display for NetworkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exhausted { what, all, taken } => {
                let Taken { in_use, unconfirmed, resting, next } = taken;
                write!(
                    f,
                    "all {all} {what} are taken: {in_use} in use, {unconfirmed} of deleted tenants that nodes have not \
                     confirmed, {resting} of deleted tenants that rest for 30 days"
                )?;
                next.map_or(Ok(()), |next| write!(f, "; the next is free at {next}"))
            }
            Self::Overlaps { wanted, other } => {
                let TenantNetwork { tenant, subnet, removal, .. } = other;
                write!(f, "the subnet {wanted} overlaps {subnet} of the ")?;
                let Some(removal) = removal else { return write!(f, "tenant {tenant}") };
                write!(f, "deleted tenant {tenant}, ")?;
                match (removal.free_from(), removal.waiting.first()) {
                    (Some(from), _) => write!(f, "which is free at {from}"),
                    (None, node) => {
                        let others = removal.waiting.len().saturating_sub(1);
                        let node = node.map_or("", NodeId::as_str);
                        write!(f, "which {node} and {others} more nodes have not confirmed")
                    }
                }
            }
        }
    }
}

impl std::error::Error for NetworkError {}

/// The net id and subnet of a new tenant. What was never used comes first, then what has been free the longest.
///
/// `networks` are those of all tenants, and of deleted ones at least until they are free.
///
/// # Errors
/// Nothing is free, or the subnet that is wanted overlaps one that is not.
pub fn allocate(
    networks: &[TenantNetwork],
    wanted: Option<Subnet>,
    now: Timestamp,
) -> Result<(u16, Subnet), NetworkError> {
    let own_id = |network: &TenantNetwork| network.net_id..network.net_id.saturating_add(1);
    let net_id = choose(NET_IDS, MAX_TENANT_NET_ID + 1, networks, now, own_id)?;
    if let Some(wanted) = wanted {
        let is_taken =
            |network: &&TenantNetwork| network.subnet.overlaps(&wanted) && network.free_since(now).is_none();
        return match networks.iter().find(is_taken) {
            Some(other) => Err(NetworkError::Overlaps { wanted, other: other.clone() }),
            None => Ok((net_id, wanted)),
        };
    }
    let number = choose(SUBNETS, DEFAULT_SUBNETS, networks, now, default_subnets)?;
    Ok((net_id, Subnet::default_of(number.to_be_bytes()[1])))
}

/// The numbers of the default subnets that a network covers or lies in.
fn default_subnets(network: &TenantNetwork) -> Range<u16> {
    let first = Subnet::default_of(0).network().to_bits();
    let number = |address: Ipv4Addr| {
        let number = address.to_bits().checked_sub(first)? >> (32 - Subnet::default_of(0).prefix());
        u16::try_from(number).ok().filter(|number| *number < DEFAULT_SUBNETS)
    };
    // Networks are at most as large as 16 of these, so both ends are inside or neither is.
    let ends = number(network.subnet.network()).zip(number(network.subnet.broadcast()));
    ends.map_or(0..0, |(from, to)| from..to + 1)
}

/// The best of the numbers below `all`: one that was never used, else the one that has been free the longest.
fn choose(
    what: &'static str,
    all: u16,
    networks: &[TenantNetwork],
    now: Timestamp,
    numbers: impl Fn(&TenantNetwork) -> Range<u16>,
) -> Result<u16, NetworkError> {
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    enum State {
        Unused,
        FreeSince(Timestamp),
        Resting(Timestamp),
        Unconfirmed,
        InUse,
    }
    let mut states = vec![State::Unused; usize::from(all)];
    for network in networks {
        let state = match (&network.removal, network.free_since(now)) {
            (None, _) => State::InUse,
            (Some(_), Some(since)) => State::FreeSince(since),
            (Some(removal), None) => removal.free_from().map_or(State::Unconfirmed, State::Resting),
        };
        for number in numbers(network) {
            if let Some(known) = states.get_mut(usize::from(number)) {
                *known = (*known).max(state);
            }
        }
    }
    let best = (0..all).zip(&states).min_by_key(|(number, state)| (**state, *number));
    if let Some((number, State::Unused | State::FreeSince(_))) = best {
        return Ok(number);
    }
    let count = |is: fn(&State) -> bool| states.iter().filter(|state| is(state)).count();
    let next =
        states.iter().filter_map(|state| if let State::Resting(at) = state { Some(*at) } else { None });
    let taken = Taken {
        in_use: count(|state| *state == State::InUse),
        unconfirmed: count(|state| *state == State::Unconfirmed),
        resting: count(|state| matches!(state, State::Resting(_))),
        next: next.min(),
    };
    Err(NetworkError::Exhausted { what, all: usize::from(all), taken })
}
