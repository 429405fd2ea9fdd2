//! Nodes with a valid certificate that send what no agent sends: it costs their own session, or their own row.

use bytes::{BufMut as _, Bytes, BytesMut};
use mvm_proto::Digest;
use mvm_proto::status::{Condition, Mark, NodeStatus, PoolStatus};
use mvm_proto::wire::control::v1::{GetNodeRequest, RemoveNodeRequest};
use mvm_proto::wire::session::v1::{Ack, Acks, Stage, agent_frame};
use mvm_transport::SessionError;
use mvm_transport::session::close_code;

use crate::support::{Node, Running, Session, new_cluster, soon};

/// What the whole test process may take more than before: the frame itself a few times over, in both directions.
const MAX_GROWTH_BYTES: u64 = 96 << 20;

/// A frame of the largest size whose one body, of this kind, is `pair` again and again.
fn bomb(kind: u8, pair: [u8; 2]) -> Bytes {
    let pairs: usize = (8 << 20) / 2;
    let mut frame = BytesMut::new();
    let mut length = [0; 10];
    let mut rest: &mut [u8] = &mut length;
    prost_varint(&mut rest, 2 * pairs as u64);
    let used = 10 - rest.len();
    frame.put_u32(u32::try_from(1 + used + 2 * pairs).unwrap());
    frame.put_u8((kind << 3) | 2);
    frame.put_slice(&length[..used]);
    (0..pairs).for_each(|_| frame.put_slice(&pair));
    frame.freeze()
}

