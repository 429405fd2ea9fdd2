//! Who VMMs run as, and which addresses are given, by what records are there.

use mvm_host::network::vmm_user;
use mvm_proto::document::DesiredState;
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::json;

use super::*;

/// A tenant with one pool.
fn tenant(name: &str, net_id: u16, subnet: &str) -> (TenantId, PoolId, PoolSpec) {
    let pool = json!({
        "pool_id": "web", "flake_ref": "builtin:busybox", "profile": "minimal",
        "instance_resources": { "vcpus": 1, "mem_mib": 64, "data_disk_mib": 0 },
        "desired_counts": { "running": 1, "warm": 0, "sleeping": 0 },
    });
    let tenant = json!({
        "tenant_id": name,
        "network": { "tenant_net_id": net_id, "ipv4_subnet": subnet },
        "quotas": { "max_vcpus": 9, "max_mem_mib": 999, "max_running": 9, "max_warm": 9, "max_pools": 9,
            "max_instances_per_pool": 9, "max_disk_gib": 9 },
        "pools": [pool],
    });
    let text = json!({ "schema_version": 1, "node_id": "node-a", "tenants": [tenant] });
    let desired = DesiredState::parse(text.to_string().as_bytes()).unwrap();
    let tenant = &desired.tenants[0];
    let pool = &tenant.pools[0];
    (tenant.tenant_id.clone(), pool.pool_id.clone(), PoolSpec::of(tenant, pool))
}

fn made(records: &Arc<Records>, (tenant, pool, spec): &(TenantId, PoolId, PoolSpec)) -> (Record, Lease) {
    let (mut record, lease) = records.reserve(tenant, pool, spec, None, Timestamp::from_unix_ms(0)).unwrap();
    // As where instances have no card.
    records.place(&mut record, spec, None).unwrap();
    (record, lease)
}

fn user(record: &Record) -> u32 {
    vmm_user(record.net_id, record.offset)
}

#[test]
fn no_two_instances_have_one_user_whatever_number_a_document_gives_their_tenants_networks() {
    let records = Records::empty();
    let mut all: Vec<(Record, Lease)> = Vec::new();
    // The number of a tenant that is gone is given again while its instance is still there.
    for (name, net_id, subnet) in [
        ("acme", 1, "10.1.0.0/24"),
        ("beta", 1, "10.1.0.0/24"),
        ("gamma", 1, "10.2.0.0/24"),
        ("delta", 2, "10.2.0.0/24"),
        ("beta", 2, "10.2.0.0/24"),
    ] {
        all.push(made(&records, &tenant(name, net_id, subnet)));
    }
    let distinct = |all: &[(Record, Lease)]| {
        let users: BTreeSet<u32> = all.iter().map(|(record, _)| user(record)).collect();
        assert_eq!(users.len(), all.len(), "{users:?}");
    };
    distinct(&all);
    // A tenant whose number changes takes its instances there at their next start, beside those that are there.
    let moved = tenant("delta", 1, "10.2.0.0/24");
    records.place(&mut all[3].0, &moved.2, None).unwrap();
    distinct(&all);
    let places: BTreeSet<u32> = records.all().iter().map(user).collect();
    assert_eq!(places.len(), all.len(), "what is taken is taken from then on");
    // Nor does one that comes from another node.
    let mut came = all[0].0.clone();
    (came.id, came.tenant) = (InstanceId::from_bits(0xc0de), "epsilon".parse().unwrap());
    assert!(matches!(records.admit(came), Err(StateError::AddressTaken { .. })));
}

/// What becomes of the instances of one of two nodes.
#[derive(Debug, Clone, Copy)]
enum Turn {
    Made {
        node: usize,
    },
    /// It is started anew, by the document in force.
    Started {
        node: usize,
        which: usize,
    },
    Gone {
        node: usize,
        which: usize,
    },
    /// A coordinator takes a block from one node, none of whose instances have an address in it, and gives it to the other.
    Moved {
        block: u16,
    },
}

