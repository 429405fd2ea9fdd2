//! What must hold of a store after its coordinator ended, and once everything is at rest again.

use std::collections::BTreeMap;
use std::path::Path;

use mvm_planner::fleet::{Fleet, FleetNode, FleetPool, FleetTenant, Overcommit, Placed, PoolKey, place};
use mvm_planner::observation::Capacity;
use mvm_proto::document::DesiredCounts;
use mvm_proto::envelope::{Envelope, Payload as _};
use mvm_proto::object::{ManagedBy, NodeSpec, Object, PoolSpec, TenantSpec};
use mvm_proto::status::Mark;
use mvm_proto::{DesiredState, SignedDocument};
use mvm_store::{Settings, SledStore, Store as _};
use serde_json::Value;

use super::node::FakeNode;
use super::{Case, Operation};
use crate::rest::{Events, Rest};
use crate::support::{Running, now};

/// What a store has.
pub(super) struct Stored {
    revision: u64,
    entries: BTreeMap<String, (u64, Value)>,
}

impl Stored {
    /// None where the files were copied while they were written.
    pub(super) async fn read(path: &Path) -> Option<Self> {
        let store = SledStore::open(path, Settings { reserve_bytes: 0, ..Settings::default() }).await.ok()?;
        let listing = store.list("").await.ok()?;
        store.close().await;
        let entries = listing.entries.into_iter();
        let entries =
            entries.map(|entry| (entry.key, (entry.version, serde_json::from_slice(&entry.value).unwrap())));
        Some(Self { revision: listing.revision, entries: entries.collect() })
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key).map(|(_, value)| value)
    }

    /// What is under a prefix, by the rest of its keys.
    fn under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a (u64, Value))> {
        self.entries.iter().filter_map(move |(key, entry)| Some((key.strip_prefix(prefix)?, entry)))
    }

    fn objects(&self, plural: &str) -> Vec<Object> {
        let prefix = format!("objects/{plural}/");
        self.under(&prefix)
            .map(|(_, (_, record))| serde_json::from_value(record["object"].clone()).unwrap())
            .collect()
    }

    fn object(&self, plural: &str, name: &str) -> Option<Object> {
        let record = self.get(&format!("objects/{plural}/{name}"))?;
        Some(serde_json::from_value(record["object"].clone()).unwrap())
    }

    fn placed(&self) -> BTreeMap<PoolKey, Placed> {
        let mut all: BTreeMap<PoolKey, Placed> = BTreeMap::new();
        for (path, (_, counts)) in self.under("placed/") {
            let steps: Vec<&str> = path.split('/').collect();
            let [tenant, pool, node] = steps[..] else { panic!("{path}") };
            let key = PoolKey { tenant: tenant.parse().unwrap(), pool: pool.parse().unwrap() };
            all.entry(key)
                .or_default()
                .insert(node.parse().unwrap(), serde_json::from_value(counts.clone()).unwrap());
        }
        all
    }

    /// What the newest document of a node says, and its mark.
    fn document(&self, node: &str) -> Option<(Mark, DesiredState)> {
        let assigned = self.get(&format!("assigned/{node}"))?;
        let number = |field: &str| assigned[field].as_u64().unwrap();
        let envelope = self.get(&format!("envelopes/{node}"))?.to_string();
        // Signed as it is; what is looked at here is what it says.
        let envelope = Envelope::from_json(envelope.as_bytes()).unwrap();
        let desired = SignedDocument::parse(&envelope.payload).unwrap().desired;
        let mark = Mark {
            epoch: number("epoch"),
            generation: number("generation"),
            digest: assigned["digest"].as_str().unwrap().to_owned(),
        };
        Some((mark, desired))
    }

    /// What the audit log has beyond an earlier one.
    fn audited_since<'a>(&'a self, before: &'a Self) -> impl Iterator<Item = &'a Value> {
        let news = self.under("audit/").filter(|(key, _)| before.get(&format!("audit/{key}")).is_none());
        news.map(|(_, (_, record))| record)
    }
}

