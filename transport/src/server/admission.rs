//! Which connections are let in: counts them in all, per address and per identity.
//!
//! Handshakes, connections without a certificate and connections with one have slots of their own kind
//! ([`Slots`]), so that peers that have proven nothing can't take the slots of those that have. A [`Permit`] is one
//! connection's slot; dropping it frees the slot, however the connection ended.

use std::net::IpAddr;
use std::sync::Arc;

use mvm_pki::Identity;

use super::stats::{Count, ServerStats};
use crate::limits::Limits;
use crate::slots::{Activity, Evict, Full, Rules, Slot, Slots, network_of};

/// What to do with a connection attempt.
#[derive(Debug)]
pub(super) enum Decision {
    /// Begin the handshake.
    Admit(Box<Permit>),
    /// Let it prove its address first; nothing is kept about it.
    Retry,
    /// Say no.
    Refuse,
    /// Say nothing: an honest client sends again, and finds room then.
    Ignore,
}

/// What slots are counted by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Holder {
    Network(IpAddr),
    /// With whether its certificate counts: one that does not takes no slot of those that do.
    Identity(Identity, bool),
}

#[derive(Debug)]
pub(super) struct Admission {
    retry_above: usize,
    stats: Arc<ServerStats>,
    /// Every connection, by its address.
    addresses: Slots<Holder>,
    handshakes: Slots<Holder>,
    anonymous: Slots<Holder>,
    known: Slots<Holder>,
}

/// One connection's slot in the counts.
#[derive(Debug)]
pub(super) struct Permit {
    network: Holder,
    stage: Slot<Holder>,
    _address: Slot<Holder>,
    /// Last, so that it is dropped when the slots are free.
    admitted: Admitted,
}

/// Publishes the counts when a connection has gone.
#[derive(Debug)]
struct Admitted(Arc<Admission>);

impl Admission {
    pub(super) fn new(limits: &Limits, stats: Arc<ServerStats>) -> Arc<Self> {
        let slots = |most, most_per_key, evict| Slots::new(Rules { most, most_per_key, evict });
        Arc::new(Self {
            retry_above: limits.retry_above,
            stats,
            addresses: slots(usize::MAX, limits.max_connections_per_ip, Evict::Idle),
            handshakes: slots(limits.max_handshakes, limits.max_handshakes_per_ip, Evict::BusyOfOthers),
            anonymous: slots(limits.max_anonymous, limits.max_anonymous_per_ip, Evict::BusyOfOthers),
            known: slots(limits.max_connections, limits.max_connections_per_identity, Evict::Idle),
        })
    }

    /// Decides on an attempt from `ip`; `validated` when a Retry has proven that address.
    pub(super) fn decide(self: &Arc<Self>, ip: IpAddr, validated: bool) -> Decision {
        let network = Holder::Network(network_of(ip));
        if self.known.are_full() {
            self.stats.count(Count::refused_total);
            return Decision::Refuse;
        }
        let Ok(address) = self.addresses.take_busy(network.clone()) else {
            self.stats.count(Count::refused_per_ip);
            return Decision::Refuse;
        };
        if !validated && self.handshakes.taken() >= self.retry_above {
            self.stats.count(Count::retries_sent);
            return Decision::Retry;
        }
        let Ok(handshake) = self.handshakes.take_busy(network.clone()) else {
            self.stats.count(Count::handshakes_ignored);
            return Decision::Ignore;
        };
        self.publish();
        let admitted = Admitted(Arc::clone(self));
        Decision::Admit(Box::new(Permit { network, stage: handshake, _address: address, admitted }))
    }

    fn publish(&self) {
        self.stats.set(Count::connections_open, self.addresses.taken());
        self.stats.set(Count::handshakes_open, self.handshakes.taken());
    }
}

impl Permit {
    /// The handshake has ended and shown which peer it is. In exchange for its slot among the handshakes the
    /// connection gets one among its own kind. `counts`: whether its certificate is of those that are good now.
    pub(super) fn established(&mut self, identity: Option<&Identity>, counts: bool) -> Result<(), Full> {
        let Admission { anonymous, known, stats, .. } = &*self.admitted.0;
        let taken = match identity {
            None => anonymous.take(self.network.clone()),
            Some(identity) => known.take(Holder::Identity(identity.clone(), counts)),
        };
        self.stage = taken.inspect_err(|full| {
            stats.count(match (identity, full) {
                (None, _) => Count::refused_anonymous,
                (Some(_), Full::Key) => Count::refused_per_identity,
                (Some(_), Full::Whole) => Count::refused_total,
            });
        })?;
        self.admitted.0.publish();
        Ok(())
    }

    /// Waits until a newer connection or handshake has taken this slot.
    pub(super) async fn evicted(&mut self) {
        self.stage.evicted().await;
    }

    /// For the requests on this connection, which is not evicted while it has any.
    pub(super) fn activity(&self) -> Activity<Holder> {
        self.stage.activity()
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.publish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use mvm_pki::Role;

    fn admission(limits: &Limits) -> Arc<Admission> {
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
            Decision::Admit(permit) => Some(*permit),
            _ => None,
        }
    }

    fn node(name: &str) -> Identity {
        Identity::new("lab".parse().expect("a cluster"), Role::Node, name).expect("an identity")
    }

    /// A connection whose handshake has ended.
    fn connect(admission: &Arc<Admission>, last: u8, identity: Option<&Identity>) -> Result<Permit, Full> {
        let mut permit = admit(admission, ip(last)).expect("room for a handshake");
        permit.established(identity, true).map(|()| permit)
    }

