//! Tenants' bridges and instances' TAPs, brought to what is wanted and kept there.
//!
//! `ensure_*` looks at one link by its name, asks a pure function what differs (`links/repair.rs`), mends that, and looks
//! again until nothing differs: a call that finds everything right writes nothing, and no call's cost grows with the
//! number of tenants. [`Links::observe`] alone looks at all links.
//!
//! The kernel carries out each order before the call that sends it returns, under one lock for all namespaces: a link
//! that goes takes tens of milliseconds of the calling thread.
//!
//! A link is ours by its alias, never by its name alone: one of our name without our alias is refused and left as it
//! is. Each link also bears its name behind a prefix as a second one, which stays when another program renames it: that is how
//! a renamed link is found again without looking at all of them.
//!
//! A TAP is made, put into its bridge and left down; [`Links::open_tap`] is for when the firewall knows it. Settings
//! below `/proc/sys/net` and `/dev/net/tun` are those of the calling thread's network namespace, so a `Links` is used
//! where it was connected.

mod bridge;
mod error;
mod netlink;
mod observed;
mod repair;
mod settings;
mod tap;
mod tun;
mod words;

use std::time::Duration;

use rtnetlink::Handle;
use rtnetlink::proto::ConnectionHandle;
use rtnetlink::sys::AsyncSocket as _;
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use tokio::task::JoinHandle;
use words::Words;

pub use error::LinkError;
pub use observed::{ObservedBridge, ObservedLinks, ObservedTap, PortFlags, Stray};
pub use repair::{Repair, bridge_repairs, tap_mac, tap_repairs};
pub use settings::enable_forwarding;

/// How often a link is looked at and mended before it is given up: one round mends, the second sees that it held, the
/// others are for another program that changes the same link at the same time.
const ROUNDS: u32 = 12;

/// How long to leave another writer alone before the next round; it grows with the rounds.
const ROUND_PAUSE: Duration = Duration::from_millis(4);

/// Changes and looks at links, over two netlink connections that end with it: one for orders and small questions, one
/// for what links are like (`links/words.rs`).
#[derive(Debug)]
pub struct Links {
    handle: Handle,
    reader: ConnectionHandle<Words>,
    connections: [JoinHandle<()>; 2],
}

impl Links {
    /// Connects to the network namespace of the calling thread.
    pub fn connect() -> Result<Self, LinkError> {
        let failed = |cause| LinkError::Io { attempt: "connect to the kernel's netlink".to_owned(), cause };
        let (mut orders, handle, _) = rtnetlink::new_connection().map_err(failed)?;
        let (mut answers, reader, _) = rtnetlink::proto::new_connection(NETLINK_ROUTE).map_err(failed)?;
        // Without it the kernel ignores which link's addresses are asked for, and answers with all of them.
        orders.socket_mut().socket_mut().set_netlink_get_strict_chk(true).map_err(failed)?;
        answers.socket_mut().socket_mut().set_netlink_get_strict_chk(true).map_err(failed)?;
        Ok(Self { handle, reader, connections: [tokio::spawn(orders), tokio::spawn(answers)] })
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.connections.iter().for_each(JoinHandle::abort);
    }
}

/// The second name of a link, which renaming leaves alone.
fn mark_of(name: &str) -> String {
    format!("{MARK_PREFIX}{name}")
}

const MARK_PREFIX: &str = "mvm-";

/// Lets another writer finish.
async fn pause(round: u32) {
    tokio::time::sleep(ROUND_PAUSE * (round + 1)).await;
}
