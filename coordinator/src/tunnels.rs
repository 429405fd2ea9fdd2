//! The tunnels of nodes: at most one each, dialled by the agent when a stream needs it.
//!
//! [`Tunnels::of`] gives a node's tunnel. Where there is none, the node is asked for one on its session, with a ticket that
//! its tunnel has to show: the machine that holds the session is the one that streams go to, even if another has
//! its certificate. [`tunnel_listener`](crate::tunnel_listener) hands over what shows it. Removing a node closes its tunnel.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use mvm_proto::wire::session::v1::{OpenTunnel, request};
use mvm_proto::{NodeId, Problem};
use mvm_transport::{Tunnel, close_code};
use parking_lot::Mutex;

use crate::fleet::Fleet;
use crate::refuse;

/// How long a node may take to dial its tunnel.
const OPEN_WITHIN: Duration = Duration::from_secs(15);

const TICKET_BYTES: usize = 32;

/// The tunnels of this process.
#[derive(Debug, Default)]
pub(crate) struct Tunnels {
    nodes: Mutex<HashMap<NodeId, Arc<NodeTunnel>>>,
    /// Where this process listens for them; 0: not yet.
    port: AtomicU16,
}

#[derive(Debug, Default)]
pub(crate) struct NodeTunnel {
    /// Held while the node is asked, so that a hundred streams ask once.
    asking: tokio::sync::Mutex<()>,
    state: Mutex<NodeState>,
}

#[derive(Debug, Default)]
struct NodeState {
    /// What the next tunnel has to show, and which process of the agent was asked for it.
    ticket: Option<(String, String)>,
    tunnel: Option<Standing>,
}

/// A tunnel, and the agent's process at its other end.
#[derive(Debug)]
struct Standing {
    tunnel: Tunnel,
    process: String,
}

impl NodeTunnel {
    /// Lets go of a tunnel that has ended.
    pub(crate) fn forget_ended(&self) {
        self.state.lock().tunnel.take_if(|standing| standing.tunnel.is_closed());
    }

    /// The tunnel to this process of the agent; to whichever it is, if that is not known.
    fn standing(&self, process: Option<&str>) -> Option<Tunnel> {
        let state = self.state.lock();
        let standing = state.tunnel.as_ref().filter(|standing| !standing.tunnel.is_closed())?;
        process.is_none_or(|process| process == standing.process).then(|| standing.tunnel.clone())
    }
}

impl Tunnels {
    pub(crate) fn listen_on(&self, port: u16) {
        self.port.store(port, Ordering::Relaxed);
    }

    fn entry(&self, node: &NodeId) -> Arc<NodeTunnel> {
        Arc::clone(self.nodes.lock().entry(node.clone()).or_default())
    }

    /// The node's tunnel, dialled now if there is none.
    pub(crate) async fn of(&self, fleet: &Fleet, node: &NodeId) -> Result<Tunnel, Problem> {
        let entry = self.entry(node);
        let process = || fleet.tunnel_process(node);
        // A session that was just lost may come back to a tunnel that still stands.
        if let Some(tunnel) = entry.standing(process().ok().flatten().as_deref()) {
            return Ok(tunnel);
        }
        let _asking = entry.asking.lock().await;
        let process = process()?.ok_or_else(|| agent_too_old(node))?;
        if let Some(tunnel) = entry.standing(Some(&process)) {
            return Ok(tunnel);
        }
        let ticket = ticket()?;
        entry.state.lock().ticket = Some((ticket.clone(), process));
        let port = self.port.load(Ordering::Relaxed).into();
        let ask = request::Ask::OpenTunnel(OpenTunnel { port, ticket });
        let asked = fleet.ask(node, ask, OPEN_WITHIN).await;
        entry.state.lock().ticket = None;
        asked?;
        entry.standing(None).ok_or_else(|| lost(node))
    }

    /// The node's agent was started anew: what stands leads nowhere any more, though no packet says so.
    pub(crate) fn note_process(&self, node: &NodeId, process: &str) {
        let Some(entry) = self.nodes.lock().get(node).cloned() else { return };
        let older = entry.state.lock().tunnel.take_if(|standing| standing.process != process);
        if let Some(older) = older {
            older.tunnel.close(close_code::REPLACED, "the agent was started anew");
        }
    }

    /// Takes a tunnel that shows the node's ticket. The ticket is used up; an older tunnel is closed.
    pub(crate) fn take(&self, node: &NodeId, ticket: &str, tunnel: &Tunnel) -> Option<Arc<NodeTunnel>> {
        let entry = self.nodes.lock().get(node).cloned()?;
        let mut state = entry.state.lock();
        // Random, and good for one try: there is nothing to measure by the time that comparing takes.
        let (_, process) = state.ticket.take_if(|(expected, _)| expected == ticket)?;
        let older = state.tunnel.replace(Standing { tunnel: tunnel.clone(), process });
        drop(state);
        if let Some(older) = older {
            older.tunnel.close(close_code::REPLACED, "replaced by a newer tunnel");
        }
        Some(entry)
    }

    /// Closes the tunnel of a node that was removed.
    pub(crate) fn forget(&self, node: &NodeId) {
        let Some(entry) = self.nodes.lock().remove(node) else { return };
        let standing = std::mem::take(&mut *entry.state.lock()).tunnel;
        if let Some(Standing { tunnel, .. }) = standing {
            tunnel.close(close_code::REMOVED, "the node was removed from the cluster");
        }
    }
}

/// Not to be guessed by a machine that has the node's certificate and has seen other numbers of this process.
fn ticket() -> Result<String, Problem> {
    let mut random = [0; TICKET_BYTES];
    mvm_pki::random_bytes(&mut random).map_err(|error| refuse::internal(&error))?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn agent_too_old(node: &NodeId) -> Problem {
    let detail = format!("the agent of node {node} knows no tunnels");
    Problem::new(
        501,
        "agent_too_old",
        detail,
        "Upgrade it, or ask the agent itself: `--endpoint agent:https://NODE:4434`.",
    )
}

fn lost(node: &NodeId) -> Problem {
    let detail = format!("the tunnel of node {node} was lost");
    Problem::new(503, "tunnel_lost", detail, "Ask again.")
}

/// The node's agent does not keep to the protocol.
pub(crate) fn stream_broken(node: &NodeId) -> Problem {
    let detail = format!("node {node} answered with what is not part of such a stream");
    Problem::new(502, "stream_broken", detail, "Upgrade the agent of the node.")
}

/// The node has no session, or it ended meanwhile.
pub(crate) fn stream_lost(node: &NodeId) -> Problem {
    let detail = format!("the stream to node {node} was lost");
    let remediation = "What was begun goes on: attach to it again by its id.";
    Problem::new(503, refuse::STREAM_LOST, detail, remediation)
}