    fn is_evicted(permit: &mut Permit) -> bool {
        permit.evicted().now_or_never().is_some()
    }

    #[test]
    fn a_dropped_permit_leaves_no_trace() {
        let admission = admission(&roomy());
        let known = connect(&admission, 1, Some(&node("a"))).expect("room");
        let anonymous = connect(&admission, 2, None).expect("room");
        let handshake = admit(&admission, ip(3)).expect("room");
        assert_eq!((admission.stats.connections_open(), admission.stats.handshakes_open()), (3, 1));
        drop((known, anonymous, handshake));
        assert_eq!((admission.stats.connections_open(), admission.stats.handshakes_open()), (0, 0));
        for slots in [&admission.addresses, &admission.handshakes, &admission.anonymous, &admission.known] {
            assert_eq!(slots.taken(), 0);
        }
    }

    #[test]
    fn the_whole_and_one_address_are_limited_apart() {
        let admission = admission(&Limits { max_connections: 3, max_connections_per_ip: 2, ..roomy() });
        let _held = ["a", "b"].map(|name| connect(&admission, 1, Some(&node(name))).expect("room"));
        assert!(matches!(admission.decide(ip(1), true), Decision::Refuse));
        let other = connect(&admission, 2, Some(&node("c")));
        assert!(other.is_ok() && matches!(admission.decide(ip(3), true), Decision::Refuse));
        drop(other);
        assert!(admit(&admission, ip(3)).is_some());
    }

    #[test]
    fn neither_handshakes_nor_strangers_take_the_places_of_certificates() {
        let limits = Limits { max_connections: 2, max_anonymous: 3, max_handshakes: 4, ..roomy() };
        let admission = admission(&limits);
        let _strangers: Vec<_> =
            (10..30).map(|last| connect(&admission, last, None).expect("a stranger gives way")).collect();
        let _silent: Vec<_> =
            (30..60).map(|last| admit(&admission, ip(last)).expect("one gives way")).collect();
        assert_eq!((admission.anonymous.taken(), admission.handshakes.taken()), (3, 4));
        let _known = ["a", "b"].map(|name| connect(&admission, 1, Some(&node(name))).expect("room"));
        assert!(
            matches!(admission.decide(ip(1), true), Decision::Refuse),
            "only certificates fill the table"
        );
    }

    #[test]
    fn handshakes_of_one_address_above_its_limit_are_ignored_until_one_ends() {
        let admission = admission(&Limits { max_handshakes_per_ip: 2, ..roomy() });
        let mut first = admit(&admission, ip(1)).expect("room");
        let _second = admit(&admission, ip(1)).expect("room");
        assert!(matches!(admission.decide(ip(1), true), Decision::Ignore));
        first.established(Some(&node("a")), true).expect("room");
        assert!(admit(&admission, ip(1)).is_some());
    }

    #[test]
    fn the_oldest_handshake_of_the_address_with_most_gives_way_to_another_address() {
        let admission = admission(&Limits { max_handshakes: 3, ..roomy() });
        let mut one = admit(&admission, ip(1)).expect("room");
        let mut two = [admit(&admission, ip(2)).expect("room"), admit(&admission, ip(2)).expect("room")];
        let _honest = admit(&admission, ip(3)).expect("one gives way");
        assert!(!is_evicted(&mut one));
        assert_eq!(two.each_mut().map(is_evicted), [true, false]);
        assert!(matches!(admission.decide(ip(2), true), Decision::Ignore), "all addresses have one");
    }

    #[test]
    fn an_unproven_address_is_asked_to_prove_itself_once_handshakes_pile_up() {
        let admission = admission(&Limits { retry_above: 1, ..Limits::default() });
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
            admission(&Limits { max_anonymous_per_ip: 1, max_connections_per_identity: 1, ..roomy() });
        let stranger = connect(&admission, 1, None).expect("room");
        let _request = stranger.activity().begin();
        assert_eq!(connect(&admission, 1, None).expect_err("one is enough"), Full::Key);
        let known = connect(&admission, 1, Some(&node("a"))).expect("room");
        let _request = known.activity().begin();
        assert_eq!(connect(&admission, 1, Some(&node("a"))).expect_err("one is enough"), Full::Key);
        assert_eq!(admission.stats.refused_anonymous(), 1);
        assert_eq!(admission.stats.refused_per_identity(), 1);
    }

    #[test]
    fn a_connection_without_requests_gives_way_to_a_newer_one_of_its_identity() {
        let admission = admission(&Limits { max_connections_per_identity: 2, ..roomy() });
        let mut busy = connect(&admission, 1, Some(&node("a"))).expect("room");
        let _request = busy.activity().begin();
        let mut idle = connect(&admission, 1, Some(&node("a"))).expect("room");
        let _newest = connect(&admission, 1, Some(&node("a"))).expect("the idle one gives way");
        assert!(is_evicted(&mut idle) && !is_evicted(&mut busy));
    }

    #[test]
    fn a_certificate_that_does_not_count_takes_no_place_of_those_that_do() {
        let admission = admission(&Limits { max_connections_per_identity: 1, ..roomy() });
        let mut old = admit(&admission, ip(1)).expect("room");
        old.established(Some(&node("a")), false).expect("room");
        let _request = old.activity().begin();
        let mut known = connect(&admission, 1, Some(&node("a"))).expect("its own slot");
        let mut older = admit(&admission, ip(1)).expect("room");
        assert_eq!(older.established(Some(&node("a")), false).expect_err("one is enough"), Full::Key);
        assert!(!is_evicted(&mut known));
    }
}
