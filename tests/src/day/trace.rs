//! When requests come: a daily curve, a few sessions per agent, heavy tails everywhere.
//!
//! Whole numbers only: the same seed gives the same day on every machine.

/// The length of a day.
pub const DAY_MS: u64 = 24 * HOUR_MS;
const HOUR_MS: u64 = 3_600_000;
const SECOND_MS: u64 = 1000;

/// How lively each hour is, in percent of the liveliest: people work by day, and something runs at night.
const CURVE: [u64; 24] =
    [12, 9, 8, 8, 9, 12, 20, 38, 65, 88, 96, 92, 78, 90, 100, 98, 90, 76, 58, 48, 42, 34, 25, 17];

/// One in this many gaps is between sessions; the others are within one.
const REQUESTS_PER_SESSION: u64 = 6;

/// At least `shortest`, then doubled with a chance of so many percent, again and again: the tail of a Pareto law whose
/// exponent is 1 at 50 percent and 1.3 at 40, cut off after `doublings`.
struct Length {
    shortest: u64,
    percent: u64,
    doublings: u32,
}

const WITHIN_SESSION: Length = Length { shortest: 5 * SECOND_MS, percent: 55, doublings: 9 };
const BETWEEN_SESSIONS: Length = Length { shortest: 20 * 60 * SECOND_MS, percent: 40, doublings: 6 };
const SERVICE: Length = Length { shortest: 200, percent: 50, doublings: 12 };
/// How much less often than others an agent is used.
const SELDOM: Length = Length { shortest: 1, percent: 40, doublings: 4 };

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrival {
    /// Since midnight.
    pub at_ms: u64,
    /// Whose instance it is for.
    pub agent: usize,
    pub service_ms: u64,
}

/// All requests of a day, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    pub arrivals: Vec<Arrival>,
}

impl Trace {
    /// The day of this seed, for so many agents.
    #[must_use]
    pub fn of(seed: u64, agents: usize) -> Self {
        let mut arrivals = Vec::new();
        for agent in 0..agents {
            let mut chance = Chance::new(seed, agent);
            let seldom = chance.long(&SELDOM);
            // Midnight falls anywhere between two sessions.
            let first = chance.long(&BETWEEN_SESSIONS) * seldom;
            let mut at_ms = later(0, chance.below(first));
            while at_ms < DAY_MS {
                arrivals.push(Arrival { at_ms, agent, service_ms: chance.long(&SERVICE) });
                at_ms = if chance.below(REQUESTS_PER_SESSION) == 0 {
                    later(at_ms, chance.long(&BETWEEN_SESSIONS) * seldom)
                } else {
                    at_ms + chance.long(&WITHIN_SESSION)
                };
            }
        }
        arrivals.sort_unstable();
        Self { arrivals }
    }
}

/// The time at which `gap_ms` have passed for people: an hour passes as fast for them as it is lively.
fn later(from_ms: u64, gap_ms: u64) -> u64 {
    let (mut at, mut left) = (from_ms, gap_ms);
    while at < DAY_MS {
        let hour = at / HOUR_MS;
        let lively = usize::try_from(hour).ok().and_then(|hour| CURVE.get(hour)).copied().unwrap_or(100);
        let end = (hour + 1) * HOUR_MS;
        let passes = (end - at) * lively / 100;
        if left <= passes {
            return at + left * 100 / lively;
        }
        left -= passes;
        at = end;
    }
    at
}

/// Random enough for a day, the same for the same seed (splitmix64).
#[derive(Debug)]
struct Chance(u64);

impl Chance {
    fn new(seed: u64, agent: usize) -> Self {
        let mut mixed = Self(seed);
        mixed.0 = mixed.next() ^ agent as u64;
        mixed
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// At least the shortest, seldom much longer.
    fn long(&mut self, law: &Length) -> u64 {
        let mut length = law.shortest;
        for _ in 0..law.doublings {
            if self.below(100) >= law.percent {
                break;
            }
            length *= 2;
        }
        length + self.below(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_day_and_another_seed_another() {
        assert_eq!(Trace::of(1, 50), Trace::of(1, 50));
        assert_ne!(Trace::of(1, 50), Trace::of(2, 50));
    }

    #[test]
    fn a_day_is_in_order_within_its_hours_and_livelier_at_noon_than_at_night() {
        let day = Trace::of(7, 200);
        assert!(day.arrivals.is_sorted_by_key(|arrival| arrival.at_ms));
        assert!(day.arrivals.iter().all(|arrival| arrival.at_ms < DAY_MS && arrival.agent < 200));
        let between = |from: u64, to: u64| {
            day.arrivals.iter().filter(|a| (from * HOUR_MS..to * HOUR_MS).contains(&a.at_ms)).count()
        };
        assert!(between(9, 17) > 4 * between(0, 6), "{} and {}", between(9, 17), between(0, 6));
    }

    #[test]
    fn tails_are_heavy() {
        let mut services: Vec<u64> = Trace::of(7, 200).arrivals.iter().map(|a| a.service_ms).collect();
        services.sort_unstable();
        let at = |percent: usize| services[services.len() * percent / 100];
        assert!(at(99) > 20 * at(50), "{} and {}", at(50), at(99));
    }

    #[test]
    fn an_hour_at_night_passes_more_slowly() {
        assert_eq!(later(14 * HOUR_MS, 60_000), 14 * HOUR_MS + 60_000);
        assert_eq!(later(0, 6 * 60_000), 50 * 60_000);
        assert_eq!(later(0, 432_000 + 54_000), HOUR_MS + 10 * 60_000, "through the first hour into the next");
        assert!(later(23 * HOUR_MS, HOUR_MS) >= DAY_MS);
    }
}
