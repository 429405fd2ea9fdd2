//! Net ids and subnets of tenants: which are taken, and which are free again.
//!
//! One record holds all, and every transaction that gives one out is guarded by it, so that no two tenants ever share.
//! What a deleted tenant had is given out again only after [`REST`]: until then an instance that was missed may have it.

use std::collections::BTreeMap;
use std::time::Duration;

use mvm_proto::document::{MAX_TENANT_NET_ID, Subnet};
use mvm_proto::{Problem, Timestamp};
use serde::{Deserialize, Serialize};

pub(crate) const NETWORKS_KEY: &str = "meta/networks";
/// How long the net id and the subnet of a deleted tenant are left alone.
const REST: Duration = Duration::from_secs(30 * 24 * 3600);
/// Subnets that are given out: the /20s of 10.240.0.0/12.
const FIRST_SUBNET: u32 = u32::from_be_bytes([10, 240, 0, 0]);
const SUBNET_PREFIX: u8 = 20;
const SUBNETS: u32 = 1 << (SUBNET_PREFIX - 12);

/// Who has which net id and subnet, by net id.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Networks {
    taken: BTreeMap<u16, Taken>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Taken {
    tenant: String,
    subnet: Subnet,
    /// Since when its tenant is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    freed_at: Option<Timestamp>,
}

impl Networks {
    /// A net id and a subnet for a new tenant: the subnet that it asks for, or a free one.
    pub(crate) fn take(
        &mut self,
        tenant: &str,
        wanted: Option<Subnet>,
        now: Timestamp,
    ) -> Result<(u16, Subnet), Problem> {
        self.taken.retain(|_, taken| taken.freed_at.is_none_or(|at| now.since(at) < REST));
        // One that was deleted and is declared again gets back what its instances may still have.
        let own = self.taken.iter().find(|(_, taken)| taken.tenant == tenant);
        if let Some((id, taken)) = own.map(|(id, taken)| (*id, taken.clone()))
            && wanted.is_none_or(|wanted| wanted == taken.subnet)
        {
            self.taken.insert(id, Taken { freed_at: None, ..taken.clone() });
            return Ok((id, taken.subnet));
        }
        let overlapping =
            |subnet: &Subnet| self.taken.values().find(|taken| taken.subnet.overlaps(subnet)).cloned();
        let subnet = match wanted {
            Some(subnet) => match overlapping(&subnet) {
                None => subnet,
                Some(Taken { tenant: other, subnet: theirs, .. }) => {
                    let detail = format!("the subnet {subnet} overlaps {theirs} of tenant {other}");
                    let advice = "Choose another subnet, or leave it out to be given one.";
                    return Err(Problem::new(422, "subnet_taken", detail, advice));
                }
            },
            None => (0..SUBNETS)
                .filter_map(nth_subnet)
                .find(|subnet| overlapping(subnet).is_none())
                .ok_or_else(|| {
                    let detail = format!("all {SUBNETS} subnets of 10.240.0.0/12 are taken");
                    Problem::new(409, "subnets_exhausted", detail, "Name a subnet of another private range.")
                })?,
        };
        let id = (0..=MAX_TENANT_NET_ID).find(|id| !self.taken.contains_key(id)).ok_or_else(|| {
            let detail = format!("all {} net ids are taken", u32::from(MAX_TENANT_NET_ID) + 1);
            Problem::new(
                409,
                "net_ids_exhausted",
                detail,
                "Delete tenants; ids are free again after 30 days.",
            )
        })?;
        self.taken.insert(id, Taken { tenant: tenant.to_owned(), subnet, freed_at: None });
        Ok((id, subnet))
    }

    /// The tenant is gone from every node.
    pub(crate) fn free(&mut self, tenant: &str, now: Timestamp) {
        for taken in self.taken.values_mut().filter(|taken| taken.tenant == tenant) {
            taken.freed_at.get_or_insert(now);
        }
    }
}

fn nth_subnet(index: u32) -> Option<Subnet> {
    let address = std::net::Ipv4Addr::from_bits(FIRST_SUBNET + (index << (32 - SUBNET_PREFIX)));
    format!("{address}/{SUBNET_PREFIX}").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(days: i64) -> Timestamp {
        Timestamp::from_unix_ms(days * 24 * 3_600_000)
    }

    #[test]
    fn no_two_tenants_share_an_id_or_an_address() {
        let mut networks = Networks::default();
        let first = networks.take("a", None, at(0)).unwrap();
        let own = networks.take("b", Some("10.240.16.0/24".parse().unwrap()), at(0)).unwrap();
        let third = networks.take("c", None, at(0)).unwrap();
        assert_eq!((first.0, first.1.to_string().as_str()), (0, "10.240.0.0/20"));
        assert_eq!((own.0, third.0, third.1.to_string().as_str()), (1, 2, "10.240.32.0/20"));
        let taken = networks.take("d", Some("10.240.0.0/16".parse().unwrap()), at(0)).unwrap_err();
        assert_eq!(taken.code, "subnet_taken");
    }

    #[test]
    fn what_a_deleted_tenant_had_rests_and_comes_back_to_it_alone() {
        let mut networks = Networks::default();
        let first = networks.take("a", None, at(0)).unwrap();
        networks.free("a", at(1));
        assert_ne!(networks.clone().take("b", None, at(2)).unwrap(), first);
        assert_eq!(networks.clone().take("a", None, at(2)).unwrap(), first);
        assert_ne!(networks.clone().take("b", None, at(30)).unwrap(), first);
        assert_eq!(networks.take("b", None, at(31)).unwrap(), first);
    }

    #[test]
    fn exhausted_is_told() {
        let mut networks = Networks::default();
        for tenant in 0..SUBNETS {
            networks.take(&tenant.to_string(), None, at(0)).unwrap();
        }
        assert_eq!(networks.take("x", None, at(0)).unwrap_err().code, "subnets_exhausted");
        for id in SUBNETS..=u32::from(MAX_TENANT_NET_ID) {
            let subnet =
                format!("172.{}.{}.{}/29", 16 + id / 8192, id / 32 % 256, id % 32 * 8).parse().unwrap();
            networks.take(&id.to_string(), Some(subnet), at(0)).unwrap();
        }
        let last = networks.take("x", Some("192.168.0.0/24".parse().unwrap()), at(0));
        assert_eq!(last.unwrap_err().code, "net_ids_exhausted");
    }
}