fn prost_varint(out: &mut &mut [u8], mut value: u64) {
    while value >= 0x80 {
        out.put_u8((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8(value as u8);
}

/// The most memory that this process ever had. Each test is a process of its own.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

fn assert_grew_little(before: u64, what: &str) {
    // The kernel's count is kept per processor and added up late: it may have fallen a little.
    let grown = peak_bytes().saturating_sub(before);
    assert!(grown < MAX_GROWTH_BYTES, "{what} took {} MiB", grown >> 20);
}

/// Sends a bomb and waits for the end of the session; the code that it was closed with.
async fn explode(session: &mut Session, bomb: Bytes) -> Option<u64> {
    // The coordinator may close before it has read it all.
    let _ = soon("the frame to be sent or refused", session.session.frames_out.send_encoded(bomb)).await;
    match soon("the end", session.session.control.closed()).await {
        SessionError::Closed { code, .. } => Some(code),
        _ => None,
    }
}

async fn status_of(running: &Running, node: &str) -> NodeStatus {
    let request = GetNodeRequest { node_id: node.to_owned() };
    running.operator().await.get_node(request).await.unwrap().into_inner().status.unwrap()
}

async fn started() -> (tempfile::TempDir, Running, Node) {
    let (dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    (dir, running, node)
}

#[tokio::test]
async fn nothing_that_a_removed_node_sends_is_decoded() {
    let (_dir, running, node) = started().await;
    running.operator().await.remove_node(RemoveNodeRequest { node_id: "n1".into() }).await.unwrap();
    let acks = bomb(2, [0x0a, 0]);
    let before = peak_bytes();
    let mut session = node.dial().await.unwrap();
    assert_eq!(explode(&mut session, acks).await, Some(close_code::REMOVED.into()));
    assert_grew_little(before, "");
}

#[tokio::test]
async fn a_first_frame_larger_than_any_hello_is_not_read() {
    let (_dir, _running, node) = started().await;
    let acks = bomb(2, [0x0a, 0]);
    let before = peak_bytes();
    let mut session = node.dial().await.unwrap();
    assert_eq!(explode(&mut session, acks).await, Some(close_code::PROTOCOL.into()));
    assert_grew_little(before, "");
}

#[tokio::test]
async fn a_frame_that_would_grow_in_memory_is_refused_before_it_is_decoded() {
    let (_dir, running, node) = started().await;
    // Acks; a heartbeat with conditions; a status with pools, and with conditions; events; a reply.
    let bombs =
        [(2, [0x0a, 0]), (3, [0x12, 0]), (4, [0x32, 0]), (4, [0x2a, 0]), (5, [0x0a, 0]), (6, [0x1a, 0])];
    for (kind, pair) in bombs {
        let bomb = bomb(kind, pair);
        let before = peak_bytes();
        let mut session = node.connect(None).await;
        let merged = kind == 3 || kind == 6;
        let closed = explode_or_quiet(&mut session, bomb, merged).await;
        assert!(closed, "kind {kind}");
        assert_grew_little(before, &format!("kind {kind}"));
    }
    assert_eq!(status_of(&running, "n1").await.pools, []);
}

/// The same field again and again where only one may be is merged, and grows nothing: the session may go on.
async fn explode_or_quiet(session: &mut Session, bomb: Bytes, may_go_on: bool) -> bool {
    let _ = soon("the frame to be sent or refused", session.session.frames_out.send_encoded(bomb)).await;
    if may_go_on {
        return true;
    }
    let end = soon("the end", session.session.control.closed()).await;
    matches!(end, SessionError::Closed { code, .. } if code == u64::from(close_code::PROTOCOL))
}

#[tokio::test]
async fn a_status_with_more_pools_than_a_node_can_have_is_cut_and_its_row_says_so() {
    let (_dir, running, node) = started().await;
    let mut session = node.connect(None).await;
    let pools = vec![PoolStatus::default(); 25_000];
    let status = NodeStatus { node_id: "n1".into(), pools, ..NodeStatus::default() };
    session.send(agent_frame::Body::Status(status)).await;
    session.expect_quiet().await;
    let kept = status_of(&running, "n1").await;
    assert_eq!(kept.pools.len(), mvm_proto::status::fit::MAX_POOLS);
    let told = kept.conditions.iter().find(|condition| condition.r#type == "StatusComplete").unwrap();
    assert!(told.message.contains("of 25000 pools"), "{told:?}");
}

#[tokio::test]
async fn a_status_too_long_to_keep_is_cut_and_the_session_goes_on() {
    let (_dir, running, node) = started().await;
    let mut session = node.connect(None).await;
    let long = Condition { r#type: "Ready".into(), message: "x".repeat(5 << 20), ..Condition::default() };
    let large = NodeStatus { node_id: "n1".into(), conditions: vec![long], ..NodeStatus::default() };
    session.send(agent_frame::Body::Status(large)).await;
    session.expect_quiet().await;
    let kept = status_of(&running, "n1").await;
    let kinds: Vec<_> = kept.conditions.iter().map(|condition| condition.r#type.as_str()).collect();
    assert_eq!(kinds, ["Ready", "StatusComplete"]);
    assert!(kept.conditions[0].message.len() <= mvm_proto::status::fit::MAX_TEXT_BYTES);
}

#[tokio::test]
async fn a_frame_with_more_acks_than_an_agent_ever_sends_ends_the_session() {
    let (_dir, _running, node) = started().await;
    let mut session = node.connect(None).await;
    let mark = Some(Mark::new(1, 1, Digest::of(b"")));
    let refused = Ack { mark, stage: Stage::Refused.into(), ..Ack::default() };
    session.send(agent_frame::Body::Acks(Acks { acks: vec![refused; 5000] })).await;
    let goodbye = session.end().await.unwrap();
    assert!(goodbye.reason.contains("acks"), "{goodbye:?}");
}

#[tokio::test]
async fn an_identity_that_opens_sessions_without_end_is_told_to_wait() {
    let (_dir, running, node) = started().await;
    let other = running.enrol("n2").await;
    let mut refused = false;
    for _ in 0..80 {
        let mut session = node.dial().await.unwrap();
        session.send(agent_frame::Body::Hello(node.hello(None))).await;
        if session.next().await.is_none() {
            let end = soon("the end", session.session.control.closed()).await;
            refused |=
                matches!(end, SessionError::Closed { code, .. } if code == u64::from(close_code::OVERLOADED));
        }
    }
    assert!(refused, "80 sessions in a row were all heard");
    other.connect(None).await;
}
