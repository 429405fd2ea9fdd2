//! The rule set as data: what every chain must have, whatever else it says.

use std::collections::BTreeSet;

use super::elements;
use super::ruleset::{Expr, Verdict};

#[test]
fn every_chain_that_is_gone_to_ends_in_a_verdict() {
    for table in elements::tables() {
        for chain in table.chains.iter().filter(|chain| chain.base.is_none()) {
            let last = chain.rules.last().and_then(|rule| rule.last());
            assert!(matches!(last, Some(Expr::Verdict(_))), "{} of {:?}", chain.name, table.family);
            let first_steps = chain.rules.last().map_or(0, Vec::len);
            assert!(first_steps <= 2, "{} ends in a condition", chain.name);
        }
    }
}

#[test]
fn nothing_is_dropped_uncounted() {
    for table in elements::tables() {
        for rule in table.chains.iter().flat_map(|chain| &chain.rules) {
            if rule.last() == Some(&Expr::Verdict(Verdict::Drop)) {
                let counter = rule.iter().rev().nth(1);
                assert!(
                    matches!(counter, Some(Expr::Count(name)) if table.counters.contains(name)),
                    "{rule:?}"
                );
            }
        }
    }
}

#[test]
fn rules_name_only_sets_chains_and_counters_of_their_own_table() {
    for table in elements::tables() {
        let sets: BTreeSet<_> = table.sets.iter().map(|set| &set.name).collect();
        let chains: BTreeSet<_> = table.chains.iter().map(|chain| &chain.name).collect();
        for expression in table.chains.iter().flat_map(|chain| &chain.rules).flatten() {
            match expression {
                Expr::Lookup { set, .. } => assert!(sets.contains(set), "{set}"),
                Expr::Verdict(Verdict::Goto(chain)) => assert!(chains.contains(chain), "{chain}"),
                Expr::Count(counter) => assert!(table.counters.contains(counter), "{counter}"),
                _ => {}
            }
        }
    }
}