/// What holds at every instant: what one transaction writes is there as a whole.
pub(super) fn whole(stored: &Stored) {
    let versions =
        |prefix| stored.under(prefix).map(|(node, (version, _))| (node, *version)).collect::<Vec<_>>();
    assert_eq!(versions("assigned/"), versions("envelopes/"), "a document and its numbers");
    let count = |object: &str, outcome: &str| {
        let entries = stored.under("audit/");
        entries.filter(|(_, (_, entry))| entry["object"] == object && entry["outcome"] == outcome).count()
    };
    let mut uids = Vec::new();
    for plural in ["tenants", "pools", "secrets", "api-keys"] {
        for object in stored.objects(plural) {
            assert_eq!(
                count(&object.reference(), "created"),
                1,
                "{} and its entry in the audit log",
                object.reference()
            );
            let deleting = usize::from(object.metadata.deleting_since.is_some());
            let deleted = count(&object.reference(), "deleted");
            // The pools of a tenant that is deleted are deleted with it, and not by themselves.
            assert!(deleted <= deleting, "{} and its entry in the audit log", object.reference());
            uids.push(object.metadata.uid);
        }
    }
    for (_, (_, record)) in stored.under("idempotency/") {
        let uid = record["uid"].as_str().unwrap();
        assert!(uids.iter().any(|known| known == uid), "{uid} is of no object");
    }
    let keys: Vec<_> = stored.under("api_keys/").map(|(_, (_, record))| record["uid"].clone()).collect();
    let objects = stored.objects("api-keys");
    assert_eq!(keys.len(), objects.len(), "keys and their objects");
    let values: Vec<_> = stored.under("secrets/").map(|(_, (_, record))| record["uid"].clone()).collect();
    let secrets = stored.objects("secrets");
    assert!(
        values.len() == secrets.len()
            && secrets.iter().all(|secret| values.iter().any(|uid| *uid == secret.metadata.uid.as_str())),
        "Secrets and their values"
    );
    let counted =
        stored.under("secrets_of/").map(|(_, (_, of))| of["secrets"].as_u64().unwrap()).sum::<u64>();
    assert_eq!(counted, secrets.len() as u64, "Secrets, and how many there are");
    for (_, (_, token)) in stored.under("tokens/") {
        let node = token["node_id"].as_str().unwrap();
        let joined = stored.get(&format!("nodes/{node}")).is_some();
        assert_eq!(joined, !token["used_at"].is_null(), "{node} and its token");
    }
}

/// What was acknowledged is there; what was not may be.
pub(super) fn done_or_not(case: &Case, before: &Stored, left: &Stored, acknowledged: bool) {
    if acknowledged && case.operation != Operation::Status {
        assert!(is_there(case, left), "{case:?} was acknowledged and is lost");
    }
    let news = left
        .audited_since(before)
        .filter(|entry| Some(entry["object"].as_str().unwrap()) == case.object().as_deref());
    let news = news.count();
    let expected = usize::from(case.object().is_some() && is_there(case, left));
    assert_eq!(news, expected, "{case:?} and its entries in the audit log");
}

/// It was done, and once.
pub(super) fn done_once(case: &Case, before: &Stored, after: &Stored) {
    done_or_not(case, before, after, true);
    whole(after);
    let uid = |object: Option<Object>| object.map(|object| object.metadata.uid).unwrap_or_default();
    let made_by_key = |uid: String| {
        after.under("idempotency/").filter(|(_, (_, record))| record["uid"] == uid.as_str()).count()
    };
    let pool = format!("{}/{}", case.tenant(), case.pool());
    match case.operation {
        Operation::CreateTenant => assert_eq!(made_by_key(uid(after.object("tenants", &case.tenant()))), 1),
        Operation::CreatePool => assert_eq!(made_by_key(uid(after.object("pools", &pool))), 1),
        Operation::CreateKey => {
            assert_eq!(made_by_key(uid(after.object("api-keys", &format!("k{}", case.number)))), 1);
        }
        Operation::ChangePool | Operation::RollOut | Operation::ScaleDown => {
            assert_eq!(after.object("pools", &pool).unwrap().metadata.generation, 2);
        }
        Operation::ChangeSecret => {
            let secret = after.object("secrets", &format!("{}/{}", case.tenant(), case.secret())).unwrap();
            assert_eq!(secret.metadata.generation, 2);
            let rollout = after.get(&format!("rollouts/{pool}")).unwrap();
            let told = rollout["revisions"].as_array().unwrap().iter().map(|it| &it["values_changed"]);
            assert_eq!(told.collect::<Vec<_>>(), [&Value::Null, &Value::Bool(true)], "one revision for it");
        }
        Operation::Cordon => {
            let had = before.object("nodes", "a").unwrap().metadata.generation;
            assert_eq!(after.object("nodes", "a").unwrap().metadata.generation, had + 1);
        }
        Operation::DeletePool => assert!(after.object("pools", &pool).is_none()),
        Operation::DeleteTenant => {
            assert!(
                after.object("tenants", &case.tenant()).is_none() && after.object("pools", &pool).is_none()
            );
            assert_eq!(after.under(&format!("placed/{}/", case.tenant())).count(), 0);
        }
        Operation::Push => {
            let spec: NodeSpec = after.object("nodes", &case.node()).unwrap().spec().unwrap();
            assert_eq!(spec.managed_by, ManagedBy::Push);
        }
        Operation::Enrol => {
            assert!(after.object("nodes", &case.node()).is_some(), "{} has no object", case.node());
        }
        Operation::RemoveNode => {
            assert!(after.object("nodes", &case.node()).is_none(), "{} still has an object", case.node());
        }
        Operation::Status => {}
    }
}

