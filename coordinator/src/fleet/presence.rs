//! Whether a node counts as there: decided from when its sessions began and ended, so that a session that comes and goes does
//! not make the node, its pools and placement come and go with it. Pure: time arrives from the caller.
//!
//! A loss that is shorter than [`Rules::unknown_after`] passes unnoticed. A node that was given up is there again with its next
//! session, or, when it lost several sessions lately, after one that lasted and told the node's status.

use std::collections::VecDeque;
use std::time::Duration;

use mvm_proto::Timestamp;

/// So many lost sessions within [`Rules::flaps_within`] make a node prove itself.
const FLAPS: usize = 3;

/// The times that a node's standing is decided by.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    /// How long a node may be without a session before that counts.
    pub(crate) unknown_after: Duration,
    /// How long it may not be there before what is placed on it is placed elsewhere.
    pub(crate) lost_after: Duration,
    /// How long a session lasts that proves a node which lost several.
    pub(crate) settled_after: Duration,
    /// How long a lost session is held against a node.
    pub(crate) flaps_within: Duration,
}

impl Rules {
    pub(crate) fn new(heartbeat: Duration, grace: Duration) -> Self {
        Self {
            unknown_after: (2 * heartbeat).min(grace),
            lost_after: grace,
            settled_after: 6 * heartbeat,
            flaps_within: 30 * heartbeat,
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Standing {
    Present,
    /// Away, and not for long enough that anything would be placed elsewhere; or not heard of since the start.
    #[default]
    Unknown,
    Lost,
}

/// A node's sessions, as far as its standing depends on them.
#[derive(Debug, Clone)]
pub(crate) struct Presence {
    connected: bool,
    /// Since when it has a session, or has none.
    since: Timestamp,
    was_present: bool,
    /// Since when it is not there, where it is not.
    absent_since: Timestamp,
    /// Its status came in this session.
    reported: bool,
    /// When its last sessions ended, newest last.
    ends: VecDeque<Timestamp>,
}

impl Presence {
    /// A node that nothing is known of before `now`: neither for it nor against it.
    pub(crate) fn new(now: Timestamp) -> Self {
        Self {
            connected: false,
            since: now,
            was_present: false,
            absent_since: now,
            reported: false,
            ends: VecDeque::new(),
        }
    }

    pub(crate) fn connect(&mut self, rules: &Rules, now: Timestamp) {
        self.note(rules, now);
        (self.connected, self.since, self.reported) = (true, now, false);
    }

    pub(crate) fn disconnect(&mut self, rules: &Rules, now: Timestamp) {
        self.note(rules, now);
        if self.was_present {
            self.absent_since = now;
        }
        (self.connected, self.since) = (false, now);
        if self.ends.len() == FLAPS {
            self.ends.pop_front();
        }
        self.ends.push_back(now);
    }

    /// Its status came; `true` when that is the first of this session.
    pub(crate) fn report(&mut self) -> bool {
        !std::mem::replace(&mut self.reported, true)
    }

    fn note(&mut self, rules: &Rules, now: Timestamp) {
        self.was_present = self.standing(rules, now) == Standing::Present;
    }

    pub(crate) fn standing(&self, rules: &Rules, now: Timestamp) -> Standing {
        let present = match self.present_at(rules) {
            Present::Until(end) => now < end,
            Present::From(begin) => now >= begin,
            Present::Always => true,
            Present::Never => false,
        };
        if present {
            Standing::Present
        } else if now >= self.absent_since + rules.lost_after {
            Standing::Lost
        } else {
            Standing::Unknown
        }
    }

    /// Since when it is not there.
    pub(crate) fn absent_since(&self, rules: &Rules, now: Timestamp) -> Option<Timestamp> {
        (self.standing(rules, now) != Standing::Present).then_some(self.absent_since)
    }

    /// When its standing changes although no session begins or ends.
    pub(crate) fn changes_at(&self, rules: &Rules, now: Timestamp) -> Option<Timestamp> {
        let presence = match self.present_at(rules) {
            Present::Until(at) | Present::From(at) => Some(at),
            Present::Always => return None,
            Present::Never => None,
        };
        let lost = self.absent_since + rules.lost_after;
        [presence, Some(lost)].into_iter().flatten().filter(|at| *at > now).min()
    }

    fn present_at(&self, rules: &Rules) -> Present {
        match (self.connected, self.was_present) {
            (true, true) => Present::Always,
            (true, false) if !self.flapped(rules) => Present::Always,
            (true, false) if self.reported => Present::From(self.since + rules.settled_after),
            (false, true) => Present::Until(self.since + rules.unknown_after),
            (true | false, false) => Present::Never,
        }
    }

    /// Whether it had lost several sessions lately when this one began.
    fn flapped(&self, rules: &Rules) -> bool {
        let lately = self.ends.iter().filter(|end| self.since < **end + rules.flaps_within);
        lately.count() >= FLAPS
    }
}

enum Present {
    Always,
    Never,
    From(Timestamp),
    Until(Timestamp),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RULES: Rules = Rules {
        unknown_after: Duration::from_secs(20),
        lost_after: Duration::from_secs(300),
        settled_after: Duration::from_secs(60),
        flaps_within: Duration::from_secs(300),
    };

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_unix_ms(i64::try_from(seconds * 1000).unwrap())
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Happens {
        Connect,
        Disconnect,
        Report,
    }

    /// What happened when, in order; a session begins only where none is, and ends where one is.
    fn stories() -> impl Strategy<Value = Vec<(u64, Happens)>> {
        let waits = prop_oneof![1..30_u64, 1..100_u64, 100..700_u64];
        proptest::collection::vec((waits, any::<bool>()), 1..30).prop_map(|steps| {
            let (mut time, mut connected, mut story) = (0, false, Vec::new());
            for (wait, reports) in steps {
                time += wait;
                story.push((time, if connected { Happens::Disconnect } else { Happens::Connect }));
                connected = !connected;
                if connected && reports {
                    story.push((time, Happens::Report));
                }
            }
            story
        })
    }

    /// The standing at each second, with whether it was connected then.
    fn lived(story: &[(u64, Happens)]) -> Vec<(bool, Standing)> {
        let mut presence = Presence::new(at(0));
        let (mut left, mut connected, mut seconds) = (story, false, Vec::new());
        let end = story.last().map_or(0, |(time, _)| time + 700);
        for now in 0..end {
            while let Some(((time, happens), rest)) = left.split_first()
                && *time == now
            {
                match happens {
                    Happens::Connect => presence.connect(&RULES, at(now)),
                    Happens::Disconnect => presence.disconnect(&RULES, at(now)),
                    Happens::Report => drop(presence.report()),
                }
                connected = match happens {
                    Happens::Connect | Happens::Report => true,
                    Happens::Disconnect => false,
                };
                left = rest;
            }
            seconds.push((connected, presence.standing(&RULES, at(now))));
        }
        seconds
    }

    /// For how many seconds up to and with each this held without a break.
    fn runs(seconds: &[(bool, Standing)], holds: impl Fn(&(bool, Standing)) -> bool) -> Vec<u64> {
        let mut run = 0;
        seconds
            .iter()
            .map(|second| {
                run = if holds(second) { run + 1 } else { 0 };
                run
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn a_node_is_given_up_only_after_it_was_away_for_long_enough_without_a_break(story in stories()) {
            let seconds = lived(&story);
            let gone = runs(&seconds, |(connected, _)| !connected);
            for now in 1..seconds.len() {
                if seconds[now - 1].1 == Standing::Present && seconds[now].1 != Standing::Present {
                    prop_assert!(gone[now - 1] >= RULES.unknown_after.as_secs(), "at {}", now);
                }
            }
        }

        #[test]
        fn a_node_without_a_session_does_not_count_as_there_for_long(story in stories()) {
            let seconds = lived(&story);
            let gone = runs(&seconds, |(connected, _)| !connected);
            for (now, (_, standing)) in seconds.iter().enumerate() {
                prop_assert!(gone[now] <= RULES.unknown_after.as_secs() || *standing != Standing::Present);
            }
        }

        #[test]
        fn a_node_is_lost_exactly_when_it_was_not_there_for_its_grace(story in stories()) {
            let seconds = lived(&story);
            let absent = runs(&seconds, |(_, standing)| *standing != Standing::Present);
            // From the moment on that its last session ended, which is what it is given up for.
            let unnoticed = RULES.unknown_after.as_secs();
            for (now, (_, standing)) in seconds.iter().enumerate() {
                let lost = *standing == Standing::Lost;
                prop_assert!(!lost || absent[now] + unnoticed > RULES.lost_after.as_secs(), "too early at {}", now);
                prop_assert!(lost || absent[now] <= RULES.lost_after.as_secs(), "too late at {}", now);
            }
        }

        /// However its sessions come and go.
        #[test]
        fn a_node_that_flaps_comes_and_goes_a_few_times_at_most(waits in proptest::collection::vec(1..59_u64, 1..60)) {
            let mut time = 0;
            let story: Vec<_> = waits.into_iter().enumerate().flat_map(|(step, wait)| {
                time += wait;
                let happens = if step % 2 == 0 { Happens::Connect } else { Happens::Disconnect };
                [(time, happens)].into_iter().chain((happens == Happens::Connect).then_some((time, Happens::Report)))
            }).collect();
            let last = story.last().unwrap().0;
            let seconds = &lived(&story)[..usize::try_from(last).unwrap()];
            for now in 0..seconds.len() {
                let window = &seconds[now.saturating_sub(299)..=now];
                let returns = window.windows(2).filter(|two| two[0].1 != Standing::Present && two[1].1 == Standing::Present);
                prop_assert!(returns.count() <= FLAPS, "{} at {}", now, last);
            }
        }

        #[test]
        fn the_standing_changes_when_it_was_said_to_and_at_no_other_time(story in stories(), cut in 0..30_usize) {
            let mut presence = Presence::new(at(0));
            let mut now = 0;
            for (time, happens) in story.iter().take(cut + 1) {
                now = *time;
                match happens {
                    Happens::Connect => presence.connect(&RULES, at(now)),
                    Happens::Disconnect => presence.disconnect(&RULES, at(now)),
                    Happens::Report => drop(presence.report()),
                }
            }
            let (mut standing, mut told) = (presence.standing(&RULES, at(now)), presence.changes_at(&RULES, at(now)));
            for later in now + 1..now + 1500 {
                let next = presence.standing(&RULES, at(later));
                prop_assert!(next == standing || told == Some(at(later)), "{:?} became {:?} at {}, told {:?}", standing, next, later, told);
                if told == Some(at(later)) {
                    told = presence.changes_at(&RULES, at(later));
                }
                standing = next;
            }
        }
    }

    #[test]
    fn a_leader_that_was_just_elected_knows_no_node_and_counts_the_grace_from_its_election() {
        let presence = Presence::new(at(1000));
        let standing = |time| presence.standing(&RULES, at(time));
        assert_eq!([1000, 1299, 1300].map(standing), [Standing::Unknown, Standing::Unknown, Standing::Lost]);
        let mut heard = presence.clone();
        heard.connect(&RULES, at(1001));
        assert_eq!(heard.standing(&RULES, at(1001)), Standing::Present);
    }

    #[test]
    fn a_node_that_lost_several_sessions_has_to_stay_and_to_report() {
        let mut presence = Presence::new(at(0));
        for round in 0..FLAPS as u64 {
            presence.connect(&RULES, at(round * 40));
            presence.disconnect(&RULES, at(round * 40 + 10));
        }
        let begun = 200;
        presence.connect(&RULES, at(begun));
        assert_eq!(presence.standing(&RULES, at(begun + 600)), Standing::Lost, "it never said anything");
        presence.report();
        let standing = |time| presence.standing(&RULES, at(time));
        assert_eq!((standing(begun + 59), standing(begun + 60)), (Standing::Unknown, Standing::Present));
    }
}
