//! The changes that turn what was found into what should be.
//!
//! A table that can stay is changed in place: its chains keep their hooks, and with one step of the kernel's generation
//! each goes from its old rules to its new ones. Were the table deleted and made anew in the same batch, a packet could
//! pass the new chain before that step, while it has no rules yet, and the old chain after it, when it has none any
//! more. Only a table whose base chains hang elsewhere has to go. Sets that are made as they should be keep what their
//! elements counted.

use std::collections::BTreeSet;

use super::changes::{Changes, OBJECT_COUNTER};
use super::dump::{Found, FoundSet};
use super::elements;
use super::inspection::FoundTables;
use super::ruleset::{Element, Placed, SetKind, Table};

/// How far a repair goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Depth {
    InPlace,
    /// For what in-place changes do not reach, as a flowtable in our table or an owner's flag.
    Anew,
}

pub(super) fn changes(found: &FoundTables, wanted: &BTreeSet<Placed>, depth: Depth) -> Changes {
    let mut changes = Changes::new();
    for table in elements::tables() {
        let found = found.get(&table.family).and_then(Option::as_ref);
        match found.filter(|found| depth == Depth::InPlace && can_stay(&table, found)) {
            Some(found) => in_place(&mut changes, &table, found, wanted),
            None => anew(&mut changes, &table, wanted),
        }
    }
    changes
}

fn can_stay(table: &Table, found: &Found) -> bool {
    let same_place = |name: &str, base: Option<&super::ruleset::Base>| {
        let ours = table.chains.iter().find(|chain| chain.name == name);
        ours.is_none_or(|ours| match (&ours.base, base) {
            (None, None) => true,
            (Some(ours), Some(found)) => {
                (ours.kind, ours.hook, ours.priority) == (found.kind, found.hook, found.priority)
            }
            _ => false,
        })
    };
    found.flags == 0 && found.chains.iter().all(|chain| same_place(&chain.name, chain.base.as_ref()))
}

fn anew(changes: &mut Changes, table: &Table, wanted: &BTreeSet<Placed>) {
    let family = table.family;
    // Made first, so that there is one to delete.
    changes.add_table(family);
    changes.delete_table(family);
    changes.add_table(family);
    fill(changes, table, &Found::default(), &[], wanted);
}

fn in_place(changes: &mut Changes, table: &Table, found: &Found, wanted: &BTreeSet<Placed>) {
    let family = table.family;
    changes.delete_rules(family);
    let mut kept = Vec::new();
    for other in &found.sets {
        let wanted = elements_of(table, &other.set.name, wanted);
        if can_keep(table, other, &wanted) {
            let place = (family, other.set.name.as_str());
            changes
                .delete_elements_of(place, other.elements.keys().filter(|element| !wanted.contains(element)));
            kept.push(other);
        } else {
            changes.delete_set(family, &other.set.name);
        }
    }
    for chain in &found.chains {
        if table.chains.iter().all(|ours| ours.name != chain.name) {
            changes.delete_chain(family, &chain.name);
        }
    }
    for (kind, name) in found.objects.keys() {
        if *kind != OBJECT_COUNTER || !table.counters.contains(name) {
            changes.delete_counter(family, name, *kind);
        }
    }
    fill(changes, table, found, &kept, wanted);
}

/// Adds what is missing, and all rules.
fn fill(changes: &mut Changes, table: &Table, found: &Found, kept: &[&FoundSet], wanted: &BTreeSet<Placed>) {
    let family = table.family;
    for chain in &table.chains {
        if !found.chains.iter().any(|found| found.name == chain.name && found.base == chain.base) {
            changes.add_chain(family, chain);
        }
    }
    for counter in &table.counters {
        if !found.objects.contains_key(&(OBJECT_COUNTER, counter.clone())) {
            changes.add_counter(family, counter);
        }
    }
    for set in &table.sets {
        if kept.iter().all(|kept| kept.set.name != set.name) {
            changes.add_set(family, set);
        }
    }
    let is_there = |placed: &Placed| {
        kept.iter().any(|kept| kept.set.name == placed.set && kept.elements.contains_key(&placed.element))
    };
    changes.add_elements(wanted.iter().filter(|placed| placed.family == family && !is_there(placed)));
    for chain in &table.chains {
        changes.add_rules(family, chain);
    }
}

fn elements_of<'a>(table: &Table, set: &str, wanted: &'a BTreeSet<Placed>) -> BTreeSet<&'a Element> {
    let of_set = wanted.iter().filter(|placed| placed.family == table.family && placed.set == set);
    of_set.map(|placed| &placed.element).collect()
}

fn can_keep(table: &Table, found: &FoundSet, wanted: &BTreeSet<&Element>) -> bool {
    let as_it_should_be = table.sets.contains(&found.set);
    // Ranges never change, and can't.
    let same = || found.elements.keys().eq(wanted.iter().copied());
    as_it_should_be && (found.set.kind != SetKind::Ranges || same())
}
