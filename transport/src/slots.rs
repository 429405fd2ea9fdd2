//! Connection slots: a bounded number in all, and per key, which is an address or an identity.
//!
//! Bookkeeping only, under one short lock. When no slot is free, a newcomer may evict another connection: the longest
//! idle one of its own key, or one of a key that holds more slots than its own. So a peer that hoards slots loses them
//! and cannot lock others out. A [`Slot`] is freed on drop, however its connection ended.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::oneshot;

/// How many slots there are, and which of them a newcomer may evict.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub most: usize,
    pub most_per_key: usize,
    pub evict: Evict,
}

/// Which slots a newcomer may take from others. Idle ones go first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evict {
    Idle,
    /// Also busy ones of a key that holds more slots than the newcomer's.
    BusyOfOthers,
    /// Also busy ones of its own key.
    Busy,
}

/// Why there is no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    #[error("this peer has reached its connection limit, and none of its connections is idle")]
    Key,
    #[error("the server has reached its connection limit")]
    Whole,
}

/// The slots of one kind.
#[derive(Debug)]
pub struct Slots<K> {
    shared: Arc<Shared<K>>,
}

/// One taken slot.
#[derive(Debug)]
pub struct Slot<K: Eq + Hash + Clone> {
    activity: Activity<K>,
    evicted: oneshot::Receiver<()>,
    is_evicted: bool,
}

/// Says when a slot is in use. Cheap to clone; keeps no slot.
#[derive(Debug)]
pub struct Activity<K> {
    shared: Arc<Shared<K>>,
    key: K,
    id: u64,
}

/// A request on a slot's connection: while there is one, the slot is not idle.
#[derive(Debug)]
pub struct Busy<K: Eq + Hash + Clone>(Activity<K>);

#[derive(Debug)]
struct Shared<K> {
    rules: Rules,
    table: Mutex<Table<K>>,
}

#[derive(Debug)]
struct Table<K> {
    /// Counts what happens here: ids and idle slots are ordered by it.
    ticks: u64,
    taken: usize,
    /// Each key's slots, oldest first.
    groups: HashMap<K, Vec<Member>>,
}

#[derive(Debug)]
struct Member {
    id: u64,
    open: usize,
    idle_since: u64,
    /// Dropped to tell the holder that its slot is gone.
    _held: oneshot::Sender<()>,
}

impl<K: Eq + Hash + Clone> Slots<K> {
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        let table = Table { ticks: 0, taken: 0, groups: HashMap::new() };
        Self { shared: Arc::new(Shared { rules, table: Mutex::new(table) }) }
    }

    /// Takes a slot for `key`, idle at first.
    pub fn take(&self, key: K) -> Result<Slot<K>, Full> {
        self.take_with(key, 0)
    }

    /// Takes a slot for `key` that is busy for as long as it is held.
    pub fn take_busy(&self, key: K) -> Result<Slot<K>, Full> {
        self.take_with(key, 1)
    }

    fn take_with(&self, key: K, open: usize) -> Result<Slot<K>, Full> {
        let mut table = self.shared.lock();
        if let Some((key, id)) = table.to_evict(&key, &self.shared.rules)? {
            table.remove(&key, id);
        }
        let id = table.tick();
        let (held, evicted) = oneshot::channel();
        let member = Member { id, open, idle_since: id, _held: held };
        table.groups.entry(key.clone()).or_default().push(member);
        table.taken += 1;
        drop(table);
        let activity = Activity { shared: Arc::clone(&self.shared), key, id };
        Ok(Slot { activity, evicted, is_evicted: false })
    }

    /// How many slots are taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.shared.lock().taken
    }

    /// Whether none is left without evicting another.
    #[must_use]
    pub fn are_full(&self) -> bool {
        self.taken() >= self.shared.rules.most
    }
}

impl<K> Shared<K> {
    fn lock(&self) -> MutexGuard<'_, Table<K>> {
        // The table is changed in steps that can't panic, so a poisoned lock still guards a whole one.
        self.table.lock()
    }
}

impl<K: Eq + Hash + Clone> Table<K> {
    fn tick(&mut self) -> u64 {
        self.ticks += 1;
        self.ticks
    }

