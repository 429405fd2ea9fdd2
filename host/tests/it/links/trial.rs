//! The trial of a tenant's network, with the rights for it and without.

use mvm_host::{Host as _, HostError, LocalHost, Operation, Outcome, try_network};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::support::netns::{in_own_network, link_names, run};

#[test]
fn a_network_is_tried_without_a_trace_and_what_can_not_be_made_is_told() {
    in_own_network(|| async {
        let (links, rules) = (link_names(), run("nft list ruleset"));
        let dir = tempfile::tempdir().unwrap();
        let tried = LocalHost::new(dir.path()).perform(&Operation::TryNetwork).await;
        assert_eq!(tried.unwrap(), Outcome::Done);
        assert_eq!((link_names(), run("nft list ruleset")), (links, rules));

        // The trial's thread has the rights of the one that starts it: to a namespace, and to nothing in it.
        let mut held = capabilities(None).unwrap();
        held.effective.remove(CapabilitySet::NET_ADMIN);
        set_capabilities(None, held).unwrap();
        let refused = try_network().unwrap_err();
        assert!(matches!(&refused, HostError::Network { .. }), "{refused}");

        held.effective.remove(CapabilitySet::SYS_ADMIN);
        set_capabilities(None, held).unwrap();
        assert!(try_network().is_ok(), "nothing is known to be missing");
    });
}
