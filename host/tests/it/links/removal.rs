//! The firewall of a network namespace that no agent will use again.

use mvm_host::{Host as _, HostError, LocalHost, Operation, remove_firewall};

use super::net;
use crate::support::netns::{in_own_network, run};

const TURNS: u32 = 1000;

/// The task that mends rules lets go of the networks when it next runs.
async fn once_released() -> Result<(), HostError> {
    for _ in 0..TURNS {
        match remove_firewall() {
            Err(HostError::Refused(why)) if why.contains("another agent") => tokio::task::yield_now().await,
            other => return other,
        }
    }
    remove_firewall()
}

#[test]
fn the_firewall_is_removed_whole_but_not_from_an_agent_or_from_under_a_tenant() {
    in_own_network(|| async {
        let before = run("nft list ruleset");
        let dir = tempfile::tempdir().unwrap();
        let perform = async |host: &LocalHost, operation| host.perform(&operation).await.unwrap();
        let agent = LocalHost::new(dir.path());
        perform(&agent, Operation::EnsureNet { net: net(1) }).await;
        let refused = remove_firewall().unwrap_err();
        assert!(matches!(&refused, HostError::Refused(why) if why.contains("another agent")), "{refused}");

        drop(agent);
        let refused = once_released().await.unwrap_err();
        assert!(matches!(&refused, HostError::Refused(why) if why.contains("br-tenant-1")), "{refused}");

        let agent = LocalHost::new(dir.path());
        perform(&agent, Operation::RemoveNet { net: net(1) }).await;
        drop(agent);
        assert_ne!(run("nft list ruleset"), before);
        for _ in 0..2 {
            once_released().await.unwrap();
            assert_eq!(run("nft list ruleset"), before);
        }
    });
}