/// Whether the effect of the operation is in the store.
fn is_there(case: &Case, stored: &Stored) -> bool {
    let pool = stored.object("pools", &format!("{}/{}", case.tenant(), case.pool()));
    let running = |wanted: u64| pool.as_ref().is_some_and(|pool| pool.spec["counts"]["running"] == wanted);
    let is_going =
        |object: Option<&Object>| object.is_none_or(|object| object.metadata.deleting_since.is_some());
    let node = stored.get(&format!("nodes/{}", case.node()));
    match case.operation {
        Operation::CreateTenant => stored.object("tenants", &case.tenant()).is_some(),
        Operation::CreatePool => pool.is_some(),
        Operation::CreateKey => stored.object("api-keys", &format!("k{}", case.number)).is_some(),
        Operation::ChangePool => running(3),
        Operation::RollOut => {
            let mem_mib = pool.as_ref().and_then(|pool| pool.spec["resources"]["mem_mib"].as_u64());
            mem_mib == Some(super::site::LARGER_MIB)
        }
        Operation::ScaleDown => running(1),
        Operation::ChangeSecret => {
            let secret = stored.object("secrets", &format!("{}/{}", case.tenant(), case.secret()));
            secret.is_some_and(|secret| secret.metadata.generation == 2)
        }
        Operation::Cordon => stored.object("nodes", "a").is_some_and(|node| {
            node.spec["labels"]["case"].as_str() == Some(case.number.to_string().as_str())
        }),
        Operation::DeletePool => is_going(pool.as_ref()),
        Operation::DeleteTenant => is_going(stored.object("tenants", &case.tenant()).as_ref()),
        Operation::Push => stored.get(&format!("assigned/{}", case.node())).is_some(),
        Operation::Enrol => node.is_some(),
        Operation::RemoveNode => node.is_some_and(|node| !node["removed_at"].is_null()),
        Operation::Status => true,
    }
}

/// What is declared is placed as the planner places it, each document says what is placed, and its node has it.
pub(super) fn is_at_rest(stored: &Stored, nodes: &[FakeNode]) -> bool {
    let going =
        |plural: &str| stored.objects(plural).iter().any(|object| object.metadata.deleting_since.is_some());
    if going("tenants") || going("pools") {
        return false;
    }
    let fleet = fleet(stored, nodes);
    let plan = place(&fleet, now());
    if filled(&plan.placed) != filled(&fleet.placed) || !plan.unplaced.is_empty() {
        return false;
    }
    let all_placed = fleet.pools.iter().all(|(key, pool)| {
        let placed = fleet.placed.get(key).into_iter().flatten();
        placed.map(|(_, counts)| counts.running).sum::<u32>() == pool.counts.running
    });
    all_placed && nodes.iter().all(|node| has_its_document(stored, &fleet, node))
}

fn has_its_document(stored: &Stored, fleet: &Fleet, node: &FakeNode) -> bool {
    let id = node.id.parse().unwrap();
    let wanted: BTreeMap<PoolKey, DesiredCounts> = filled(&fleet.placed)
        .into_iter()
        .filter_map(|(key, placed)| Some((key, *placed.get(&id)?)))
        .collect();
    let mut heard = node.heard.lock();
    let Some((mark, desired)) = stored.document(&node.id) else {
        return wanted.is_empty() && heard.mark.is_none();
    };
    heard.note(&mark);
    let pools = desired.tenants.iter().flat_map(|tenant| {
        let key = |pool: &mvm_proto::document::Pool| PoolKey {
            tenant: tenant.tenant_id.clone(),
            pool: pool.pool_id.clone(),
        };
        tenant.pools.iter().map(move |pool| (key(pool), pool.desired_counts, pool.instance_resources))
    });
    let pools: Vec<_> = pools.collect();
    let rendered: BTreeMap<_, _> = pools.iter().map(|(key, counts, _)| (key.clone(), *counts)).collect();
    let as_declared = pools
        .iter()
        .all(|(key, _, resources)| fleet.pools.get(key).is_some_and(|pool| pool.resources == *resources));
    rendered == wanted && as_declared && heard.mark.as_ref() == Some(&mark)
}

