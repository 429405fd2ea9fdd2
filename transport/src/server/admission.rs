//! Who may come in: counts connections and handshakes, in all, per address and per identity.
//!
//! Pure bookkeeping under one short lock. A [`Permit`] is one connection's place in the counts; dropping it frees the
//! place, however the connection ended.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mvm_pki::Identity;

use super::stats::{Count, ServerStats};
use crate::limits::Limits;

/// What to do with a connection attempt.
#[derive(Debug)]
pub(super) enum Decision {
    /// Begin the handshake.
    Admit(Permit),
    /// Let it prove its address first; nothing is kept about it.
    Retry,
    /// Say no.
    Refuse,
    /// Say nothing: an honest client sends again, and finds room then.
    Ignore,
}

/// A handshake succeeded, but its address or identity has as many connections as it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooMany;

#[derive(Debug)]
pub(super) struct Admission {
    limits: Limits,
    stats: Arc<ServerStats>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    connections: usize,
    handshakes: usize,
    addresses: HashMap<IpAddr, Address>,
    identities: HashMap<Identity, usize>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Address {
    connections: usize,
    handshakes: usize,
    anonymous: usize,
}

#[derive(Debug)]
enum Stage {
    Handshake,
    Anonymous,
    Known(Identity),
}

/// One connection's place in the counts.
#[derive(Debug)]
pub(super) struct Permit {
    admission: Arc<Admission>,
    address: IpAddr,
    stage: Stage,
}

impl Admission {
    pub(super) fn new(limits: Limits, stats: Arc<ServerStats>) -> Arc<Self> {
        Arc::new(Self { limits, stats, table: Mutex::default() })
    }

    /// Decides on an attempt from `ip`; `validated` when a Retry has proven that address.
    pub(super) fn decide(self: &Arc<Self>, ip: IpAddr, validated: bool) -> Decision {
        let address = network_of(ip);
        let mut table = self.lock();
        let seen = table.addresses.get(&address).copied().unwrap_or_default();
        if table.connections >= self.limits.max_connections {
            self.stats.count(Count::refused_total);
            return Decision::Refuse;
        }
        if seen.connections >= self.limits.max_connections_per_ip {
            self.stats.count(Count::refused_per_ip);
            return Decision::Refuse;
        }
        if !validated && table.handshakes >= self.limits.retry_above {
            self.stats.count(Count::retries_sent);
            return Decision::Retry;
        }
        if table.handshakes >= self.limits.max_handshakes
            || seen.handshakes >= self.limits.max_handshakes_per_ip
        {
            self.stats.count(Count::handshakes_ignored);
            return Decision::Ignore;
        }
        table.connections += 1;
        table.handshakes += 1;
        let entry = table.addresses.entry(address).or_default();
        entry.connections += 1;
        entry.handshakes += 1;
        self.publish(&table);
        Decision::Admit(Permit { admission: Arc::clone(self), address, stage: Stage::Handshake })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // The counts are changed in steps that can't panic, so a poisoned lock still guards a whole table.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, table: &Table) {
        self.stats.set(Count::connections_open, table.connections);
        self.stats.set(Count::handshakes_open, table.handshakes);
    }
}

impl Permit {
    /// The handshake has ended and shown who the peer is.
    pub(super) fn established(&mut self, identity: Option<&Identity>) -> Result<(), TooMany> {
        let admission = Arc::clone(&self.admission);
        let mut table = admission.lock();
        self.leave_handshake(&mut table);
        let limits = &admission.limits;
        match identity {
            None => {
                let entry = table.addresses.entry(self.address).or_default();
                entry.anonymous += 1;
                self.stage = Stage::Anonymous;
                if entry.anonymous > limits.max_anonymous_per_ip {
                    admission.stats.count(Count::refused_anonymous);
                    return Err(TooMany);
                }
            }
            Some(identity) => {
                let count = table.identities.entry(identity.clone()).or_default();
                *count += 1;
                self.stage = Stage::Known(identity.clone());
                if *count > limits.max_connections_per_identity {
                    admission.stats.count(Count::refused_per_identity);
                    return Err(TooMany);
                }
            }
        }
        admission.publish(&table);
        Ok(())
    }

