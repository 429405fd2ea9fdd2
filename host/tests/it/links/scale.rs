//! What one more tenant costs where there are a thousand.

use std::ops::Range;
use std::time::{Duration, Instant};

use mvm_host::links::Links;

use crate::links::net;
use crate::support::netns::in_own_network;

const TENANTS: u16 = 1000;

/// As many are timed at either end.
const TIMED: u16 = 100;

/// How often the end is timed, with further tenants each time: a machine that was busy then says nothing of the costs.
const TRIES: u16 = 3;

/// What it takes when nothing else on the machine is in the way: the kernel has one lock for all links.
fn undisturbed(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 10]
}

/// What it takes to make the networks of these tenants, and to find them as they should be.
async fn timed(links: &Links, tenants: Range<u16>) -> (Duration, Duration) {
    let (mut made, mut quiet) = (Vec::new(), Vec::new());
    for net_id in tenants {
        let (net, start) = (net(net_id), Instant::now());
        links.ensure_bridge(&net).await.unwrap();
        made.push(start.elapsed());
        let start = Instant::now();
        assert_eq!(links.ensure_bridge(&net).await.unwrap(), []);
        quiet.push(start.elapsed());
    }
    (undisturbed(made), undisturbed(quiet))
}

#[test]
#[allow(clippy::print_stderr)]
fn one_more_tenant_costs_the_same_where_there_are_a_thousand() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let (first, first_quiet) = timed(&links, 0..TIMED).await;
        timed(&links, TIMED..TENANTS - TIMED).await;
        // A listing of all links or addresses in either would cost tens of times more at the end than at first.
        let slack = Duration::from_micros(300);
        for tries in 1..=TRIES {
            let tenants = TENANTS + (tries - 1) * TIMED;
            let (last, last_quiet) = timed(&links, tenants - TIMED..tenants).await;
            let start = Instant::now();
            let seen = links.observe().await.unwrap();
            let observed = start.elapsed();
            assert_eq!(seen.bridges.len(), usize::from(tenants));
            eprintln!("made: {first:?} at first, {last:?} at {tenants}");
            eprintln!(
                "found right: {first_quiet:?} at first, {last_quiet:?} at {tenants}; all observed in {observed:?}"
            );
            if last_quiet < first_quiet * 4 + slack && last < first * 4 + slack {
                return;
            }
        }
        panic!("it grew each time");
    });
}
