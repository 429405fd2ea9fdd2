//! What becomes of each instance of a node that is being drained.
//!
//! The node is cordoned: nothing new comes, and what is placed there stays until [`drain`] finds it another place, one after
//! the other. What sleeps, and what has a disk of its own, is moved with its memory and its disk; of everything else another
//! one is started elsewhere before this one goes. At most [`MOVES_PER_NODE`] are under way from or to a node at a time. What
//! can't go now, or not at all, is told with its reason.

use std::collections::{BTreeMap, BTreeSet};

use mvm_proto::document::DesiredCounts;
use mvm_proto::{InstanceId, NodeId, Phase};

use super::PoolKey;
use super::placer::Placer;
use super::state::{PHASES, count, count_mut};

/// Moves under way from or to one node: each reads or writes a disk and crosses the network, and others want those too.
pub const MOVES_PER_NODE: usize = 4;

/// What snapshots made on a node need of the node that restores them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Platform {
    pub driver: String,
    pub accelerator: String,
    pub arch: String,
    /// These two count where guests run on the processor itself.
    pub kernel: String,
    pub cpu: String,
    /// Why nothing can be moved from or to it at all; empty: it can.
    pub lacking: String,
}

impl Platform {
    /// Why a snapshot that was made here can't go on there.
    fn misfit(&self, there: &Self) -> Option<String> {
        if !there.lacking.is_empty() {
            return Some(there.lacking.clone());
        }
        let bare = self.accelerator == "kvm";
        let pairs = [
            ("driver", &self.driver, &there.driver, true),
            ("accelerator", &self.accelerator, &there.accelerator, true),
            ("architecture", &self.arch, &there.arch, true),
            ("processor", &self.cpu, &there.cpu, bare),
            ("kernel", &self.kernel, &there.kernel, bare),
        ];
        let other = pairs.into_iter().find(|(_, ours, theirs, counts)| *counts && ours != theirs)?;
        let (what, ours, theirs, _) = other;
        Some(format!("another {what}: {theirs} instead of {ours}"))
    }
}

/// An instance of the node, as it tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resident {
    pub key: PoolKey,
    pub id: InstanceId,
    pub phase: Phase,
    /// A disk of its own.
    pub has_disk: bool,
    pub claimed: bool,
    /// Left alone after an action by hand, until then; empty: it is not.
    pub held_until: String,
    /// Its move is under way.
    pub is_moving: bool,
}

/// What of a pool's policies says how its instances may be treated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Manners {
    pub pinned: bool,
    pub critical: bool,
}

/// What is known of nodes beside what is placed on them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Surroundings {
    pub platforms: BTreeMap<NodeId, Platform>,
    /// Moves under way, counted at both ends.
    pub under_way: BTreeMap<NodeId, usize>,
    pub manners: BTreeMap<PoolKey, Manners>,
    /// Nodes that refused an instance lately, with the reason.
    pub refused: BTreeMap<InstanceId, BTreeMap<NodeId, Refused>>,
    /// Nodes where a replacement of a pool's instance did not come up lately.
    pub failed: BTreeMap<PoolKey, BTreeMap<NodeId, Refused>>,
}

/// Why a node did not take what was to go there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub reason: String,
    /// Trying again does not change it.
    pub lasting: bool,
}

/// How a place changes its node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// The instance itself goes, with its memory and its disk.
    Move(InstanceId),
    /// Another one is started there first.
    Replace,
    /// Nothing has the place yet.
    Hand,
}

/// One place of a pool's counts that goes to another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Begun {
    pub key: PoolKey,
    pub phase: Phase,
    pub to: NodeId,
    pub way: Way,
}

/// Whether it goes by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Remains {
    /// When what is in the way ends.
    Waits,
    /// Not before something is done about it.
    Stays,
}

/// What does not go now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    pub key: PoolKey,
    /// None of places whose instances are all alike.
    pub instance: Option<InstanceId>,
    pub count: u32,
    pub remains: Remains,
    pub reason: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DrainPlan {
    pub begin: Vec<Begun>,
    pub left: Vec<Left>,
}