    fn leave_handshake(&self, table: &mut Table) {
        if matches!(self.stage, Stage::Handshake) {
            table.handshakes -= 1;
            if let Some(entry) = table.addresses.get_mut(&self.address) {
                entry.handshakes -= 1;
            }
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let admission = Arc::clone(&self.admission);
        let mut table = admission.lock();
        self.leave_handshake(&mut table);
        table.connections -= 1;
        if let Some(entry) = table.addresses.get_mut(&self.address) {
            entry.connections -= 1;
            if matches!(self.stage, Stage::Anonymous) {
                entry.anonymous -= 1;
            }
            if entry.connections == 0 {
                table.addresses.remove(&self.address);
            }
        }
        if let Stage::Known(identity) = &self.stage
            && let Some(count) = table.identities.get_mut(identity)
        {
            *count -= 1;
            if *count == 0 {
                table.identities.remove(identity);
            }
        }
        admission.publish(&table);
    }
}

/// What counts as one address: IPv4 as it is, IPv6 by its /64, which is what one subscriber or host is given.
fn network_of(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V4(ip) => IpAddr::V4(ip),
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mvm_pki::Role;

    fn admission(limits: Limits) -> Arc<Admission> {
        Admission::new(limits, Arc::default())
    }

    fn roomy() -> Limits {
        Limits { retry_above: usize::MAX, ..Limits::default() }
    }

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn admit(admission: &Arc<Admission>, ip: IpAddr) -> Option<Permit> {
        match admission.decide(ip, true) {
            Decision::Admit(permit) => Some(permit),
            _ => None,
        }
    }

    fn node(name: &str) -> Identity {
        Identity::new("lab".parse().expect("a cluster"), Role::Node, name).expect("an identity")
    }

    #[test]
    fn a_dropped_permit_leaves_no_trace() {
        let admission = admission(roomy());
        let mut known = admit(&admission, ip(1)).expect("room");
        known.established(Some(&node("a"))).expect("room");
        let mut anonymous = admit(&admission, ip(2)).expect("room");
        anonymous.established(None).expect("room");
        let handshake = admit(&admission, ip(3)).expect("room");
        drop((known, anonymous, handshake));
        let table = admission.lock();
        assert_eq!((table.connections, table.handshakes), (0, 0));
        assert!(table.addresses.is_empty() && table.identities.is_empty());
    }

    #[test]
    fn the_whole_and_one_address_are_limited_apart() {
        let admission = admission(Limits { max_connections: 3, max_connections_per_ip: 2, ..roomy() });
        let held = [admit(&admission, ip(1)), admit(&admission, ip(1))];
        assert!(held.iter().all(Option::is_some));
        assert!(matches!(admission.decide(ip(1), true), Decision::Refuse));
        let other = admit(&admission, ip(2));
        assert!(other.is_some() && matches!(admission.decide(ip(3), true), Decision::Refuse));
        drop(other);
        assert!(admit(&admission, ip(3)).is_some());
    }

    #[test]
    fn handshakes_above_the_limit_are_ignored_until_one_ends() {
        let admission = admission(Limits { max_handshakes: 3, max_handshakes_per_ip: 2, ..roomy() });
        let mut first = admit(&admission, ip(1)).expect("room");
        let _second = admit(&admission, ip(1)).expect("room");
        assert!(matches!(admission.decide(ip(1), true), Decision::Ignore));
        let _third = admit(&admission, ip(2)).expect("room");
        assert!(matches!(admission.decide(ip(3), true), Decision::Ignore));
        first.established(Some(&node("a"))).expect("room");
        assert!(admit(&admission, ip(3)).is_some());
    }

    #[test]
    fn an_unproven_address_is_asked_to_prove_itself_once_handshakes_pile_up() {
        let admission = admission(Limits { retry_above: 1, ..Limits::default() });
        let _first = match admission.decide(ip(1), false) {
            Decision::Admit(permit) => permit,
            other => panic!("expected room, got {other:?}"),
        };
        assert!(matches!(admission.decide(ip(2), false), Decision::Retry));
        assert!(matches!(admission.decide(ip(2), true), Decision::Admit(_)));
    }

    #[test]
    fn nodes_behind_one_address_are_not_held_back_by_strangers_there() {
        let admission =
            admission(Limits { max_anonymous_per_ip: 1, max_connections_per_identity: 1, ..roomy() });
        let mut permits: Vec<_> = (0..4).map(|_| admit(&admission, ip(1)).expect("room")).collect();
        assert_eq!(permits[0].established(None), Ok(()));
        assert_eq!(permits[1].established(None), Err(TooMany));
        assert_eq!(permits[2].established(Some(&node("a"))), Ok(()));
        assert_eq!(permits[3].established(Some(&node("a"))), Err(TooMany));
    }

    #[test]
    fn one_slash_64_is_one_address_and_mapped_ipv4_is_ipv4() {
        let network = |text: &str| network_of(text.parse().expect("an address"));
        assert_eq!(network("2001:db8:1:2:3::4"), network("2001:db8:1:2:ffff::"));
        assert_ne!(network("2001:db8:1:2::"), network("2001:db8:1:3::"));
        assert_eq!(network("::ffff:10.0.0.1"), ip(1));
    }
}
