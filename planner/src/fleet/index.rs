//! The nodes that take something new, best first, in classes of equal labels and taints.
//!
//! A pool looks at each class once, and inside a class at the best nodes only. Nodes stand there in the order of their names,
//! each with its score: which is best is kept by [`Tops`], and what changes on a node changes a few keys in place.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use mvm_proto::Digest;
use mvm_proto::placement::{Labels, Taint};

use super::numbers::Numbers;
use super::slab::{ClassNumber, NodeNumber, RankingNumber, Slab};
use super::tops::Tops;
use crate::usage::Usage;

/// What all nodes of a class have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ClassKey {
    pub(super) labels: Labels,
    pub(super) taints: BTreeSet<Taint>,
}

#[derive(Debug, Clone)]
pub(super) struct Class {
    pub(super) key: ClassKey,
    /// Of all its nodes.
    pub(super) ranking: RankingNumber,
    /// What is free on each node, at its position in the ranking: tells whether the class has room for anything at all.
    free_vcpus: Tops<u64>,
    free_mem: Tops<u64>,
}

/// Nodes in the order of their names, and their scores. Those that take nothing new have none.
#[derive(Debug, Clone, Default)]
pub(super) struct Ranking {
    nodes: Vec<NodeNumber>,
    /// One more than the score.
    scores: Tops<u32>,
}

/// The best node of a part of a ranking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ranked {
    pub(super) score: u32,
    pub(super) node: NodeNumber,
    pub(super) position: usize,
}

/// Where the index has one node.
#[derive(Debug, Clone)]
pub(super) struct Listed {
    class: ClassNumber,
    /// The ranking of its class first, then those of its images. Each with the node's position when that was last looked
    /// for: it is another one after a node joined or left.
    rankings: Vec<(RankingNumber, usize)>,
}

/// What the index has to know of a node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Standing {
    /// None: it takes nothing new.
    pub(super) score: Option<u32>,
    pub(super) free_vcpus: u64,
    pub(super) free_mem: u64,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Index {
    classes: Slab<ClassNumber, Class>,
    rankings: Slab<RankingNumber, Ranking>,
    by_key: BTreeMap<ClassKey, ClassNumber>,
    by_image: BTreeMap<Digest, BTreeMap<ClassNumber, RankingNumber>>,
}

impl Class {
    /// Whether some node may have room for this; not whether one has.
    pub(super) fn may_fit(&self, need: &Usage) -> bool {
        let most = |free: &Tops<u64>| free.top().map_or(0, |(free, _)| free);
        need.vcpus <= most(&self.free_vcpus) && need.mem_mib <= most(&self.free_mem)
    }
}

impl Ranking {
    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The best node; of equal ones the first by name.
    pub(super) fn top(&self) -> Option<Ranked> {
        self.ranked(self.scores.top()?)
    }

    /// The best node at these positions.
    pub(super) fn best(&self, positions: Range<usize>) -> Option<Ranked> {
        self.ranked(self.scores.best(positions)?)
    }

    /// The nodes that take something new.
    pub(super) fn open(&self) -> impl Iterator<Item = NodeNumber> {
        self.nodes.iter().enumerate().filter(|(at, _)| self.scores.get(*at) > 0).map(|(_, node)| *node)
    }

    fn ranked(&self, (key, position): (u32, usize)) -> Option<Ranked> {
        Some(Ranked { score: key.checked_sub(1)?, node: *self.nodes.get(position)?, position })
    }

    /// Where a node is, or would be.
    fn position(&self, node: NodeNumber, last: usize, numbers: &Numbers) -> usize {
        if self.nodes.get(last) == Some(&node) {
            return last;
        }
        let place = numbers.place(node);
        self.nodes.partition_point(|other| numbers.place(*other) < place)
    }
}

impl Index {
    pub(super) fn classes(&self) -> impl Iterator<Item = (ClassNumber, &Class)> {
        self.classes.iter()
    }

    pub(super) fn ranking(&self, number: RankingNumber) -> Option<&Ranking> {
        self.rankings.get(number)
    }

