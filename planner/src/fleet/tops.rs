//! Which of many keys is the largest, and which of those that are as large is the first. A change touches one group of keys
//! at each level until a group's largest stays the same, which is mostly at once.

use std::cmp::Reverse;
use std::ops::Range;

/// How many keys have one key above them: small ones fill one cache line.
const GROUP: usize = 16;
/// So many that the highest level of a million keys is one group.
const LEVELS: usize = 5;

/// Keys at positions from 0. The default key means: not there.
#[derive(Debug, Clone, Default)]
pub(super) struct Tops<K> {
    /// The keys; then, level by level, the largest key of each group below.
    levels: [Vec<K>; LEVELS],
    /// The largest of all, and the first position where it is.
    top: Option<(K, usize)>,
}

impl<K: Copy + Ord + Default> Tops<K> {
    /// The largest key and the first position where it is; none if none is there.
    pub(super) fn top(&self) -> Option<(K, usize)> {
        self.top
    }

    pub(super) fn get(&self, position: usize) -> K {
        self.levels[0].get(position).copied().unwrap_or_default()
    }

    pub(super) fn set(&mut self, position: usize, key: K) {
        let Some(held) = self.levels[0].get_mut(position) else { return };
        *held = key;
        let mut at = position;
        for level in 1..LEVELS {
            let largest = largest_of_group(&self.levels[level - 1], at / GROUP);
            at /= GROUP;
            if self.levels[level][at] == largest {
                break;
            }
            self.levels[level][at] = largest;
        }
        match self.top {
            Some((largest, first)) if (key, Reverse(position)) < (largest, Reverse(first)) => {
                if position == first {
                    self.find_top();
                }
            }
            _ => self.top = Some((key, position)).filter(|_| key != K::default()),
        }
    }

    /// Puts a key between others; those behind it move by one.
    pub(super) fn insert(&mut self, position: usize, key: K) {
        self.levels[0].insert(position, key);
        self.rebuild(position);
    }

    pub(super) fn remove(&mut self, position: usize) {
        self.levels[0].remove(position);
        self.rebuild(position);
    }

    /// The largest key within these positions, and the first of them where it is.
    pub(super) fn best(&self, range: Range<usize>) -> Option<(K, usize)> {
        let (mut from, mut to) = (range.start, range.end.min(self.levels[0].len()));
        let mut best: Option<(K, Reverse<usize>, usize)> = None;
        let mut width = 1;
        for (level, keys) in self.levels.iter().enumerate() {
            let mut consider = |at: usize| {
                let found = Some((keys[at], Reverse(at * width), level));
                if keys[at] != K::default() && found > best {
                    best = found;
                }
            };
            let is_last = level + 1 == LEVELS;
            while from < to && (is_last || !from.is_multiple_of(GROUP)) {
                consider(from);
                from += 1;
            }
            while from < to && !to.is_multiple_of(GROUP) {
                to -= 1;
                consider(to);
            }
            if from >= to {
                break;
            }
            (from, to, width) = (from / GROUP, to / GROUP, width * GROUP);
        }
        let (key, Reverse(start), level) = best?;
        Some((key, self.first_below(key, start / GROUP.pow(u32::try_from(level).unwrap_or(0)), level)))
    }

    /// The first position below a key of a level that has this key.
    fn first_below(&self, key: K, at: usize, level: usize) -> usize {
        self.levels[..level].iter().rev().fold(at, |at, keys| {
            let group = at * GROUP;
            let offset = keys[group..].iter().take(GROUP).position(|held| *held == key);
            group + offset.unwrap_or(0)
        })
    }

    fn find_top(&mut self) {
        let highest = LEVELS - 1;
        let largest = self.levels[highest].iter().copied().enumerate().map(|(at, key)| (key, Reverse(at)));
        self.top = largest
            .max()
            .filter(|(key, _)| *key != K::default())
            .map(|(key, Reverse(at))| (key, self.first_below(key, at, highest)));
    }

    /// Computes all that is above keys from this position on.
    fn rebuild(&mut self, position: usize) {
        let mut from = position;
        for level in 1..LEVELS {
            from /= GROUP;
            let (below, above) = self.levels.split_at_mut(level);
            let (below, above) = (&below[level - 1], &mut above[0]);
            above.resize(below.len().div_ceil(GROUP), K::default());
            for (at, largest) in above.iter_mut().enumerate().skip(from) {
                *largest = largest_of_group(below, at);
            }
        }
        self.find_top();
    }
}

fn largest_of_group<K: Copy + Ord + Default>(keys: &[K], group: usize) -> K {
    let keys = keys.get(group * GROUP..).unwrap_or_default();
    keys.iter().take(GROUP).fold(K::default(), |largest, key| largest.max(*key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_those_of_looking_at_every_key() {
        let (mut tops, mut keys) = (Tops::<u32>::default(), Vec::<u32>::new());
        let mut random = 1u64;
        let mut draw = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(random >> 33).unwrap() % below
        };
        for round in 0..4000 {
            let key = u32::try_from(draw(6)).unwrap();
            match draw(8) {
                0..3 => {
                    let at = draw(keys.len() + 1);
                    keys.insert(at, key);
                    tops.insert(at, key);
                }
                3 if !keys.is_empty() => {
                    let at = draw(keys.len());
                    keys.remove(at);
                    tops.remove(at);
                }
                _ if !keys.is_empty() => {
                    let at = draw(keys.len());
                    keys[at] = key;
                    tops.set(at, key);
                    assert_eq!(tops.get(at), key);
                }
                _ => {}
            }
            let best = |range: Range<usize>| {
                let there =
                    range.filter_map(|at| Some((*keys.get(at)?, Reverse(at)))).filter(|(key, _)| *key > 0);
                there.max().map(|(key, Reverse(at))| (key, at))
            };
            assert_eq!(tops.top(), best(0..keys.len()), "{round}: {keys:?}");
            let (from, to) = (draw(keys.len() + 1), draw(keys.len() + 20));
            assert_eq!(tops.best(from..to), best(from..to), "{round}: {from}..{to} of {keys:?}");
        }
        assert!(keys.len() > GROUP * GROUP, "{}", keys.len());
    }
}
