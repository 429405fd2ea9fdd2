//! What tenants and instances sent and received, and what the firewall dropped: read from the kernel's own counters.

use std::sync::Arc;

use mvm_host::network::NetworkFound;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::registry::Unit;

/// Tells each counter as the last look found it.
#[derive(Debug, Clone, Default)]
pub(super) struct NetworkCounters {
    found: Arc<Mutex<NetworkFound>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TenantLabels {
    tenant: String,
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InstanceLabels {
    tenant: String,
    instance: String,
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: String,
}

impl NetworkCounters {
    pub(super) fn set(&self, found: &NetworkFound) {
        found.clone_into(&mut self.found.lock());
    }
}

impl Collector for NetworkCounters {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let found = self.found.lock().clone();
        let kind = ConstCounter::new(0_u64).metric_type();
        let help = "Bytes that tenants' instances sent and received";
        let mut tenants = encoder.encode_descriptor("mvm_tenant_network", help, Some(&Unit::Bytes), kind)?;
        for traffic in found.traffic.iter().filter(|traffic| traffic.instance.is_none()) {
            for (direction, bytes) in [("sent", traffic.sent_bytes), ("received", traffic.received_bytes)] {
                let labels = TenantLabels { tenant: traffic.tenant.to_string(), direction };
                ConstCounter::new(bytes).encode(tenants.encode_family(&labels)?)?;
            }
        }
        let help = "Bytes that an instance sent and received since its port was made";
        let mut instances =
            encoder.encode_descriptor("mvm_instance_network", help, Some(&Unit::Bytes), kind)?;
        for traffic in &found.traffic {
            let Some(instance) = &traffic.instance else { continue };
            for (direction, bytes) in [("sent", traffic.sent_bytes), ("received", traffic.received_bytes)] {
                let (tenant, instance) = (traffic.tenant.to_string(), instance.to_string());
                let labels = InstanceLabels { tenant, instance, direction };
                ConstCounter::new(bytes).encode(instances.encode_family(&labels)?)?;
            }
        }
        let help = "Packets that the firewall dropped, by reason";
        let mut dropped = encoder.encode_descriptor("mvm_firewall_dropped_packets", help, None, kind)?;
        for drop in &found.dropped {
            let labels = ReasonLabel { reason: drop.reason.clone() };
            ConstCounter::new(drop.packets).encode(dropped.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
