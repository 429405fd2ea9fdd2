//! Tenants and instances that come and go leave nothing behind.

use std::sync::Arc;
use std::time::Duration;

use mvm_agent::clock::Clock;
use mvm_agent::isolation::{IsolationSettings, NetworkMode};
use mvm_agent::node::CurrentDocument;
use mvm_agent::node::assemble::Node;
use mvm_agent::node::assemble::NodeSettings;
use mvm_agent::node::handle::NodeHandle;
use mvm_agent::node::reconcile_task::reconcile_task;
use mvm_agent::persist::SessionLimits;
use mvm_proto::DesiredState;
use mvm_proto::status::{Capacity, ConditionKind};
use mvm_vmm::DriverKind;
use mvm_vmm::VmmSettings;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::network::namespace::{Left, in_namespace, printed};

/// In every run of the tests; `make soak` asks for more.
const CYCLES: u32 = 500;
const CYCLES_VARIABLE: &str = "MVM_CYCLES";

/// A cycle takes some ten milliseconds; a machine that is busy with other tests, more.
const PATIENCE: Duration = Duration::from_secs(30);

fn settings(data_dir: &std::path::Path) -> NodeSettings {
    NodeSettings {
        node_id: "node-a".parse().unwrap(),
        data_dir: data_dir.to_owned(),
        driver: DriverKind::Fake,
        host: None,
        vmm: VmmSettings::default(),
        images_dir: data_dir.join("images"),
        vouched: mvm_image::Vouched::unchecked(),
        secrets_dir: data_dir.join("secrets"),
        sessions_dir: data_dir.join("sessions"),
        session_limits: SessionLimits::default(),
        sweep_after: Duration::from_secs(60),
        boot_deadline: Duration::from_secs(90),
        capacity: Capacity { vcpus: 64, mem_mib: 65_536, disk_mib: 1_000_000, max_instances: 100 },
        isolation: IsolationSettings { network: NetworkMode::Bridges, ..IsolationSettings::NONE },
        interval: Duration::from_secs(30),
        parallel_steps: 4,
        tracer: mvm_telemetry::Tracer::default(),
        clock: Clock::system(),
    }
}

/// So many tenants with an instance each; the numbers of their networks change from one cycle to the next.
fn document(cycle: u32, tenants: u32) -> Arc<CurrentDocument> {
    let tenant = |number: u32| {
        let net = (cycle + number) % 4096;
        let subnet = format!("10.{}.{}.0/24", net / 256, net % 256);
        json!({
            "tenant_id": format!("tenant-{number}"),
            "network": { "tenant_net_id": net, "ipv4_subnet": subnet },
            "quotas": { "max_vcpus": 9, "max_mem_mib": 9999, "max_running": 9, "max_warm": 9, "max_pools": 9,
                "max_instances_per_pool": 9, "max_disk_gib": 9 },
            "egress": { "mode": if number == 0 { "nat" } else { "none" } },
            "pools": [{
                "pool_id": "web", "flake_ref": "builtin:busybox", "profile": "minimal",
                "instance_resources": { "vcpus": 1, "mem_mib": 64, "data_disk_mib": 0 },
                "desired_counts": { "running": 1, "warm": 0, "sleeping": u32::from(number == 0) },
                "runtime_policy": { "min_running_seconds": 0, "min_warm_seconds": 0 },
                "stopped_retention_seconds": 0,
            }],
        })
    };
    let text = json!({
        "schema_version": 1, "node_id": "node-a",
        "prune_unknown_tenants": true, "prune_unknown_pools": true,
        "tenants": (0..tenants).map(tenant).collect::<Vec<_>>(),
    });
    CurrentDocument::local(DesiredState::parse(text.to_string().as_bytes()).unwrap())
}

/// Waits until the node is as the document that was just given says.
async fn settled(handle: &NodeHandle, tenants: u32) {
    let mut status = handle.status();
    let instances = if tenants == 0 { 0 } else { tenants as usize + 1 };
    let wanted = status.wait_for(|status| {
        let converged = status.conditions.iter().any(|c| c.is(ConditionKind::Converged) && c.holds());
        converged && status.pools.len() == tenants as usize && handle.instances(None).len() == instances
    });
    let waited = tokio::time::timeout(PATIENCE, wanted).await;
    drop(waited.unwrap_or_else(|_| panic!("not settled: {:?}", handle.status().borrow().conditions)));
}

async fn cycles(data_dir: &std::path::Path, count: u32) {
    let (node, handle) = Node::open(settings(data_dir)).await.unwrap();
    let documents = watch::Sender::new(Some(document(0, 0)));
    let stop = CancellationToken::new();
    let task = tokio::spawn(reconcile_task(node, documents.subscribe(), stop.clone()));
    settled(&handle, 0).await;
    let mut before = None;
    for cycle in 0..count {
        documents.send_replace(Some(document(cycle, 1)));
        settled(&handle, 1).await;
        if cycle == 0 {
            let links = printed("ip", &["-br", "link"]);
            assert!(links.contains("br-tenant-0"), "{links}");
            assert_eq!(links.matches("tn").count(), 1, "one of its two instances sleeps: {links}");
        }
        documents.send_replace(Some(document(cycle, 0)));
        settled(&handle, 0).await;
        // What is made once and kept - tables, connections - is there after the first.
        if cycle == 0 {
            before = Some(Left::look(data_dir));
        }
    }
    assert_eq!(Left::look(data_dir), before.unwrap());
    stop.cancel();
    task.await.unwrap();
}

#[test]
fn tenants_and_instances_that_come_and_go_leave_nothing_behind() {
    let count = std::env::var(CYCLES_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(CYCLES);
    in_namespace(move || {
        let dir = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(cycles(dir.path(), count));
    });
}
