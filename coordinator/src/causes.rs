//! Which request changed an object, from its write until the documents that follow from it are issued: so that the trace of an
//! `apply` goes on in the agents. Kept for traces that someone records, in memory alone; a document that is issued later, by a
//! rollout's next step or after a restart, belongs to no trace.

use std::collections::BTreeMap;

use mvm_planner::fleet::{Placed, PoolKey};
use mvm_proto::{NodeId, TraceContext};
use mvm_telemetry::{Attribute, Kind, Span, Tracer, current};
use parking_lot::Mutex;

use crate::documents::Stored;
use crate::records::OBJECTS;
use crate::world::Placements;

/// Writes whose change was not heard yet, and changes that were not settled yet: more are carried out without a trace.
const MAX_KEPT: usize = 1024;
/// Nodes of one settling whose documents belong to traces. A change of more is seen in these.
const MAX_NODES: usize = 256;
/// Traces that one document belongs to.
const MAX_TRACES: usize = 8;

#[derive(Debug, Default)]
pub(crate) struct Causes(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    /// By the object's key.
    written: BTreeMap<String, TraceContext>,
    heard: Vec<Cause>,
}

/// A change of an object, and the request that asked for it.
#[derive(Debug)]
pub(crate) struct Cause {
    key: String,
    trace: TraceContext,
}

/// A write that is under way. What is not [`done`](Writing::done) caused nothing.
pub(crate) struct Writing<'a> {
    causes: &'a Causes,
    key: Option<&'a str>,
}

impl Causes {
    /// Before the commit: the change is heard as soon as it is in the store.
    pub(crate) fn writing<'a>(&'a self, key: &'a str) -> Writing<'a> {
        let trace = current::sampled();
        let noted = trace.is_some_and(|trace| {
            let mut kept = self.0.lock();
            let has_room = kept.written.len() < MAX_KEPT;
            has_room && kept.written.insert(key.to_owned(), trace).is_none()
        });
        Writing { causes: self, key: noted.then_some(key) }
    }

    /// The change of an object is in the store.
    pub(crate) fn hear(&self, key: &str) {
        let mut kept = self.0.lock();
        if let Some(trace) = kept.written.remove(key)
            && kept.heard.len() < MAX_KEPT
        {
            kept.heard.push(Cause { key: key.to_owned(), trace });
        }
    }

    /// What was heard since it was asked last.
    pub(crate) fn take_heard(&self) -> Vec<Cause> {
        std::mem::take(&mut self.0.lock().heard)
    }

    /// The changes themselves were not heard.
    pub(crate) fn forget(&self) {
        *self.0.lock() = Kept::default();
    }
}

impl Writing<'_> {
    pub(crate) fn done(mut self) {
        self.key = None;
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.causes.0.lock().written.remove(key);
        }
    }
}

/// The spans of the documents that are being issued, by node.
#[derive(Debug, Default)]
pub(crate) struct Issuing(BTreeMap<NodeId, Span>);

impl Issuing {
    /// Begins them: one for each node that a cause may concern.
    pub(crate) fn begin(
        tracer: &Tracer,
        heard: &[Cause],
        placed: &Placements,
        differences: &[(PoolKey, Placed, Placed)],
    ) -> Self {
        if heard.is_empty() {
            return Self::default();
        }
        let begun = by_node(heard, placed, differences).into_iter().filter_map(|(node, traces)| {
            let mut traces = traces.into_iter();
            let mut span = begin(tracer, &node, traces.next()?);
            traces.for_each(|other| span.link(other));
            Some((node, span))
        });
        Self(begun.collect())
    }

    /// A node's document is stored, and goes on to it with its trace.
    pub(crate) fn finish(&mut self, node: &NodeId, stored: &mut Stored) {
        if let Some(span) = self.0.remove(node) {
            finish(span, stored);
        }
    }
}

impl Drop for Issuing {
    fn drop(&mut self) {
        // Nodes whose document is as it was.
        std::mem::take(&mut self.0).into_values().for_each(Span::discard);
    }
}

/// Issues a node's document for one trace.
pub(crate) fn begin(tracer: &Tracer, node: &NodeId, trace: TraceContext) -> Span {
    let mut span = tracer.begin(Kind::Producer, "issue document", Some(trace));
    span.set(Attribute::Node, node.as_str());
    span
}

pub(crate) fn finish(mut span: Span, stored: &mut Stored) {
    span.set(Attribute::Epoch, stored.assigned.numbers.epoch);
    span.set(Attribute::Generation, stored.assigned.numbers.generation);
    stored.trace = span.sampled();
}

/// The traces that each node's next document belongs to, the first of them first.
fn by_node(
    heard: &[Cause],
    placed: &Placements,
    differences: &[(PoolKey, Placed, Placed)],
) -> BTreeMap<NodeId, Vec<TraceContext>> {
    let mut found: BTreeMap<NodeId, Vec<TraceContext>> = BTreeMap::new();
    for Cause { key, trace } in heard {
        let mut add = |node: &NodeId| {
            if found.len() >= MAX_NODES && !found.contains_key(node) {
                return;
            }
            let traces = found.entry(node.clone()).or_default();
            if traces.len() < MAX_TRACES && !traces.contains(trace) {
                traces.push(*trace);
            }
        };
        let of = Of::read(key);
        if let Of::Node(node) = &of {
            add(node);
        }
        for (_, before, after) in differences.iter().filter(|(pool, ..)| of.concerns(pool)) {
            before
                .keys()
                .chain(after.keys())
                .filter(|it| before.get(*it) != after.get(*it))
                .for_each(&mut add);
        }
        for (_, placed) in placed.all().iter().filter(|(pool, _)| of.has(pool)) {
            placed.keys().for_each(&mut add);
        }
    }
    found
}

