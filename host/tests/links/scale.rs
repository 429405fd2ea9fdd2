//! What one more tenant costs where there are a thousand.

use std::time::{Duration, Instant};

use mvm_host::links::Links;

use crate::net;
use crate::netns::in_own_network;

const TENANTS: u16 = 1000;

/// What it takes when nothing else on the machine is in the way: the kernel has one lock for all links.
fn undisturbed(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort();
    times[times.len() / 10]
}

#[test]
#[allow(clippy::print_stderr)]
fn one_more_tenant_costs_the_same_where_there_are_a_thousand() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let (mut made, mut quiet) = (Vec::new(), Vec::new());
        for net_id in 0..TENANTS {
            let (net, start) = (net(net_id), Instant::now());
            links.ensure_bridge(&net).await.unwrap();
            made.push(start.elapsed());
            let start = Instant::now();
            assert_eq!(links.ensure_bridge(&net).await.unwrap(), []);
            quiet.push(start.elapsed());
        }
        let ends =
            |times: &[Duration]| (undisturbed(&times[..100]), undisturbed(&times[times.len() - 100..]));
        let start = Instant::now();
        let seen = links.observe().await.unwrap();
        let observed = start.elapsed();
        assert_eq!(seen.bridges.len(), usize::from(TENANTS));
        let ((first, last), (first_quiet, last_quiet)) = (ends(&made), ends(&quiet));
        eprintln!("made: {first:?} at first, {last:?} at {TENANTS}");
        eprintln!(
            "found right: {first_quiet:?} at first, {last_quiet:?} at {TENANTS}; all observed in {observed:?}"
        );
        // A listing of all links or addresses in either would cost tens of times more at the end than at first.
        let slack = Duration::from_micros(300);
        assert!(last_quiet < first_quiet * 4 + slack, "{first_quiet:?} grew to {last_quiet:?}");
        assert!(last < first * 4 + slack, "{first:?} grew to {last:?}");
    });
}
