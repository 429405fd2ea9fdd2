//! What hostile peers do. Each attack goes on until it is told to stop, or has done its number; it tells how often.

use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use mvm_client::connect;
use mvm_proto::Digest;
use mvm_proto::status::{Condition, Mark, NodeStatus, PoolStatus};
use mvm_proto::wire::session::v1::{Ack, Acks, AgentFrame, Heartbeat, Stage, agent_frame};
use mvm_tests::PATIENCE;
use mvm_transport::frame::encode_once;
use mvm_transport::{ClientSession, Target};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::hostile_peers::site::{Peer, Stop, cluster_id};

/// Frames or sessions of one attack.
const MANY: u64 = 20_000;
/// Sessions that bombs are sent on: each bomb is 8 MiB, which the attacker has to encrypt too.
const BOMBS: u64 = 200;
/// Connections without a certificate, and idle ones with a node's: more than all operators may have.
const ANONYMOUS: usize = 256;
const IDLE: usize = 300;
/// Opened at the same time.
const AT_ONCE: usize = 16;
/// Attempts to connect without a certificate after which that attack is in place: more than one address may hold.
const IN_PLACE: usize = 96;
/// How long one connection without a certificate may take to open: those above a limit may never be answered.
const OPEN_WAIT: Duration = Duration::from_secs(2);
/// How long one frame may take before it is given up.
const FRAME_WAIT: Duration = Duration::from_secs(5);

/// Holds what was opened until the attack is over.
async fn hold(stop: &Stop) {
    stop.mark_in_place();
    let mut look = tokio::time::interval(Duration::from_millis(10));
    while !stop.stopped() {
        look.tick().await;
    }
}

/// A frame of 8 MiB: acks that are empty, two bytes each.
fn bomb() -> Bytes {
    let pairs: usize = 4 << 20;
    let mut frame = BytesMut::with_capacity(2 * pairs + 16);
    frame.put_u32(u32::try_from(1 + 4 + 2 * pairs).expect("it fits"));
    frame.put_u8((2 << 3) | 2);
    // 2 * pairs is 2^23: a varint of four bytes.
    frame.put_slice(&[0x80, 0x80, 0x80, 0x04]);
    frame.resize(frame.len() + 2 * pairs, 0);
    let start = frame.len() - 2 * pairs;
    frame[start..].iter_mut().step_by(2).for_each(|byte| *byte = 0x0a);
    frame.freeze()
}

/// Sends a frame until it is sent, refused, or takes too long; `false` when the session is over.
async fn fire(session: &mut ClientSession, frame: Bytes) -> bool {
    matches!(timeout(FRAME_WAIT, session.frames_out.send_encoded(frame)).await, Ok(Ok(())))
}

/// Waits a little for the coordinator to close what it has every reason to close.
async fn closed(session: &ClientSession) {
    let _ = timeout(FRAME_WAIT, session.control.closed()).await;
}

/// A bomb instead of a hello, on one session after the other.
pub(crate) async fn bombs_before_hello(peer: Peer, stop: Stop) -> u64 {
    let (bomb, mut done) = (bomb(), 0);
    stop.mark_in_place();
    while !stop.stopped() && done < BOMBS {
        done += 1;
        let Ok(mut session) = peer.dial().await else { continue };
        fire(&mut session, bomb.clone()).await;
        closed(&session).await;
    }
    done
}

/// Says hello, then sends a bomb.
pub(crate) async fn bombs(peer: Peer, stop: Stop) -> u64 {
    let (bomb, mut done) = (bomb(), 0);
    stop.mark_in_place();
    while !stop.stopped() && done < BOMBS {
        done += 1;
        let Some(mut session) = peer.greet().await else { continue };
        fire(&mut session, bomb.clone()).await;
        closed(&session).await;
    }
    done
}

/// The same frame again and again, on a new session whenever the last one was closed.
async fn repeat(peer: &Peer, stop: &Stop, frame: Bytes) -> u64 {
    let (mut session, mut done) = (None, 0);
    stop.mark_in_place();
    while !stop.stopped() && done < MANY {
        if session.is_none() {
            session = peer.greet().await;
        }
        done += 1;
        if let Some(open) = &mut session
            && !fire(open, frame.clone()).await
        {
            session = None;
        }
    }
    done
}

fn frame(body: agent_frame::Body) -> Bytes {
    encode_once(&AgentFrame { body: Some(body) })
}

/// Many pools, long names, long texts, and numbers that do not add up.
pub(crate) async fn statuses(peer: Peer, stop: Stop) -> u64 {
    let long = Condition { r#type: "x".repeat(5000), message: "\u{1}".repeat(5000), ..Condition::default() };
    let pool = PoolStatus {
        tenant_id: "\u{1}".repeat(100),
        deferred: vec![String::new(); 20],
        ..PoolStatus::default()
    };
    let status = NodeStatus {
        node_id: peer.name.clone(),
        conditions: vec![long; 50],
        pools: vec![pool; 8_000],
        ..NodeStatus::default()
    };
    repeat(&peer, &stop, frame(agent_frame::Body::Status(status))).await
}

/// As many refusals in a frame as are heard.
pub(crate) async fn refusals(peer: Peer, stop: Stop) -> u64 {
    let mark = Mark::new(1, 1, Digest::of(b""));
    let ack =
        Ack { mark: Some(mark), stage: Stage::Refused.into(), problem: b"{}".to_vec(), high_water: None };
    repeat(&peer, &stop, frame(agent_frame::Body::Acks(Acks { acks: vec![ack; 1000] }))).await
}

/// Bytes that are no frame, each with a length that is right.
pub(crate) async fn garbage(peer: Peer, stop: Stop) -> u64 {
    let mut bytes = BytesMut::new();
    bytes.put_u32(64 * 1024);
    bytes.resize(4 + 64 * 1024, 0xff);
    repeat(&peer, &stop, bytes.freeze()).await
}

/// The smallest frame there is that wants an answer.
pub(crate) async fn heartbeats(peer: Peer, stop: Stop) -> u64 {
    let beat = frame(agent_frame::Body::Heartbeat(Heartbeat { sequence: 1, info: None }));
    repeat(&peer, &stop, beat.repeat(64).into()).await
}

/// Connections without a certificate, kept open.
pub(crate) async fn anonymous(peer: Peer, stop: Stop) -> u64 {
    let mut open = Vec::new();
    let mut opening = JoinSet::new();
    let mut begun = 0;
    while !stop.stopped() {
        if begun >= IN_PLACE {
            stop.mark_in_place();
        }
        while opening.len() < AT_ONCE && begun < ANONYMOUS {
            begun += 1;
            let peer = peer.clone();
            opening.spawn(async move { timeout(OPEN_WAIT, peer.http()).await.ok().and_then(Result::ok) });
        }
        match opening.join_next().await {
            Some(opened) => open.extend(opened.ok().flatten()),
            None => hold(&stop).await,
        }
    }
    begun as u64
}

/// TLS connections to the operators' port that say nothing, kept open.
pub(crate) async fn idle_grpc(peer: Peer, target: Target, stop: Stop) -> u64 {
    let credential = peer.credential.clone().expect("a certificate");
    let (mut open, cluster) = (Vec::new(), cluster_id());
    while !stop.stopped() && open.len() < IDLE {
        let opening = connect(&target, &credential, &peer.anchors, &cluster, PATIENCE);
        open.push(timeout(FRAME_WAIT, opening).await.ok().and_then(Result::ok));
    }
    let begun = open.len();
    hold(&stop).await;
    begun as u64
}