    /// The nodes that have an image, by class.
    pub(super) fn with_image(&self, image: &Digest) -> Option<&BTreeMap<ClassNumber, RankingNumber>> {
        self.by_image.get(image)
    }

    pub(super) fn class_of(&self, listed: &Listed) -> Option<&ClassKey> {
        self.classes.get(listed.class).map(|class| &class.key)
    }

    /// Takes in a node, which takes nothing new until [`Index::update`] says so.
    pub(super) fn join(
        &mut self,
        node: NodeNumber,
        key: ClassKey,
        images: &BTreeSet<Digest>,
        numbers: &Numbers,
    ) -> Listed {
        let class = match self.by_key.get(&key) {
            Some(class) => *class,
            None => {
                let ranking = self.rankings.insert(Ranking::default());
                let (free_vcpus, free_mem) = (Tops::default(), Tops::default());
                let class = self.classes.insert(Class { key: key.clone(), ranking, free_vcpus, free_mem });
                self.by_key.insert(key, class);
                class
            }
        };
        let of_class = self.classes.get(class).map(|class| class.ranking);
        let mut rankings: Vec<RankingNumber> = of_class.into_iter().collect();
        for image in images {
            let of_image = self.by_image.entry(*image).or_default().entry(class);
            rankings.push(*of_image.or_insert_with(|| self.rankings.insert(Ranking::default())));
        }
        let listed = rankings.into_iter().map(|number| {
            let Some(ranking) = self.rankings.get_mut(number) else { return (number, 0) };
            let at = ranking.position(node, usize::MAX, numbers);
            ranking.nodes.insert(at, node);
            ranking.scores.insert(at, 0);
            (number, at)
        });
        let listed = Listed { class, rankings: listed.collect() };
        if let (Some(class), Some((_, at))) = (self.classes.get_mut(class), listed.rankings.first()) {
            class.free_vcpus.insert(*at, 0);
            class.free_mem.insert(*at, 0);
        }
        listed
    }

    /// Takes out a node that had these images.
    pub(super) fn leave(
        &mut self,
        node: NodeNumber,
        listed: &Listed,
        images: &BTreeSet<Digest>,
        numbers: &Numbers,
    ) {
        let mut left = listed.rankings.iter().filter_map(|(number, last)| {
            let ranking = self.rankings.get_mut(*number)?;
            let at = ranking.position(node, *last, numbers);
            ranking.nodes.remove(at);
            ranking.scores.remove(at);
            let is_empty = ranking.nodes.is_empty();
            if is_empty {
                self.rankings.remove(*number);
            }
            Some((at, is_empty))
        });
        let Some((at, is_class_empty)) = left.next() else { return };
        for (image, (_, is_empty)) in images.iter().zip(left) {
            if let Some(by_class) = self.by_image.get_mut(image).filter(|_| is_empty) {
                by_class.remove(&listed.class);
                if by_class.is_empty() {
                    self.by_image.remove(image);
                }
            }
        }
        if is_class_empty {
            if let Some(class) = self.classes.remove(listed.class) {
                self.by_key.remove(&class.key);
            }
        } else if let Some(class) = self.classes.get_mut(listed.class) {
            class.free_vcpus.remove(at);
            class.free_mem.remove(at);
        }
    }

    /// A node stands like this now.
    pub(super) fn update(
        &mut self,
        node: NodeNumber,
        listed: &mut Listed,
        standing: &Standing,
        numbers: &Numbers,
    ) {
        let key = standing.score.map_or(0, |score| score + 1);
        for (number, last) in &mut listed.rankings {
            let Some(ranking) = self.rankings.get_mut(*number) else { continue };
            *last = ranking.position(node, *last, numbers);
            ranking.scores.set(*last, key);
        }
        let of_class = self.classes.get_mut(listed.class);
        if let (Some(class), Some((_, at))) = (of_class, listed.rankings.first()) {
            let free = |free: u64| if standing.score.is_some() { free } else { 0 };
            class.free_vcpus.set(*at, free(standing.free_vcpus));
            class.free_mem.set(*at, free(standing.free_mem));
        }
    }
}