    /// Which slot has to go for one more of `key`; none while there is room.
    fn to_evict(&self, key: &K, rules: &Rules) -> Result<Option<(K, u64)>, Full> {
        let own = self.groups.get(key).map_or(&[][..], Vec::as_slice);
        let oldest_own = own.first().filter(|_| rules.evict == Evict::Busy).map(|member| member.id);
        let own_victim = longest_idle(own).or(oldest_own).map(|id| (key.clone(), id));
        if own.len() >= rules.most_per_key {
            return own_victim.map(Some).ok_or(Full::Key);
        }
        if self.taken < rules.most {
            return Ok(None);
        }
        let hoarders = self.groups.iter().filter(|(_, group)| group.len() > own.len());
        let victims = hoarders.filter_map(|(key, group)| {
            let oldest = group.first().filter(|_| rules.evict != Evict::Idle).map(|member| member.id);
            let idle = longest_idle(group);
            Some((group.len(), idle.is_some(), Reverse(idle.or(oldest)?), key))
        });
        let victim = victims.max_by_key(|(slots, is_idle, id, _)| (*slots, *is_idle, *id));
        victim.map(|(.., Reverse(id), key)| (key.clone(), id)).or(own_victim).map(Some).ok_or(Full::Whole)
    }

    fn member(&mut self, key: &K, id: u64) -> Option<&mut Member> {
        let group = self.groups.get_mut(key)?;
        let index = group.binary_search_by_key(&id, |member| member.id).ok()?;
        group.get_mut(index)
    }

    fn remove(&mut self, key: &K, id: u64) {
        let Some(group) = self.groups.get_mut(key) else { return };
        let Ok(index) = group.binary_search_by_key(&id, |member| member.id) else { return };
        group.remove(index);
        self.taken -= 1;
        if group.is_empty() {
            self.groups.remove(key);
        }
    }
}

/// The network that an address is counted for: IPv4 as it is, IPv6 by its /64, which is what one subscriber or host is given.
#[must_use]
pub fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(v4) => IpAddr::V4(v4),
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
    }
}

fn longest_idle(group: &[Member]) -> Option<u64> {
    let idle = group.iter().filter(|member| member.open == 0);
    idle.min_by_key(|member| member.idle_since).map(|member| member.id)
}

impl<K: Eq + Hash + Clone> Slot<K> {
    /// Waits until a newcomer has taken this slot. What holds it is to end its connection then.
    pub async fn evicted(&mut self) {
        std::future::poll_fn(|cx| self.poll_evicted(cx)).await;
    }

    /// As [`Slot::evicted`].
    pub fn poll_evicted(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.is_evicted {
            self.is_evicted = Pin::new(&mut self.evicted).poll(cx).is_ready();
        }
        if self.is_evicted { Poll::Ready(()) } else { Poll::Pending }
    }

    /// For those that work on this slot's connection.
    #[must_use]
    pub fn activity(&self) -> Activity<K> {
        self.activity.clone()
    }
}

impl<K: Eq + Hash + Clone> Drop for Slot<K> {
    fn drop(&mut self) {
        self.activity.shared.lock().remove(&self.activity.key, self.activity.id);
    }
}

impl<K: Eq + Hash + Clone> Activity<K> {
    /// Marks the slot as busy until the answer is dropped; `None` when it was evicted before.
    #[must_use]
    pub fn begin(&self) -> Option<Busy<K>> {
        self.shared.lock().member(&self.key, self.id)?.open += 1;
        Some(Busy(self.clone()))
    }
}

impl<K: Clone> Clone for Activity<K> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), key: self.key.clone(), id: self.id }
    }
}

