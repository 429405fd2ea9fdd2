//! Net ids and subnets of tenants, as they are stored: [`mvm_planner::fleet::networks`] decides who gets which.
//!
//! One record holds all, and every transaction that gives one out is guarded by it, so that no two tenants ever share.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::fleet::networks::{NetworkError, Removal, TenantNetwork, allocate};
use mvm_proto::document::Subnet;
use mvm_proto::{NodeId, Problem, TenantId, Timestamp};
use mvm_store::{Guard, Store, StoreError, Transaction};
use serde::{Deserialize, Serialize};

use super::Objects;
use crate::stored::{MAX_TRIES, StateError, Versioned, encode, load};

pub(crate) const NETWORKS_KEY: &str = "meta/networks";

/// What tenants have, and what deleted ones had.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Record")]
pub(crate) struct Networks {
    networks: Vec<TenantNetwork>,
}

/// The record, as this version or the one before it wrote it.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Record {
    networks: Vec<TenantNetwork>,
    /// By net id.
    taken: BTreeMap<u16, Taken>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Taken {
    tenant: TenantId,
    subnet: Subnet,
    /// Since when its tenant is gone from every node.
    #[serde(default)]
    freed_at: Option<Timestamp>,
}

impl From<Record> for Networks {
    fn from(record: Record) -> Self {
        let taken = record.taken.into_iter().map(|(net_id, Taken { tenant, subnet, freed_at })| {
            let removal = freed_at.map(|at| Removal::new(BTreeSet::new(), at));
            TenantNetwork { tenant, net_id, subnet, removal }
        });
        Self { networks: record.networks.into_iter().chain(taken).collect() }
    }
}

impl Networks {
    /// A net id and a subnet for a new tenant: the subnet that it asks for, or a free one.
    pub(crate) fn take(
        &mut self,
        tenant: &TenantId,
        wanted: Option<Subnet>,
        now: Timestamp,
    ) -> Result<(u16, Subnet), Problem> {
        // One that was deleted and is declared again gets back what its instances may still have.
        let own = self.networks.iter_mut().find(|network| network.tenant == *tenant);
        if let Some(own) = own.filter(|own| wanted.is_none_or(|wanted| wanted == own.subnet)) {
            own.removal = None;
            return Ok((own.net_id, own.subnet));
        }
        let (net_id, subnet) = allocate(&self.networks, wanted, now).map_err(|error| refused(&error))?;
        // What is used again is no longer remembered as another's.
        self.networks.retain(|network| network.net_id != net_id && !network.subnet.overlaps(&subnet));
        self.networks.push(TenantNetwork { tenant: tenant.clone(), net_id, subnet, removal: None });
        Ok((net_id, subnet))
    }

    /// The tenant is deleted; these nodes have not confirmed that nothing of it is left.
    pub(crate) fn free(&mut self, tenant: &TenantId, nodes: &BTreeSet<NodeId>, now: Timestamp) {
        for network in self.networks.iter_mut().filter(|network| network.tenant == *tenant) {
            network.removal.get_or_insert_with(|| Removal::new(nodes.clone(), now));
        }
    }

    /// Nodes that are waited for and have nothing left confirm it. Says whether any did.
    fn confirm(&mut self, has_left: impl Fn(&TenantId, &NodeId) -> bool, now: Timestamp) -> bool {
        let mut is_news = false;
        for TenantNetwork { tenant, removal, .. } in &mut self.networks {
            let Some(removal) = removal else { continue };
            let gone: Vec<NodeId> =
                removal.waiting().iter().filter(|node| !has_left(tenant, node)).cloned().collect();
            is_news |= !gone.is_empty();
            gone.iter().for_each(|node| removal.confirm(node, now));
        }
        is_news
    }
}

/// Nodes confirm the removal of tenants of which they have nothing left.
pub(crate) async fn confirm_removals(
    objects: &Objects,
    has_left: impl Fn(&TenantId, &NodeId) -> bool,
    now: Timestamp,
) -> Result<(), Problem> {
    for _ in 0..MAX_TRIES {
        let found: Option<Versioned<Networks>> = load(&objects.store, NETWORKS_KEY).await?;
        let Some(Versioned { value: mut networks, version }) = found else { return Ok(()) };
        if !networks.confirm(&has_left, now) {
            return Ok(());
        }
        let txn = Transaction::new().guard(NETWORKS_KEY, Guard::Version(version));
        match objects.store.commit(txn.put(NETWORKS_KEY, encode(&networks))).await {
            Ok(_) => return Ok(()),
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(StateError::from(error).into()),
        }
    }
    Err(crate::refuse::too_busy("the networks of tenants"))
}

