//! What is left after hundreds of tenants came and went. Alone in its process, so that all open files are its own.

use super::tenants::{net, tenant};
use crate::support::netns::{in_own_network, link_names};
use mvm_host::links::{Links, ObservedLinks};

/// In every run of the tests, beside the whole node's own; `make soak` asks for more.
const CYCLES: u16 = 100;
const CYCLES_VARIABLE: &str = "MVM_CYCLES";

fn how_many() -> u16 {
    std::env::var(CYCLES_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(CYCLES)
}

/// The kernel waits long for each link that goes, but for several at once.
const THREADS: u16 = 5;

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn hundreds_of_cycles_leave_links_and_files_as_they_were() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let before = (link_names(), open_files());
        let threads: Vec<_> = (0..THREADS).map(|net_id| std::thread::spawn(move || cycles(net_id))).collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!((link_names(), open_files()), before);
        assert_eq!(links.observe().await.unwrap(), ObservedLinks::default());
    });
}

/// A tenant with two instances, again and again.
fn cycles(net_id: u16) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let links = Links::connect().unwrap();
        for _ in 0..how_many() / THREADS {
            for port in tenant(&links, &net(net_id)).await {
                assert!(links.remove_tap(&port.tap()).await.unwrap());
            }
            assert!(links.remove_bridge(net_id).await.unwrap());
        }
    });
}