/// Decides for all that is on a node but the pools that are left for later, and takes what goes to its new place in `placer`.
#[must_use]
pub fn drain(
    placer: &mut Placer,
    node: &NodeId,
    residents: &[Resident],
    surroundings: &Surroundings,
    is_left: &dyn Fn(&PoolKey) -> bool,
) -> DrainPlan {
    let counts = placer.counts_on(node);
    let keys: BTreeSet<&PoolKey> = counts.keys().chain(residents.iter().map(|one| &one.key)).collect();
    let under_way = surroundings.under_way.clone();
    let mut draining = Draining { placer, node, surroundings, under_way, plan: DrainPlan::default() };
    for key in keys.into_iter().filter(|key| !is_left(key)) {
        let mut members: Vec<&Resident> = residents.iter().filter(|one| one.key == *key).collect();
        // What sleeps is soonest gone.
        members.sort_by_key(|one| (one.phase != Phase::Sleeping, one.phase != Phase::Warm, one.id.clone()));
        draining.pool(key, counts.get(key).copied().unwrap_or_default(), &members);
    }
    draining.plan
}

struct Draining<'a> {
    placer: &'a mut Placer,
    node: &'a NodeId,
    surroundings: &'a Surroundings,
    under_way: BTreeMap<NodeId, usize>,
    plan: DrainPlan,
}

