//! Decides since when a guest is idle, from all signs of work that are known of it.

use std::time::Duration;

use mvm_proto::Timestamp;
use mvm_proto::guest::Readiness;

/// A guest that used to send heartbeats and sent none for this long is not known to be idle.
const HEARTBEAT_STALE: Duration = Duration::from_secs(90);

/// All that is known of one guest's work now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Signs {
    /// The link stands.
    pub(super) connected: bool,
    /// What it says of itself.
    pub(super) says: Readiness,
    pub(super) last_heartbeat: Option<Timestamp>,
    /// Execs and relays are under way in it.
    pub(super) has_open_work: bool,
    /// More than chatter went through its port.
    pub(super) moves_bytes: bool,
    /// Of its processors: as it counts itself, and as the host counts its VMM.
    pub(super) guest_cpu_percent: Option<u64>,
    pub(super) host_cpu_percent: Option<u64>,
    /// Above this share of its processors a guest works.
    pub(super) cpu_idle_percent: u32,
}

impl Signs {
    pub(super) fn is_ready(&self) -> bool {
        self.connected && matches!(self.says, Readiness::Ready | Readiness::Idle | Readiness::Busy)
    }

    /// Whether it works: it says so, something was asked of it, bytes move, or its processors do.
    pub(super) fn is_busy(&self) -> bool {
        let shares = [self.guest_cpu_percent, self.host_cpu_percent];
        let works = shares.iter().flatten().any(|percent| *percent > u64::from(self.cpu_idle_percent));
        // A guest that says that it is idle knows better than a processor's share.
        let works = works && self.says != Readiness::Idle;
        self.has_work() || works
    }

    /// The same but for its processors, which may be busy with what the agent asked of the guest itself.
    pub(super) fn has_work(&self) -> bool {
        self.says == Readiness::Busy || self.has_open_work || self.moves_bytes
    }

    /// Since when it has nothing to do; `before` is what this said last. None: it has, or it is not known.
    pub(super) fn idle_since(&self, before: Option<Timestamp>, now: Timestamp) -> Option<Timestamp> {
        let is_stale = self.last_heartbeat.is_some_and(|at| now.since(at) > HEARTBEAT_STALE);
        if !self.is_ready() || self.is_busy() || is_stale {
            return None;
        }
        // A clock that was set back must not keep a guest from ever being idle.
        Some(before.filter(|since| *since <= now).unwrap_or(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_ms(1_000_000 + seconds * 1000)
    }

    /// A guest that is up and of which nothing else is known.
    const QUIET: Signs = Signs {
        connected: true,
        says: Readiness::Ready,
        last_heartbeat: None,
        has_open_work: false,
        moves_bytes: false,
        guest_cpu_percent: None,
        host_cpu_percent: None,
        cpu_idle_percent: 5,
    };

    fn idle_at_20(signs: Signs) -> Option<Timestamp> {
        signs.idle_since(Some(at(10)), at(20))
    }

    #[test]
    fn a_guest_without_any_sign_of_work_stays_idle_from_when_it_became_so() {
        assert_eq!(idle_at_20(QUIET), Some(at(10)));
        assert_eq!(QUIET.idle_since(None, at(20)), Some(at(20)));
        let at_the_limit = Signs { guest_cpu_percent: Some(5), host_cpu_percent: Some(5), ..QUIET };
        assert_eq!(idle_at_20(at_the_limit), Some(at(10)));
    }

    #[test]
    fn each_sign_of_work_alone_keeps_a_guest_from_being_idle() {
        let signs = [
            ("it says so", Signs { says: Readiness::Busy, ..QUIET }),
            ("an exec", Signs { has_open_work: true, ..QUIET }),
            ("bytes", Signs { moves_bytes: true, ..QUIET }),
            ("its own count of its processors", Signs { guest_cpu_percent: Some(6), ..QUIET }),
            ("the host's count of its VMM", Signs { host_cpu_percent: Some(6), ..QUIET }),
        ];
        for (what, signs) in signs {
            assert_eq!(idle_at_20(signs), None, "{what}");
        }
    }

    #[test]
    fn a_program_that_says_it_is_idle_knows_better_than_processors_but_not_than_who_asks_something_of_it() {
        let says_idle = Signs { says: Readiness::Idle, ..QUIET };
        let burns = Signs { guest_cpu_percent: Some(90), host_cpu_percent: Some(90), ..says_idle };
        assert_eq!(idle_at_20(burns), Some(at(10)));
        assert_eq!(idle_at_20(Signs { has_open_work: true, ..says_idle }), None);
        assert_eq!(idle_at_20(Signs { moves_bytes: true, ..says_idle }), None);
    }

    #[test]
    fn a_guest_that_is_not_up_or_not_heard_of_is_not_known_to_be_idle() {
        assert_eq!(idle_at_20(Signs { connected: false, ..QUIET }), None);
        assert_eq!(idle_at_20(Signs { says: Readiness::Starting, ..QUIET }), None);
        let heard = Signs { last_heartbeat: Some(at(0)), ..QUIET };
        assert_eq!(heard.idle_since(Some(at(0)), at(90)), Some(at(0)));
        assert_eq!(heard.idle_since(Some(at(0)), at(91)), None);
    }

    #[test]
    fn a_clock_that_was_set_back_begins_the_idle_time_anew() {
        assert_eq!(QUIET.idle_since(Some(at(500)), at(20)), Some(at(20)));
    }
}
