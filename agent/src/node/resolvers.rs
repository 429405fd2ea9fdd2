//! Tenants whose guests may reach the world and are told no resolver: names do not resolve in them unless their image
//! brings one of its own. That is told, once as an event and for as long as it holds as a condition.

use std::collections::BTreeSet;

use mvm_proto::document::EgressMode;
use mvm_proto::status::{Condition, ConditionKind, Event};
use mvm_proto::{DesiredState, TenantId, Timestamp};

/// How many tenants the condition names.
const NAMED: usize = 3;
const ADVICE: &str = "egress is nat, and guests are told no resolver: no name resolves in them unless their image has one. \
                      Run a resolver on the host that listens on the tenants' bridges, and start the agent with --gateway-dns";

#[derive(Debug, Default)]
pub(crate) struct Resolvers {
    without: BTreeSet<TenantId>,
}

impl Resolvers {
    /// Looks at the document; answers what there is to tell. `given`: whether guests are told their gateway as a resolver,
    /// or have no network at all.
    pub(crate) fn look(&mut self, desired: &DesiredState, given: bool, now: Timestamp) -> Vec<Event> {
        let outward = desired.tenants.iter().filter(|tenant| tenant.egress.mode == EgressMode::Nat && !given);
        let without: BTreeSet<TenantId> = outward.map(|tenant| tenant.tenant_id.clone()).collect();
        let new = without.difference(&self.without);
        let events = new.map(|tenant| Event {
            at: now.to_string(),
            kind: "NoResolver".to_owned(),
            subject: tenant.to_string(),
            message: ADVICE.to_owned(),
        });
        let events = events.collect();
        self.without = without;
        events
    }

    pub(crate) fn condition(&self, now: Timestamp) -> Condition {
        if self.without.is_empty() {
            return Condition::new(ConditionKind::DnsReady, true, "Ready", "", now);
        }
        let named: Vec<_> = self.without.iter().take(NAMED).map(TenantId::as_str).collect();
        let more = self.without.len().saturating_sub(NAMED);
        let rest = if more > 0 { format!(" (and {more} more)") } else { String::new() };
        Condition::new(
            ConditionKind::DnsReady,
            false,
            "NoResolver",
            format!("{}{rest}: {ADVICE}", named.join(", ")),
            now,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(mode: &str) -> DesiredState {
        let tenant = |id: &str, net: u8, mode: &str| {
            format!(
                r#"{{"tenant_id": "{id}", "network": {{"tenant_net_id": {net}, "ipv4_subnet": "10.1.{net}.0/24"}},
                    "quotas": {{"max_vcpus": 9, "max_mem_mib": 9, "max_running": 9, "max_warm": 9, "max_pools": 9,
                        "max_instances_per_pool": 9, "max_disk_gib": 9}},
                    "egress": {{"mode": "{mode}"}}, "pools": []}}"#
            )
        };
        let tenants = [tenant("acme", 1, mode), tenant("inward", 2, "none")].join(",");
        let text = format!(r#"{{"schema_version": 1, "node_id": "n", "tenants": [{tenants}]}}"#);
        DesiredState::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_tenant_with_nat_and_no_resolver_is_told_once_as_an_event_and_for_as_long_as_a_condition() {
        let (now, mut resolvers) = (Timestamp::from_unix_ms(0), Resolvers::default());
        let (nat, inward) = (document("nat"), document("none"));
        assert_eq!(resolvers.look(&inward, false, now), []);
        assert_eq!(resolvers.condition(now).status, "True");
        let told = resolvers.look(&nat, false, now);
        assert_eq!((told.len(), told[0].kind.as_str(), told[0].subject.as_str()), (1, "NoResolver", "acme"));
        assert_eq!(resolvers.look(&nat, false, now), [], "told once");
        let condition = resolvers.condition(now);
        assert_eq!((condition.status.as_str(), condition.reason.as_str()), ("False", "NoResolver"));
        assert!(condition.message.starts_with("acme: ") && condition.message.contains("--gateway-dns"));
        // With a resolver, or without any network.
        assert_eq!(resolvers.look(&nat, true, now), []);
        assert_eq!(resolvers.condition(now).status, "True");
        assert_eq!(resolvers.look(&nat, false, now).len(), 1, "told again when it comes back");
    }
}
