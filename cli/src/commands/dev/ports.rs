//! Ports on loopback for the two processes: remembered, and others where one was taken by another program meanwhile.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Below those that the kernel gives to outgoing connections.
const RANGE: Range<u16> = 14_000..20_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ports {
    /// UDP for the agent, TCP for operators.
    pub(super) coordinator: u16,
    pub(super) coordinator_metrics: u16,
    /// UDP, of the agent's own API.
    pub(super) agent: u16,
    pub(super) agent_metrics: u16,
}

/// Which processes have their ports already.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Bound {
    pub(super) coordinator: bool,
    pub(super) agent: bool,
}

/// The ports from before as far as they are bound by our processes or free, and free ones for the rest, looked for from `seed`
/// on. None: there are not enough.
pub(super) fn choose(
    before: Option<Ports>,
    bound: Bound,
    seed: u32,
    is_free: impl Fn(u16) -> bool,
) -> Option<Ports> {
    let size = u32::from(RANGE.end - RANGE.start);
    let candidates = (0..size).filter_map(|step| {
        let offset = u16::try_from(seed.wrapping_add(step) % size).ok()?;
        Some(RANGE.start + offset)
    });
    let mut taken: Vec<u16> = Vec::new();
    let known = before.map_or([None; 4], |before| {
        let Ports { coordinator, coordinator_metrics, agent, agent_metrics } = before;
        [coordinator, coordinator_metrics, agent, agent_metrics].map(Some)
    });
    let is_bound = [bound.coordinator, bound.coordinator, bound.agent, bound.agent];
    let mut chosen = [0; 4];
    let mut rest = Vec::new();
    for (place, (known, is_bound)) in known.into_iter().zip(is_bound).enumerate() {
        match known.filter(|port| is_bound || is_free(*port)) {
            Some(port) => {
                chosen[place] = port;
                taken.push(port);
            }
            None => rest.push(place),
        }
    }
    let mut fresh = candidates.filter(|port| !taken.contains(port) && is_free(*port));
    for place in rest {
        chosen[place] = fresh.next()?;
    }
    let [coordinator, coordinator_metrics, agent, agent_metrics] = chosen;
    Some(Ports { coordinator, coordinator_metrics, agent, agent_metrics })
}

/// Whether no program on this machine has the port, for either protocol.
pub(super) fn is_free(port: u16) -> bool {
    let here = (Ipv4Addr::LOCALHOST, port);
    UdpSocket::bind(here).is_ok() && TcpListener::bind(here).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: Ports =
        Ports { coordinator: 14_010, coordinator_metrics: 14_011, agent: 14_012, agent_metrics: 14_013 };

    #[test]
    fn ports_are_kept_while_they_are_ours_or_free_and_replaced_by_free_ones_otherwise() {
        let all_free = |_| true;
        let fresh = choose(None, Bound::default(), 5, all_free).unwrap();
        assert_eq!(
            fresh,
            Ports { coordinator: 14_005, coordinator_metrics: 14_006, agent: 14_007, agent_metrics: 14_008 }
        );
        assert_eq!(choose(Some(BEFORE), Bound::default(), 5, all_free), Some(BEFORE));
        // A process of ours has its ports, which are not free for that.
        let bound = Bound { coordinator: true, agent: true };
        assert_eq!(choose(Some(BEFORE), bound, 5, |_| false), Some(BEFORE));
        // Another program took two of them, and the first that would be next.
        let taken = [14_010, 14_013, 14_005];
        let chosen = choose(Some(BEFORE), Bound::default(), 5, |port| !taken.contains(&port)).unwrap();
        assert_eq!(chosen, Ports { coordinator: 14_006, agent_metrics: 14_007, ..BEFORE });
        // The search goes round, and takes no port twice.
        let near_end = choose(None, Bound::default(), 5_998, all_free).unwrap();
        assert_eq!((near_end.coordinator_metrics, near_end.agent), (19_999, 14_000));
        assert_eq!(choose(None, Bound::default(), 0, |port| port < 14_003), None);
    }

    #[test]
    fn a_port_that_a_program_has_is_not_free() {
        let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        assert!(!is_free(tcp.local_addr().unwrap().port()));
        let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        assert!(!is_free(udp.local_addr().unwrap().port()));
    }
}