impl<K: Eq + Hash + Clone> Drop for Busy<K> {
    fn drop(&mut self) {
        let mut table = self.0.shared.lock();
        let now = table.tick();
        if let Some(member) = table.member(&self.0.key, self.0.id) {
            member.open -= 1;
            member.idle_since = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(most: usize, most_per_key: usize) -> Slots<&'static str> {
        Slots::new(Rules { most, most_per_key, evict: Evict::Idle })
    }

    fn is_evicted(slot: &mut Slot<&'static str>) -> bool {
        slot.poll_evicted(&mut Context::from_waker(std::task::Waker::noop())).is_ready()
    }

    #[test]
    fn a_dropped_place_leaves_no_trace() {
        let slots = slots(2, 2);
        let busy = slots.take("a").expect("room").activity();
        assert!(busy.begin().is_none(), "its slot is gone");
        let slot = slots.take("a").expect("room");
        let request = slot.activity().begin();
        drop(slot);
        drop(request);
        assert_eq!(slots.taken(), 0);
        assert!(slots.shared.lock().groups.is_empty());
    }

    #[test]
    fn the_longest_idle_place_of_a_full_key_gives_way() {
        let slots = slots(9, 3);
        let mut held: Vec<_> = (0..3).map(|_| slots.take("a").expect("room")).collect();
        let _working = held[0].activity().begin().expect("its slot");
        // Idle again, and so idle for less time than the third.
        drop(held[1].activity().begin());
        held.push(slots.take("a").expect("the third gives way"));
        let evicted: Vec<_> = held.iter_mut().map(is_evicted).collect();
        assert_eq!(evicted, [false, false, true, false]);
        assert!(held[2].activity().begin().is_none(), "a evicted slot begins nothing");
        assert_eq!(slots.taken(), 3);
    }

    #[test]
    fn a_full_key_whose_places_are_all_busy_gets_no_more() {
        let slots = slots(9, 1);
        let _held = slots.take_busy("a").expect("room");
        assert_eq!(slots.take("a").expect_err("full"), Full::Key);
        assert!(slots.take("b").is_ok());
    }

    #[test]
    fn a_newcomer_displaces_one_of_the_key_that_holds_most() {
        let slots = slots(5, 4);
        let mut many: Vec<_> = (0..3).map(|_| slots.take("many").expect("room")).collect();
        let mut few: Vec<_> = (0..2).map(|_| slots.take("few").expect("room")).collect();
        let _newcomer = slots.take("new").expect("one of many gives way");
        assert_eq!(many.iter_mut().map(is_evicted).collect::<Vec<_>>(), [true, false, false]);
        assert!(!few.iter_mut().any(is_evicted));
    }

    #[test]
    fn among_keys_that_hold_as_much_an_idle_place_goes_before_a_busy_one() {
        let slots = Slots::new(Rules { most: 3, most_per_key: 2, evict: Evict::Busy });
        let mut busy = slots.take_busy("busy").expect("room");
        let mut idle = [slots.take("one").expect("room"), slots.take("two").expect("room")];
        let _newcomer = slots.take("new").expect("the older idle one gives way");
        assert!(!is_evicted(&mut busy));
        assert_eq!(idle.each_mut().map(is_evicted), [true, false]);
    }

    #[test]
    fn one_slash_64_is_one_network_and_mapped_ipv4_is_ipv4() {
        let network = |text: &str| network_of(text.parse().expect("an address"));
        assert_eq!(network("2001:db8:1:2:3::4"), network("2001:db8:1:2:ffff::"));
        assert_ne!(network("2001:db8:1:2::"), network("2001:db8:1:3::"));
        assert_eq!(network("::ffff:10.0.0.1"), IpAddr::from([10, 0, 0, 1]));
        assert_ne!(network("192.0.2.1"), network("192.0.2.2"));
    }

    #[test]
    fn a_key_that_holds_most_evicts_only_its_own() {
        let slots = slots(3, 3);
        let mut one = slots.take("one").expect("room");
        let mut many = [slots.take("many").expect("room"), slots.take("many").expect("room")];
        let _more = slots.take("many").expect("its own oldest gives way");
        assert!(!is_evicted(&mut one) && is_evicted(&mut many[0]));
    }

    #[test]
    fn busy_slots_are_evicted_for_other_keys_only_where_the_rules_say_so() {
        for evicted in [Evict::Idle, Evict::BusyOfOthers, Evict::Busy] {
            let slots = Slots::new(Rules { most: 2, most_per_key: 2, evict: evicted });
            let mut held = [slots.take_busy("a").expect("room"), slots.take_busy("a").expect("room")];
            let newcomer = slots.take("b");
            let is_idle_only = evicted == Evict::Idle;
            assert_eq!(newcomer.as_ref().err(), is_idle_only.then_some(&Full::Whole));
            assert_eq!(held.iter_mut().map(is_evicted).collect::<Vec<_>>(), [!is_idle_only, false]);
            assert_eq!(slots.taken(), 2);
        }
    }

    #[test]
    fn busy_slots_are_evicted_for_their_own_key_only_where_the_rules_say_so() {
        for evicted in [Evict::Idle, Evict::BusyOfOthers, Evict::Busy] {
            let slots = Slots::new(Rules { most: 9, most_per_key: 2, evict: evicted });
            let mut held = [slots.take_busy("a").expect("room"), slots.take_busy("a").expect("room")];
            let may = evicted == Evict::Busy;
            assert_eq!(slots.take("a").err(), (!may).then_some(Full::Key));
            assert_eq!(held.iter_mut().map(is_evicted).collect::<Vec<_>>(), [may, false]);
        }
    }
}
