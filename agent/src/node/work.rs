//! Passes the host's measurements of running guests to their links, which decide whether a guest is idle.
//!
//! Paused and sleeping instances are not measured, and the firewall's counters are those of the last network check.

use mvm_host::network::NetworkFound;
use mvm_proto::Phase;
use mvm_vmm::{AnyDriver, Driver};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::guest::{GuestLinks, LOOK_EVERY};
use crate::instance::records::Records;

#[derive(Debug)]
pub(crate) struct WorkWatch {
    network: watch::Receiver<NetworkFound>,
    /// When processor times were last looked at.
    last: Option<Instant>,
}

impl WorkWatch {
    pub(crate) fn new(network: watch::Receiver<NetworkFound>) -> Self {
        Self { network, last: None }
    }

    /// Reads the processor time of every VMM whose guest runs, unless it was read a moment ago.
    pub(crate) fn look_at_processors(&mut self, driver: &AnyDriver, records: &Records, links: &GuestLinks) {
        let at = Instant::now();
        if self.last.is_some_and(|last| at.duration_since(last) < LOOK_EVERY) {
            return;
        }
        self.last = Some(at);
        let mut running = Vec::new();
        records.for_each(|record, moving| {
            if record.phase == Phase::Running && moving.is_none() {
                running.push((record.id.clone(), record.resources.vcpus));
            }
        });
        for (id, vcpus) in running {
            if let Some(taken) = driver.cpu_time(&id) {
                links.hear_vmm_cpu(&id, taken, vcpus, at);
            }
        }
    }

    /// Takes the bytes of every instance from the last look at the network, if there was one since this was asked.
    pub(crate) fn look_at_ports(&mut self, links: &GuestLinks) {
        if !self.network.has_changed().unwrap_or(false) {
            return;
        }
        let at = Instant::now();
        for traffic in &self.network.borrow_and_update().traffic {
            if let Some(instance) = &traffic.instance {
                links.hear_bytes(instance, traffic.sent_bytes.saturating_add(traffic.received_bytes), at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use mvm_host::network::Traffic;
    use mvm_proto::document::Resources;
    use mvm_proto::guest::Reborn;
    use mvm_proto::{Digest, InstanceId, Timestamp};

    use super::*;
    use crate::clock::Clock;
    use mvm_image::BootImage;
    use mvm_vmm::{Bounds, FakeDriver, VmSpec};

    fn found(id: &InstanceId, received_bytes: u64) -> NetworkFound {
        let of = |instance: Option<InstanceId>| Traffic {
            tenant: "acme".parse().unwrap(),
            instance,
            sent_packets: 1,
            sent_bytes: 1,
            received_packets: 1,
            received_bytes,
        };
        NetworkFound { traffic: vec![of(None), of(Some(id.clone()))], ..NetworkFound::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn an_instance_through_whose_port_bytes_go_is_idle_only_from_when_they_stop() {
        let id = InstanceId::from_bits(7);
        let driver = Arc::new(FakeDriver::in_memory());
        let spec = VmSpec {
            instance: id.clone(),
            revision: Digest::of(b"any"),
            resources: Resources { vcpus: 1, mem_mib: 128, data_disk_mib: 0 },
            image: BootImage::imagined("builtin:busybox"),
            bounds: Bounds::default(),
            purpose: mvm_vmm::Purpose::default(),
        };
        driver.boot(&spec).await.unwrap();
        let begun = Timestamp::from_unix_ms(1_000_000);
        let links = GuestLinks::new(Arc::clone(&driver), Clock::starting_at(begun));
        links.open(&id);
        let within = Duration::from_secs(10);
        links.reborn(&id, Reborn { generation: 1, ..Reborn::default() }, within).await.unwrap();
        links.ready(&id, Instant::now() + within).await.unwrap();
        let (network, receiver) = watch::channel(NetworkFound::default());
        let mut work = WorkWatch::new(receiver);
        let mut looks = Vec::new();
        for received in [500, 900, 90_000, 180_000, 180_100, 180_200] {
            network.send_replace(found(&id, received));
            work.look_at_ports(&links);
            // Asked again without a new look, nothing is taken for a quiet time.
            work.look_at_ports(&links);
            looks.push(links.view(&id).unwrap().idle_since.map(|at| at.since(begun).as_secs()));
            tokio::time::advance(Duration::from_secs(30)).await;
        }
        assert_eq!(looks, [Some(0), Some(0), None, None, Some(120), Some(120)]);
    }
}