impl Draining<'_> {
    fn pool(&mut self, key: &PoolKey, mut places: DesiredCounts, members: &[&Resident]) {
        let manners = self.surroundings.manners.get(key).copied().unwrap_or_default();
        for one in members.iter().filter(|one| !one.is_moving) {
            let rests = matches!(one.phase, Phase::Running | Phase::Warm | Phase::Sleeping);
            let moves = one.phase == Phase::Sleeping || (rests && one.has_disk);
            if !rests {
                if one.has_disk {
                    let reason = format!(
                        "it is {} and has a disk: start it (`mvm instance start`) and it is moved, or destroy it",
                        one.phase
                    );
                    self.left(key, Some(&one.id), 1, Remains::Stays, reason);
                }
                continue;
            }
            if one.claimed {
                // In no count, so no place goes with it.
                let reason = "it is claimed: waits until its claim ends".to_owned();
                self.left(key, Some(&one.id), 1, Remains::Waits, reason);
                continue;
            }
            let alone = self.leaves_alone(one, moves, manners);
            if !moves && alone.is_none() {
                continue;
            }
            // The place that it has, or if it has none of its own phase, as one that was woken for a request, another.
            let phases = [one.phase, Phase::Sleeping, Phase::Warm, Phase::Running];
            let place = phases.into_iter().find(|phase| count(&places, *phase) > 0);
            if let Some(phase) = place {
                *count_mut(&mut places, phase) -= 1;
            }
            match (alone, place) {
                (Some((remains, reason)), _) => self.left(key, Some(&one.id), 1, remains, reason),
                (None, None) => {
                    let reason = "no count wants it: its node lets go of it".to_owned();
                    self.left(key, Some(&one.id), 1, Remains::Waits, reason);
                }
                (None, Some(phase)) => self.go(key, phase, Way::Move(one.id.clone())),
            }
        }
        let sleepers = members.iter().any(|one| one.phase == Phase::Sleeping);
        for phase in PHASES {
            let way = if phase == Phase::Sleeping { Way::Hand } else { Way::Replace };
            for taken in 0..count(&places, phase) {
                if phase == Phase::Sleeping && sleepers {
                    // One that is on its way to sleep may have the place: it is moved once it does.
                    let reason = "waits until those that sleep have gone".to_owned();
                    self.left(key, None, count(&places, phase), Remains::Waits, reason);
                    break;
                }
                let before = self.plan.begin.len();
                self.go(key, phase, way.clone());
                if self.plan.begin.len() == before {
                    // All others are like this one.
                    if let Some(left) = self.plan.left.last_mut() {
                        left.count = count(&places, phase) - taken;
                    }
                    break;
                }
            }
        }
    }

    /// Why an instance is left alone.
    fn leaves_alone(&self, one: &Resident, moves: bool, manners: Manners) -> Option<(Remains, String)> {
        let awake = one.phase != Phase::Sleeping;
        if !one.held_until.is_empty() {
            let reason = format!("it was acted on by hand and is left alone until {}", one.held_until);
            return Some((Remains::Waits, reason));
        }
        if awake && manners.critical {
            let reason = "its pool is critical: put it to sleep (`mvm instance sleep`) and it is moved";
            return Some((Remains::Stays, reason.to_owned()));
        }
        if awake && moves && manners.pinned {
            let reason = "its pool is pinned, so it is not put to sleep by itself: put it to sleep \
                          (`mvm instance sleep`) and it is moved";
            return Some((Remains::Stays, reason.to_owned()));
        }
        let platform = self.surroundings.platforms.get(self.node);
        match platform {
            _ if !moves => None,
            None => Some((Remains::Waits, "its node has not said what it runs instances with".to_owned())),
            Some(platform) if !platform.lacking.is_empty() => {
                let reason =
                    format!("it can't be moved: {}; stop and destroy it to have another", platform.lacking);
                Some((Remains::Stays, reason))
            }
            Some(_) => None,
        }
    }

    fn go(&mut self, key: &PoolKey, phase: Phase, way: Way) {
        let instance = if let Way::Move(id) = &way { Some(id.clone()) } else { None };
        let busy = |under_way: &BTreeMap<NodeId, usize>, node: &NodeId| {
            under_way.get(node).copied().unwrap_or(0) >= MOVES_PER_NODE
        };
        if busy(&self.under_way, self.node) {
            let reason = format!("waits for its turn: {MOVES_PER_NODE} at a time leave a node");
            return self.left(key, instance.as_ref(), 1, Remains::Waits, reason);
        }
        let (under_way, surroundings, node) = (&self.under_way, self.surroundings, self.node);
        let here = surroundings.platforms.get(node);
        // Whether something is in the way that passes.
        let passing = std::cell::Cell::new(false);
        let suits = |to: &NodeId| {
            let lately = match &way {
                Way::Move(id) => surroundings.refused.get(id).and_then(|nodes| nodes.get(to)),
                Way::Replace | Way::Hand => surroundings.failed.get(key).and_then(|nodes| nodes.get(to)),
            };
            if let Some(Refused { reason, lasting }) = lately {
                passing.set(passing.get() || !lasting);
                return Err(reason.clone());
            }
            if let (Way::Move(_), Some(here)) = (&way, here) {
                // A node that has just started is still finding out.
                let Some(there) =
                    surroundings.platforms.get(to).filter(|there| !there.accelerator.is_empty())
                else {
                    passing.set(true);
                    return Err("it has not said yet what it runs instances with".to_owned());
                };
                if let Some(misfit) = here.misfit(there) {
                    return Err(misfit);
                }
            }
            if busy(under_way, to) {
                passing.set(true);
                return Err(format!("{MOVES_PER_NODE} at a time come to a node"));
            }
            Ok(())
        };
        let shifted = self.placer.shift(key, phase, node, suits);
        match shifted {
            Ok(to) => {
                for end in [node, &to] {
                    *self.under_way.entry(end.clone()).or_default() += 1;
                }
                self.plan.begin.push(Begun { key: key.clone(), phase, to, way });
            }
            Err(reason) => {
                let remains = if passing.get() { Remains::Waits } else { Remains::Stays };
                self.left(key, instance.as_ref(), 1, remains, format!("no node takes it: {reason}"));
            }
        }
    }

    fn left(
        &mut self,
        key: &PoolKey,
        instance: Option<&InstanceId>,
        count: u32,
        remains: Remains,
        reason: String,
    ) {
        self.plan.left.push(Left { key: key.clone(), instance: instance.cloned(), count, remains, reason });
    }
}