/// What an object's change may change the documents of.
enum Of<'a> {
    Pool(&'a str, &'a str),
    /// A tenant, its secrets and all else that it has.
    Tenant(&'a str),
    Node(NodeId),
    Nothing,
}

impl<'a> Of<'a> {
    fn read(key: &'a str) -> Self {
        let path: Vec<&str> = key.strip_prefix(OBJECTS).unwrap_or(key).split('/').collect();
        match path.as_slice() {
            ["pools", tenant, pool] => Self::Pool(tenant, pool),
            ["tenants", tenant] | [_, tenant, _] => Self::Tenant(tenant),
            ["nodes", node] => node.parse().map_or(Self::Nothing, Self::Node),
            _ => Self::Nothing,
        }
    }

    /// Whether it has this pool.
    fn has(&self, pool: &PoolKey) -> bool {
        match self {
            Self::Pool(tenant, name) => pool.tenant.as_str() == *tenant && pool.pool.as_str() == *name,
            Self::Tenant(tenant) => pool.tenant.as_str() == *tenant,
            Self::Node(_) | Self::Nothing => false,
        }
    }

    /// Whether this pool may be placed otherwise for it.
    fn concerns(&self, pool: &PoolKey) -> bool {
        matches!(self, Self::Node(_)) || self.has(pool)
    }
}

#[cfg(test)]
mod tests {
    use mvm_proto::document::DesiredCounts;

    use super::*;

    fn trace(number: u128) -> TraceContext {
        TraceContext::new(number, 1, true).unwrap()
    }

    fn cause(key: &str, number: u128) -> Cause {
        Cause { key: key.to_owned(), trace: trace(number) }
    }

    fn pool(tenant: &str, pool: &str) -> PoolKey {
        PoolKey { tenant: tenant.parse().unwrap(), pool: pool.parse().unwrap() }
    }

    fn on(nodes: &[&str]) -> Placed {
        let counts = DesiredCounts { running: 1, ..DesiredCounts::default() };
        nodes.iter().map(|node| (node.parse().unwrap(), counts)).collect()
    }

    fn shown(found: &BTreeMap<NodeId, Vec<TraceContext>>) -> Vec<(String, Vec<u128>)> {
        let traces = |traces: &Vec<TraceContext>| traces.iter().map(TraceContext::trace).collect();
        found.iter().map(|(node, of)| (node.to_string(), traces(of))).collect()
    }

    #[test]
    fn a_document_belongs_to_the_requests_that_concern_its_node() {
        let placed = [(pool("acme", "web"), on(&["n1", "n2"])), (pool("acme", "db"), on(&["n3"]))];
        let placed = Placements::new(placed.into_iter().collect());
        // It left one node for another.
        let moved = [(pool("globex", "web"), on(&["n4"]), on(&["n5"]))];
        let found = |heard: &[Cause]| shown(&by_node(heard, &placed, &moved));
        let pairs = |pairs: &[(&str, &[u128])]| -> Vec<(String, Vec<u128>)> {
            pairs.iter().map(|(node, of)| ((*node).to_owned(), of.to_vec())).collect()
        };
        assert_eq!(found(&[cause("objects/pools/acme/web", 1)]), pairs(&[("n1", &[1]), ("n2", &[1])]));
        assert_eq!(found(&[cause("objects/pools/globex/web", 1)]), pairs(&[("n4", &[1]), ("n5", &[1])]));
        let two = [cause("objects/tenants/acme", 1), cause("objects/secrets/acme/key", 2)];
        assert_eq!(found(&two), pairs(&[("n1", &[1, 2]), ("n2", &[1, 2]), ("n3", &[1, 2])]));
        // What a node may not have goes elsewhere.
        let expected = pairs(&[("n4", &[1]), ("n5", &[1]), ("n9", &[1])]);
        assert_eq!(found(&[cause("objects/nodes/n9", 1)]), expected);
        assert_eq!(found(&[cause("objects/api-keys/ci", 1)]), pairs(&[]));
    }

    #[tokio::test]
    async fn what_was_written_is_told_once_and_what_was_not_is_not() {
        let causes = Causes::default();
        causes.writing("objects/pools/acme/web").done();
        causes.hear("objects/pools/acme/web");
        assert!(causes.take_heard().is_empty(), "no request is traced here");
        causes.0.lock().written.insert("objects/pools/acme/web".to_owned(), trace(1));
        // A write that failed.
        drop(Writing { causes: &causes, key: Some("objects/pools/acme/web") });
        causes.hear("objects/pools/acme/web");
        assert!(causes.take_heard().is_empty());
        causes.0.lock().written.insert("objects/pools/acme/web".to_owned(), trace(1));
        causes.hear("objects/pools/acme/web");
        causes.hear("objects/pools/acme/web");
        assert_eq!((causes.take_heard().len(), causes.take_heard().len()), (1, 0));
    }
}
