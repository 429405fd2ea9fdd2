//! Taking one placed instance of a pool from one node to another, with everything else left where it is.

use std::collections::BTreeMap;

use mvm_proto::document::DesiredCounts;
use mvm_proto::{NodeId, Phase};

use super::PoolKey;
use super::grow::Search;
use super::placer::Placer;
use super::slab::NodeNumber;

impl Placer {
    /// What is placed on a node, by pool.
    #[must_use]
    pub fn counts_on(&self, id: &NodeId) -> BTreeMap<PoolKey, DesiredCounts> {
        let Some(number) = self.state.numbers.number(id) else { return BTreeMap::new() };
        let pools = self.state.nodes.get(number).into_iter().flat_map(|node| &node.pools);
        let counts = pools.filter_map(|pool| {
            let entry = self.state.pools.get(*pool)?;
            Some((entry.key.clone(), entry.declared.as_ref()?.counts(number)))
        });
        counts.collect()
    }

    /// Takes one in this phase from `from` to the best other node that takes it and that `suits`; says which, or why none.
    /// The pool has as many as before.
    pub fn shift(
        &mut self,
        key: &PoolKey,
        phase: Phase,
        from: &NodeId,
        suits: impl Fn(&NodeId) -> Result<(), String>,
    ) -> Result<NodeId, String> {
        let nothing = || format!("nothing of it is placed on {from} in this phase");
        let (Some(pool), Some(at)) = (self.state.pool_number(key), self.state.numbers.number(from)) else {
            return Err(nothing());
        };
        let Some(entry) = self.state.pools.get(pool) else { return Err(nothing()) };
        let tenant = entry.tenant;
        let Some(declared) = entry.declared.as_ref().filter(|pool| pool.on(phase).of(at) > 0) else {
            return Err(nothing());
        };
        let (spec, need) = (declared.spec.clone(), declared.need(phase));
        // Without it: else it would stand in its own way, as in a domain that it is spread over.
        self.state.remove(pool, at, phase, 1);
        let mut search = Search::new(&self.state, pool, tenant, &spec, need, BTreeMap::new());
        let mut unsuited: Option<String> = None;
        let found = loop {
            let Some(next) = search.next(&self.state) else { break None };
            let Some(name) = self.state.nodes.get(next).map(|node| node.name.clone()) else { break None };
            let against = if next == at { Err(format!("it is on {name}")) } else { suits(&name) };
            match against {
                Ok(()) => break Some((next, name)),
                Err(reason) => {
                    unsuited.get_or_insert(format!("{name}: {reason}"));
                }
            }
            if search.is_bound() {
                break None;
            }
        };
        if let Some((next, name)) = found {
            self.state.add(pool, next, phase, 1);
            return Ok(name);
        }
        self.state.add(pool, at, phase, 1);
        let refused = search.refused(|at: NodeNumber| Some(self.state.nodes.get(at)?.name.clone()));
        Err(unsuited.or(refused).unwrap_or_else(|| "there is no other node".to_owned()))
    }

    /// Takes one back, whatever speaks against it: it never left.
    pub fn shift_back(&mut self, key: &PoolKey, phase: Phase, from: &NodeId, to: &NodeId) {
        let numbers = (self.state.numbers.number(from), self.state.numbers.number(to));
        let (Some(pool), (Some(from), Some(to))) = (self.state.pool_number(key), numbers) else { return };
        if self.state.pool(pool).is_some_and(|pool| pool.on(phase).of(from) > 0) {
            self.state.remove(pool, from, phase, 1);
            self.state.add(pool, to, phase, 1);
        }
    }
}