fn turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        5 => (0..2_usize).prop_map(|node| Turn::Made { node }),
        2 => (0..2_usize, 0..64_usize).prop_map(|(node, which)| Turn::Started { node, which }),
        2 => (0..2_usize, 0..64_usize).prop_map(|(node, which)| Turn::Gone { node, which }),
        1 => (0..5_u16).prop_map(|block| Turn::Moved { block }),
    ]
}

proptest! {
    #[test]
    fn two_nodes_with_blocks_of_their_own_never_give_one_address_twice(
        owners in vec(0..2_usize, 5),
        reserved in proptest::collection::btree_set(0..80_u16, 0..60),
        turns in vec(turn(), 1..120),
    ) {
        let (name, pool, mut spec) = tenant("acme", 1, "10.1.0.0/24");
        spec.network.reserved_offsets = reserved.iter().copied().collect();
        let mut owners = owners;
        let nodes = [Records::empty(), Records::empty()];
        let spec_of = |owners: &[usize], node: usize| {
            let mut spec = spec.clone();
            let own = (0..5_u16).filter(|block| owners[usize::from(*block)] == node);
            spec.network.address_blocks = Some(own.collect());
            spec
        };
        for turn in turns {
            match turn {
                Turn::Made { node } => {
                    let spec = spec_of(&owners, node);
                    let before = nodes[node].all();
                    let free = spec.network.offsets().any(|offset| before.iter().all(|r| r.offset != offset));
                    match nodes[node].reserve(&name, &pool, &spec, None, Timestamp::from_unix_ms(0)) {
                        Ok((record, _lease)) => {
                            prop_assert!(spec.network.offers(record.offset), "{}", record.address);
                            prop_assert!(!reserved.contains(&u16::try_from(record.offset).unwrap()));
                        }
                        Err(error) => {
                            prop_assert!(!free, "{error}");
                            let told = error.to_string();
                            prop_assert!(told.ends_with("no free address in what this node may give"), "{told}");
                        }
                    }
                }
                Turn::Started { node, which } => {
                    let mut all = nodes[node].all();
                    if let Some(record) = all.get_mut(which) {
                        let before = record.address;
                        nodes[node].place(record, &spec_of(&owners, node), None).unwrap();
                        prop_assert_eq!(record.address, before);
                    }
                }
                Turn::Gone { node, which } => {
                    if let Some(record) = nodes[node].all().get(which) {
                        nodes[node].forget(&record.id);
                    }
                }
                Turn::Moved { block } => {
                    let owner = &mut owners[usize::from(block)];
                    let used = nodes[*owner].all().iter().any(|r| r.offset / 16 == u32::from(block));
                    if !used {
                        *owner = 1 - *owner;
                    }
                }
            }
            let all: Vec<_> = nodes.iter().flat_map(|records| records.all()).collect();
            let addresses: BTreeSet<_> = all.iter().map(|record| record.address).collect();
            prop_assert_eq!(addresses.len(), all.len(), "one of them was given twice");
        }
    }
}

#[test]
fn of_a_hold_and_a_step_that_puts_to_rest_the_second_sees_the_first() {
    let records = Records::empty();
    let (mut record, lease) = made(&records, &tenant("acme", 1, "10.1.0.0/24"));
    record.phase = Phase::Running;
    records.set(record.clone());
    drop(lease);
    let id = &record.id;
    let (first, usable) = records.hold(id).unwrap();
    let (second, _) = records.hold(id).unwrap();
    assert_eq!(usable, Usable::Now);
    assert!(records.lease_to_rest(id, Phase::Sleeping).is_none());
    // What is done by hand goes on, and so does what ends it.
    assert!(records.lease(id, Phase::Stopped).is_some());
    drop(first);
    assert!(records.lease_to_rest(id, Phase::Sleeping).is_none(), "the other one still holds it");
    drop(second);
    let resting = records.lease_to_rest(id, Phase::Sleeping).unwrap();
    let (_late, usable) = records.hold(id).unwrap();
    assert_eq!(usable, Usable::Not(Phase::Running), "it is on its way down");
    drop(resting);
    record.phase = Phase::Sleeping;
    records.set(record.clone());
    assert_eq!(records.hold(id).unwrap().1, Usable::Not(Phase::Sleeping));
    assert!(records.hold(&InstanceId::from_bits(0xffff_ffff)).is_none());
}
