//! From a pool's name to its number. A table of hashes instead of a tree of names: it takes one look however many pools
//! there are. Its order is never read, and the same names give the same table in every process.

use std::hash::{DefaultHasher, Hasher as _};

use super::PoolKey;
use super::slab::PoolNumber;

/// The fewest slots, and how many of them are free for each one that is taken at least.
const LEAST_SLOTS: usize = 16;
const SLOTS_PER_NAME: usize = 2;

/// The names are with the pools: what is looked for is compared there.
///
/// A tenant could choose names that meet in one slot. It then pays for its own quota of pools: the hash is compared first.
#[derive(Debug, Clone, Default)]
pub(super) struct PoolNames {
    /// As many as a power of two. A name is in the slot of its hash or in the next ones, with no free one between.
    slots: Vec<Option<(u32, PoolNumber)>>,
    taken: usize,
}

impl PoolNames {
    /// The pool of this hash that is the one.
    pub(super) fn find(&self, hash: u32, is_it: impl Fn(PoolNumber) -> bool) -> Option<PoolNumber> {
        let mut at = self.home(hash);
        while let Some((held, number)) = *self.slots.get(at)? {
            if held == hash && is_it(number) {
                return Some(number);
            }
            at = self.next(at);
        }
        None
    }

    /// A pool that was not there gets a name.
    pub(super) fn insert(&mut self, hash: u32, number: PoolNumber) {
        if (self.taken + 1) * SLOTS_PER_NAME > self.slots.len() {
            let slots = (self.slots.len() * 2).max(LEAST_SLOTS);
            let held = std::mem::replace(&mut self.slots, vec![None; slots]);
            held.into_iter().flatten().for_each(|entry| self.put(entry));
        }
        self.put((hash, number));
        self.taken += 1;
    }

    pub(super) fn remove(&mut self, hash: u32, number: PoolNumber) {
        let mut at = self.home(hash);
        while self.slots.get(at).is_some_and(|slot| slot.is_some_and(|(_, held)| held != number)) {
            at = self.next(at);
        }
        if self.slots.get_mut(at).and_then(Option::take).is_none() {
            return;
        }
        self.taken -= 1;
        // What is behind it may have been there only because this slot was taken.
        at = self.next(at);
        while let Some(entry) = self.slots.get_mut(at).and_then(Option::take) {
            self.put(entry);
            at = self.next(at);
        }
    }

    fn put(&mut self, entry: (u32, PoolNumber)) {
        let mut at = self.home(entry.0);
        while self.slots.get(at).is_some_and(Option::is_some) {
            at = self.next(at);
        }
        if let Some(slot) = self.slots.get_mut(at) {
            *slot = Some(entry);
        }
    }

    fn home(&self, hash: u32) -> usize {
        usize::try_from(hash).unwrap_or(0) & self.slots.len().saturating_sub(1)
    }

    fn next(&self, at: usize) -> usize {
        (at + 1) & self.slots.len().saturating_sub(1)
    }
}

pub(super) fn hash(key: &PoolKey) -> u32 {
    let mut hasher = DefaultHasher::new();
    hasher.write(key.tenant.as_str().as_bytes());
    // No name has it.
    hasher.write_u8(b'/');
    hasher.write(key.pool.as_str().as_bytes());
    u32::try_from(hasher.finish() >> 32).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::slab::Number as _;
    use super::*;

    /// Also when their hashes meet in one slot, or are the same.
    #[test]
    fn names_are_found_until_they_are_removed() {
        let mut names = PoolNames::default();
        let hashes: Vec<u32> = (0..300).map(|at| if at % 3 == 0 { 1023 } else { at * at / 7 }).collect();
        let number = |at: usize| PoolNumber::of(at);
        let find = |names: &PoolNames, at: usize| names.find(hashes[at], |found| found == number(at));
        for (at, hash) in hashes.iter().enumerate() {
            assert_eq!(find(&names, at), None);
            names.insert(*hash, number(at));
        }
        for gone in (0..300).rev().step_by(2) {
            names.remove(hashes[gone], number(gone));
            names.remove(hashes[gone], number(gone));
            for at in 0..300 {
                let is_there = at % 2 == 0 || at < gone;
                assert_eq!(find(&names, at), is_there.then(|| number(at)), "{at} without {gone}");
            }
        }
    }
}