/// The placements without those of nothing.
fn filled(placed: &BTreeMap<PoolKey, Placed>) -> BTreeMap<PoolKey, Placed> {
    let of = |placed: &Placed| -> Placed {
        let some = placed.iter().filter(|(_, counts)| **counts != DesiredCounts::default());
        some.map(|(node, counts)| (node.clone(), *counts)).collect()
    };
    placed
        .iter()
        .map(|(key, placed)| (key.clone(), of(placed)))
        .filter(|(_, placed)| !placed.is_empty())
        .collect()
}

/// What is declared, as the planner takes it.
fn fleet(stored: &Stored, nodes: &[FakeNode]) -> Fleet {
    let mut fleet = Fleet { placed: stored.placed(), ..Fleet::default() };
    for node in nodes {
        let Some(object) = stored.object("nodes", &node.id) else { continue };
        let spec: NodeSpec = object.spec().unwrap();
        let node = FleetNode {
            labels: spec.labels,
            taints: spec.taints.into_iter().collect(),
            cordoned: spec.cordoned,
            away_since: None,
            capacity: Capacity { vcpus: 64, mem_mib: 1 << 20, disk_mib: 1 << 20, max_instances: 1000 },
            overcommit: Overcommit::default(),
            images: Default::default(),
            beyond: BTreeMap::new(),
        };
        fleet.nodes.insert(object.metadata.name.parse().unwrap(), node);
    }
    for tenant in stored.objects("tenants") {
        let spec: TenantSpec = tenant.spec().unwrap();
        fleet
            .tenants
            .insert(tenant.metadata.name.parse().unwrap(), FleetTenant { quotas: spec.quotas.into() });
    }
    for pool in stored.objects("pools") {
        let spec: PoolSpec = pool.spec().unwrap();
        let key = PoolKey {
            tenant: pool.metadata.tenant.clone().unwrap(),
            pool: pool.metadata.name.parse().unwrap(),
        };
        let pool = FleetPool {
            resources: spec.resources.into(),
            counts: spec.counts.into(),
            image: spec.image.digest,
            role: spec.policies.role,
            critical: spec.policies.critical,
            placement: spec.placement,
        };
        fleet.pools.insert(key, pool);
    }
    fleet
}

/// A watch from before the operation tells each change of its object once, in order, up to how it is now.
pub(super) async fn told_once(case: &Case, before: &Stored, after: &Stored, running: &Running) {
    let Some(reference) = case.object() else { return };
    let (kind, name) = reference.split_once('/').unwrap();
    let plural = if kind == "apikey" { "api-keys".to_owned() } else { format!("{kind}s") };
    let newest = after.entries.get(&format!("objects/{plural}/{name}")).map(|(version, _)| *version);
    let path = format!("/v1/{plural}?watch=true&resource_version={}", before.revision);
    let mut events = Events::of(&mut Rest::operator(running).await, &path).await;
    let mut told: Vec<(String, u64, u64)> = Vec::new();
    let is_over = |told: &[(String, u64, u64)]| {
        told.last().is_some_and(|(what, id, _)| newest.map_or(what == "deleted", |newest| *id >= newest))
    };
    while !is_over(&told) {
        let event = events.next().await;
        let Ok(object) = serde_json::from_value::<Object>(event.object) else { continue };
        if object.reference() == reference {
            told.push((event.what, event.version, object.metadata.generation));
        }
    }
    assert!(told.windows(2).all(|pair| pair[0].1 < pair[1].1), "{reference}: {told:?}");
    let deleted = told.iter().filter(|(what, ..)| what == "deleted").count();
    assert_eq!(deleted, usize::from(newest.is_none()), "{reference}: {told:?}");
    let changes: std::collections::BTreeSet<u64> = told.iter().map(|(.., generation)| *generation).collect();
    if newest.is_some() {
        // The spec is changed once, and told with each of its generations.
        let generation = after.object(&plural, name).unwrap().metadata.generation;
        assert_eq!(changes.last(), Some(&generation), "{reference}: {told:?}");
        assert!(told.windows(2).all(|pair| pair[0].2 <= pair[1].2), "{reference}: {told:?}");
    }
}
