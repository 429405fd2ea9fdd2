//! A real coordinator under peers that mean harm, while an honest agent and an operator are served.
//!
//! Each test is one attack of a few seconds with stated ceilings: what the coordinator's memory, processor time and log
//! may grow by, and how much longer the operator may wait for an answer that an honest agent gives. Peers are on
//! loopback; every load is bounded in number and time.

mod attacks;
mod site;

use site::{Ceilings, Site};

const MIB: u64 = 1 << 20;

#[test]
fn a_removed_node_that_sends_bombs_costs_nothing() {
    let mut site = Site::start();
    let removed = site.enrol("removed");
    site.cluster.mvm_ok(&["node", "remove", "removed"]);
    let ceilings = Ceilings { memory_bytes: 64 * MIB, ..Ceilings::default() };
    site.under("a removed node's bombs", ceilings, |stop| attacks::bombs_before_hello(removed, stop));
}

#[test]
fn a_node_that_sends_bombs_costs_its_own_sessions() {
    let mut site = Site::start();
    let hostile = site.enrol("hostile");
    let ceilings = Ceilings { memory_bytes: 96 * MIB, ..Ceilings::default() };
    site.under("bombs", ceilings, |stop| attacks::bombs(hostile, stop));
    assert!(!site.is_connected("hostile"), "it was closed");
}

#[test]
fn a_node_whose_status_is_as_large_as_can_be_costs_its_own_row() {
    let mut site = Site::start();
    let hostile = site.enrol("hostile");
    let ceilings = Ceilings { memory_bytes: 128 * MIB, ..Ceilings::default() };
    site.under("large statuses", ceilings, |stop| attacks::statuses(hostile, stop));
    let info = site.cluster.node("hostile").expect("the node is known");
    let conditions = info["status"]["conditions"].as_array().expect("a list").clone();
    assert!(conditions.iter().any(|one| one["type"] == "StatusComplete"), "{conditions:?}");
    let list = site.cluster.mvm_json(&["node", "list"]);
    assert_eq!(list.as_array().map(Vec::len), Some(2), "both nodes are listed");
}

#[test]
fn a_node_that_refuses_without_end_does_not_fill_the_log() {
    let mut site = Site::start();
    let hostile = site.enrol("hostile");
    site.under("refusals", Ceilings::default(), |stop| attacks::refusals(hostile, stop));
}

#[test]
fn a_node_that_sends_garbage_costs_its_own_sessions() {
    let mut site = Site::start();
    let hostile = site.enrol("hostile");
    site.under("garbage", Ceilings::default(), |stop| attacks::garbage(hostile, stop));
}

#[test]
fn a_node_that_beats_without_pause_is_read_at_a_pace() {
    let mut site = Site::start();
    let hostile = site.enrol("hostile");
    site.under("heartbeats", Ceilings::default(), |stop| attacks::heartbeats(hostile, stop));
}

#[test]
fn connections_without_a_certificate_do_not_lock_nodes_out() {
    let mut site = Site::start();
    let late = site.enrol("late");
    let flood = site.anonymous();
    let ceilings = Ceilings { memory_bytes: 96 * MIB, ..Ceilings::default() };
    site.under_then(
        "anonymous connections",
        ceilings,
        |stop| attacks::anonymous(flood, stop),
        |site| {
            site.runtime.block_on(late.welcomed());
            site.cluster.mvm_ok(&["node", "list"]);
        },
    );
}

#[test]
fn idle_connections_with_a_removed_nodes_certificate_keep_no_operator_out() {
    let mut site = Site::start();
    let removed = site.enrol("removed");
    site.cluster.mvm_ok(&["node", "remove", "removed"]);
    let target = site.target();
    let ceilings = Ceilings { memory_bytes: 96 * MIB, log_lines: 1000, ..Ceilings::default() };
    site.under_then(
        "idle TLS connections",
        ceilings,
        |stop| attacks::idle_grpc(removed, target, stop),
        |site| {
            site.cluster.mvm_ok(&["node", "list"]);
        },
    );
}
