//! How long a push waits for its node where `--timeout` does not say: as long as the document's own times add up to.

use std::time::Duration;

use mvm_proto::DesiredState;
use mvm_proto::document::Pool;

/// The way to the node and back, and a pass of its agent.
const DELIVERY: Duration = Duration::from_secs(30);
/// A guest's boot, on a loaded machine without KVM.
const BOOT: Duration = Duration::from_secs(30);
/// The first time, a node makes an image that no digest names: packages are downloaded, or a flake is built.
const IMAGE: Duration = Duration::from_secs(300);
/// Longer waits are asked for by `--timeout`.
const LONGEST: Duration = Duration::from_secs(3600);

/// The time of the slowest pool: pools are brought up beside each other.
pub(super) fn patience(desired: &DesiredState) -> Duration {
    let slowest = desired.pools().map(|(_, pool)| of_pool(pool)).max().unwrap_or_default();
    (DELIVERY + slowest).min(LONGEST)
}

/// A rollout takes one instance after the other, none before its shortest run is over, and the one that stands in for
/// them has its own.
fn of_pool(pool: &Pool) -> Duration {
    let (policy, counts) = (&pool.runtime_policy, &pool.desired_counts);
    let seconds = |seconds: u64| Duration::from_secs(seconds.min(LONGEST.as_secs()));
    let held = seconds(policy.min_running_seconds.max(policy.min_warm_seconds));
    let warm_up = pool.warmup.as_ref().map_or(Duration::ZERO, |warm_up| seconds(warm_up.timeout_seconds));
    let image = if pool.image_digest.is_none() { IMAGE } else { Duration::ZERO };
    let each = BOOT + seconds(policy.drain_timeout_seconds) + seconds(policy.graceful_shutdown_seconds);
    let instances = counts.running + counts.warm + counts.sleeping;
    image + warm_up + held * 2 + each * instances
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(more: &str) -> DesiredState {
        let text = format!(
            r#"{{"schema_version": 1, "node_id": "n", "tenants": [{{"tenant_id": "acme",
                "network": {{"tenant_net_id": 1, "ipv4_subnet": "10.1.0.0/24"}},
                "quotas": {{"max_vcpus": 9, "max_mem_mib": 9999, "max_running": 9, "max_warm": 9, "max_pools": 9,
                    "max_instances_per_pool": 200, "max_disk_gib": 9}},
                "pools": [{{"pool_id": "web", "flake_ref": "builtin:busybox", "profile": "minimal",
                    "instance_resources": {{"vcpus": 1, "mem_mib": 64, "data_disk_mib": 0}} {more}}}]}}]}}"#
        );
        DesiredState::parse(text.as_bytes()).unwrap()
    }

    const DIGEST: &str =
        r#", "image_digest": "sha256:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae""#;

    #[test]
    fn a_push_waits_as_long_as_the_documents_own_times_come_to() {
        let nothing = DesiredState { tenants: Vec::new(), ..document(COUNTS) };
        assert_eq!(patience(&nothing), Duration::from_secs(30));
        // Twice the shortest run, then boot, drain and shutdown of both; and the image may have to be made.
        assert_eq!(patience(&document(&format!("{COUNTS}{DIGEST}"))), Duration::from_secs(30 + 120 + 2 * 75));
        assert_eq!(patience(&document(COUNTS)), Duration::from_secs(30 + 120 + 2 * 75 + 300));
        let slow = r#", "runtime_policy": {"min_running_seconds": 600, "drain_timeout_seconds": 60}"#;
        let slow = document(&format!("{COUNTS}{DIGEST}{slow}"));
        assert_eq!(patience(&slow), Duration::from_secs(30 + 1200 + 2 * 105));
    }

    #[test]
    fn no_document_makes_a_push_wait_longer_than_an_hour() {
        let long = r#", "runtime_policy": {"min_running_seconds": 9007199254740991}"#;
        assert_eq!(patience(&document(&format!("{COUNTS}{long}"))), LONGEST);
    }

    const COUNTS: &str = r#", "desired_counts": {"running": 2, "warm": 0, "sleeping": 0}"#;
}