fn refused(error: &NetworkError) -> Problem {
    let (status, code, advice) = match error {
        NetworkError::Overlaps { .. } => {
            (422, "subnet_taken", "Choose another subnet, or leave it out to be given one.")
        }
        NetworkError::Exhausted { what, .. } if what.contains("subnets") => {
            (409, "subnets_exhausted", "Name a subnet of another private range.")
        }
        NetworkError::Exhausted { .. } => (
            409,
            "net_ids_exhausted",
            "Delete tenants, and remove nodes that are gone for good: ids are free again 30 days after all nodes confirmed.",
        ),
    };
    Problem::new(status, code, error.to_string(), advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(days: i64) -> Timestamp {
        Timestamp::from_unix_ms(days * 24 * 3_600_000)
    }

    fn tenant(name: &str) -> TenantId {
        name.parse().unwrap()
    }

    #[test]
    fn what_a_deleted_tenant_had_rests_until_nodes_confirmed_and_comes_back_to_it_alone() {
        let mut networks = Networks::default();
        let nodes = ["n1", "n2"].map(|node| node.parse().unwrap());
        let first = networks.take(&tenant("a"), None, at(0)).unwrap();
        let wanted = Some(first.1);
        networks.free(&tenant("a"), &nodes.clone().into(), at(1));
        let told = networks.clone().take(&tenant("b"), wanted, at(100)).unwrap_err();
        assert_eq!(told.code, "subnet_taken");
        assert!(told.detail.contains("n1 and 1 more nodes have not confirmed"), "{told}");
        assert_eq!(networks.clone().take(&tenant("a"), None, at(2)).unwrap(), first);
        assert!(
            networks.confirm(|_, node| *node == nodes[1], at(3)) && !networks.confirm(|_, _| true, at(4))
        );
        assert_eq!(networks.clone().take(&tenant("b"), wanted, at(100)).unwrap_err().code, "subnet_taken");
        assert!(networks.confirm(|_, _| false, at(5)));
        assert_eq!(networks.clone().take(&tenant("b"), wanted, at(34)).unwrap_err().code, "subnet_taken");
        let (id, subnet) = networks.take(&tenant("b"), wanted, at(35)).unwrap();
        assert_eq!((id, Some(subnet)), (1, wanted), "a net id that was never used comes first");
        // It is another's now.
        assert_ne!(networks.take(&tenant("a"), None, at(36)).unwrap().1, first.1);
    }

    #[test]
    fn a_record_of_the_version_before_is_read() {
        let (freed, resting) = (at(1), at(20));
        let text = format!(
            r#"{{"taken":{{"0":{{"tenant":"a","subnet":"10.240.0.0/20"}},
                "1":{{"tenant":"b","subnet":"10.240.16.0/20","freed_at":"{freed}"}},
                "2":{{"tenant":"c","subnet":"10.240.32.0/20","freed_at":"{resting}"}}}}}}"#
        );
        let mut networks: Networks = serde_json::from_str(&text).unwrap();
        let subnet = |text: &str| Some(text.parse::<Subnet>().unwrap());
        let code = |taken: Result<(u16, Subnet), Problem>| taken.map_err(|problem| problem.code);
        let taken = Err("subnet_taken".to_owned());
        assert_eq!(code(networks.take(&tenant("x"), subnet("10.240.0.0/20"), at(40))), taken);
        assert_eq!(code(networks.take(&tenant("x"), subnet("10.240.32.0/20"), at(40))), taken);
        assert_eq!(networks.take(&tenant("x"), subnet("10.240.16.0/20"), at(40)).unwrap().0, 3);
        assert_eq!(networks.take(&tenant("c"), None, at(40)).unwrap().0, 2);
        // It is written in the new form, and read again.
        let text = String::from_utf8(encode(&networks)).unwrap();
        assert!(!text.contains("taken"), "{text}");
        assert_eq!(serde_json::from_str::<Networks>(&text).unwrap(), networks);
    }

    #[test]
    fn exhausted_is_told_with_its_numbers() {
        let mut networks = Networks::default();
        for number in 0..256 {
            networks.take(&tenant(&format!("t{number}")), None, at(0)).unwrap();
        }
        let told = networks.take(&tenant("x"), None, at(0)).unwrap_err();
        assert_eq!((told.status, told.code.as_str()), (409, "subnets_exhausted"));
        assert!(told.detail.contains("256 in use"), "{told}");
        let named = networks.take(&tenant("x"), Some("192.168.0.0/24".parse().unwrap()), at(0)).unwrap();
        assert_eq!(named.0, 256);
    }
}
