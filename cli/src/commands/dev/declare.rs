//! The objects that a new development cluster has: a tenant and a pool with one instance.

use mvm_client::{ApplyOptions, Name, Objects};
use mvm_proto::object::Object;
use serde_json::{Value, json};
use tokio::time::{Duration, timeout};

use super::context::NAME;
use super::image::REFERENCE;
use crate::exit::Outcome;
use crate::global::Global;
use crate::objects::{failed, within};

pub(super) const POOL: &str = "default";
/// Enough for busybox and a program of one's own; little enough that many fit a laptop.
const MEM_MIB: u32 = 128;

fn objects() -> [Value; 2] {
    [
        json!({ "api_version": "mvm/v1", "kind": "Tenant", "metadata": { "name": NAME }, "spec": {} }),
        json!({
            "api_version": "mvm/v1", "kind": "Pool", "metadata": { "tenant": NAME, "name": POOL },
            "spec": {
                "image": { "ref": REFERENCE },
                "resources": { "vcpus": 1, "mem_mib": MEM_MIB },
                "counts": { "running": 1 },
            },
        }),
    ]
}

/// Applies them. Applied again they are unchanged.
pub(super) async fn declare(global: &Global, client: &mut Objects) -> Result<(), Outcome> {
    for object in objects() {
        within(global.timeout(), client.apply(&object, ApplyOptions::default())).await?;
    }
    Ok(())
}

/// Waits until the coordinator says that the node is ready.
pub(super) async fn node_ready(client: &Objects, node: &Name, limit: Duration) -> Result<bool, Outcome> {
    let is_ready = |object: Option<&Object>| {
        object.is_some_and(|node| node.status.get("state") == Some(&json!("Ready")))
    };
    match timeout(limit, client.wait_for(node, is_ready)).await {
        Ok(answer) => answer.map(|_| true).map_err(failed),
        Err(_) => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use mvm_client::files::{self, Tenant};

    use super::*;

    #[test]
    fn what_is_declared_is_what_a_file_may_declare() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("dev.json");
        std::fs::write(&file, serde_json::to_vec(&objects()).unwrap()).unwrap();
        let entries = files::read(&[file], Tenant { name: None, is_only: false }).unwrap();
        let names: Vec<_> = entries.iter().map(|entry| entry.name().to_string()).collect();
        assert_eq!(names, ["tenant/dev", "pool/dev/default"]);
    }
}
