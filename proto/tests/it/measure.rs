//! What a peer's bytes become in memory is known before they are decoded, and bounded.

use bytes::Bytes;
use mvm_proto::status::fit::MAX_POOLS;
use mvm_proto::status::{Condition, Counts, Event, Mark, NodeInfo, NodeStatus, PoolStatus, Usage};
use mvm_proto::wire::control::v1::{ListNodesResponse, Node, UpdateTrustRequest};
use mvm_proto::wire::frames::{Frame, decode_frame};
use mvm_proto::wire::measure::{DecodeError, Kind, Shape, decode};
use mvm_proto::wire::session::v1::{Ack, Acks, AgentFrame, CoordinatorFrame, Events, Heartbeat, agent_frame};
use proptest::collection::vec;
use proptest::prelude::*;
use prost::Message;

/// The largest frame of a session.
const FRAME_BYTES: usize = 8 << 20;

/// A field with this content, as it is on the wire.
fn field(number: u32, content: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    prost::encoding::encode_key(number, prost::encoding::WireType::LengthDelimited, &mut bytes);
    prost::encoding::encode_varint(content.len() as u64, &mut bytes);
    bytes.extend_from_slice(content);
    bytes
}

/// For every list that a message has, however deep: the message with that list as long as `FRAME_BYTES` allow, each
/// element as short as can be.
fn bombs(shape: &Shape, wrap: &dyn Fn(Vec<u8>) -> Vec<u8>, path: &str, found: &mut Vec<(String, Vec<u8>)>) {
    for one in shape.fields {
        let path = format!("{path}.{}", one.number);
        if one.repeated {
            let element = field(one.number, b"");
            let packed = matches!(one.kind, Kind::Scalar);
            let list = match packed {
                true => field(one.number, &vec![1; FRAME_BYTES]),
                false => element.repeat(FRAME_BYTES / element.len()),
            };
            found.push((path.clone(), wrap(list)));
        }
        if let Kind::Message(inner) = &one.kind {
            bombs(inner, &|content| wrap(field(one.number, &content)), &path, found);
        }
    }
}

fn every_bomb_is_refused<F: Frame + std::fmt::Debug>() -> usize {
    let mut found = Vec::new();
    bombs(F::SHAPE, &|content| content, "", &mut found);
    for (path, bytes) in &found {
        let refused = decode_frame::<F>(Bytes::copy_from_slice(bytes)).map(drop);
        assert!(
            matches!(refused, Err(DecodeError::TooMuchMemory { .. } | DecodeError::BodyTooLong { .. })),
            "{path}: {refused:?}"
        );
    }
    found.len()
}

#[test]
fn no_list_of_a_frame_grows_past_what_its_kind_may_take() {
    assert!(every_bomb_is_refused::<AgentFrame>() >= 8);
    assert!(every_bomb_is_refused::<CoordinatorFrame>() >= 2);
}

#[test]
fn a_message_of_the_operators_service_is_measured_too() {
    let limit = 64 << 20;
    let nodes = Bytes::from(field(1, b"").repeat(FRAME_BYTES / 2));
    let refused = decode::<ListNodesResponse>(nodes, limit);
    assert!(matches!(refused, Err(DecodeError::TooMuchMemory { .. })));
    let roots = Bytes::from(field(1, b"").repeat(FRAME_BYTES / 2));
    assert!(matches!(decode::<UpdateTrustRequest>(roots, limit), Err(DecodeError::TooMuchMemory { .. })));
    let node = Node { node_id: "n1".into(), ..Node::default() };
    let page = ListNodesResponse { nodes: vec![node; 1000], ..ListNodesResponse::default() };
    assert_eq!(decode::<ListNodesResponse>(page.encode_to_vec().into(), limit).unwrap(), page);
}

#[test]
fn a_frame_has_one_body_and_unknown_kinds_are_passed_over() {
    let beat = field(3, &[]);
    assert!(matches!(
        decode_frame::<AgentFrame>([beat.clone(), beat.clone()].concat().into()),
        Err(DecodeError::SecondBody)
    ));
    let newer = [beat, field(99, b"whatever")].concat();
    let expected = AgentFrame { body: Some(agent_frame::Body::Heartbeat(Heartbeat::default())) };
    assert_eq!(decode_frame::<AgentFrame>(newer.into()).unwrap(), expected);
}

#[test]
fn bytes_that_are_no_protobuf_are_refused() {
    for bytes in
        [&[0xff_u8][..], &[0x0a], &[0x0a, 5, 1], &[0x00, 0x00], &[0x0b], &[0xff; 12], &[0x12, 2, 0x0a, 9]]
    {
        let decoded = decode_frame::<AgentFrame>(Bytes::copy_from_slice(bytes));
        assert!(decoded.is_err(), "{bytes:?}: {decoded:?}");
    }
}

/// Twice as many pools as an agent tells of: more than any document names.
#[test]
fn the_largest_honest_frames_pass() {
    let usage = Some(Usage { vcpus: 1, mem_mib: 1, instances: 1, ..Usage::default() });
    let pool = |at: usize| PoolStatus {
        tenant_id: format!("{at:063}"),
        pool_id: format!("{at:063}"),
        desired: Some(Counts { running: 1, warm: 1, sleeping: 1, down: 1 }),
        revision: "x".repeat(71),
        deferred: vec!["waits for its image".to_owned(); 4],
        allocated: usage,
        requested: usage,
        ..PoolStatus::default()
    };
    let status = NodeStatus { pools: (0..2 * MAX_POOLS).map(pool).collect(), ..NodeStatus::default() };
    let frame = AgentFrame { body: Some(agent_frame::Body::Status(status)) };
    assert_eq!(decode_frame::<AgentFrame>(frame.encode_to_vec().into()).unwrap(), frame);
}

/// Bytes on the heap, by the capacity of every vector and string.
trait Heap {
    fn heap(&self) -> usize;
}

impl Heap for String {
    fn heap(&self) -> usize {
        self.capacity()
    }
}

impl<T: Heap> Heap for Vec<T> {
    fn heap(&self) -> usize {
        self.capacity() * size_of::<T>() + self.iter().map(Heap::heap).sum::<usize>()
    }
}

impl<T: Heap> Heap for Option<T> {
    fn heap(&self) -> usize {
        self.as_ref().map_or(0, Heap::heap)
    }
}

impl Heap for Mark {
    fn heap(&self) -> usize {
        self.digest.heap()
    }
}

impl Heap for Condition {
    fn heap(&self) -> usize {
        [&self.r#type, &self.status, &self.reason, &self.message, &self.since].map(Heap::heap).iter().sum()
    }
}

impl Heap for PoolStatus {
    fn heap(&self) -> usize {
        self.tenant_id.heap() + self.pool_id.heap() + self.revision.heap() + self.deferred.heap()
    }
}

impl Heap for Event {
    fn heap(&self) -> usize {
        [&self.at, &self.kind, &self.subject, &self.message].map(Heap::heap).iter().sum()
    }
}

impl Heap for Ack {
    fn heap(&self) -> usize {
        self.mark.heap() + self.high_water.heap() + self.problem.capacity()
    }
}

impl Heap for NodeInfo {
    fn heap(&self) -> usize {
        self.node_id.heap() + self.conditions.heap() + self.schema_versions.capacity() * size_of::<u32>()
    }
}

impl Heap for AgentFrame {
    fn heap(&self) -> usize {
        match &self.body {
            Some(agent_frame::Body::Status(NodeStatus {
                node_id,
                accepted,
                converged,
                conditions,
                pools,
                ..
            })) => node_id.heap() + accepted.heap() + converged.heap() + conditions.heap() + pools.heap(),
            Some(agent_frame::Body::Acks(acks)) => acks.acks.heap(),
            Some(agent_frame::Body::Events(events)) => events.events.heap(),
            Some(agent_frame::Body::Heartbeat(heartbeat)) => heartbeat.info.heap(),
            _ => 0,
        }
    }
}

fn pool() -> impl Strategy<Value = PoolStatus> {
    (".{0,9}", ".{0,9}", vec(".{0,5}", 0..7), any::<bool>()).prop_map(
        |(tenant_id, pool_id, deferred, managed)| PoolStatus {
            tenant_id,
            pool_id,
            deferred,
            managed,
            ..PoolStatus::default()
        },
    )
}

fn condition() -> impl Strategy<Value = Condition> {
    (".{0,9}", ".{0,40}").prop_map(|(kind, message)| Condition {
        r#type: kind,
        message,
        ..Condition::default()
    })
}

fn mark() -> impl Strategy<Value = Option<Mark>> {
    proptest::option::of((any::<u64>(), ".{0,80}").prop_map(|(epoch, digest)| Mark {
        epoch,
        generation: 1,
        digest,
    }))
}

fn body() -> impl Strategy<Value = agent_frame::Body> {
    let status = (vec(pool(), 0..40), vec(condition(), 0..9), mark(), mark()).prop_map(
        |(pools, conditions, accepted, converged)| {
            let status = NodeStatus { pools, conditions, accepted, converged, ..NodeStatus::default() };
            agent_frame::Body::Status(status)
        },
    );
    let ack = (mark(), vec(any::<u8>(), 0..20), mark()).prop_map(|(mark, problem, high_water)| Ack {
        mark,
        problem,
        high_water,
        stage: 3,
    });
    let acks = vec(ack, 0..20).prop_map(|acks| agent_frame::Body::Acks(Acks { acks }));
    let event = (".{0,9}", ".{0,9}").prop_map(|(kind, message)| Event { kind, message, ..Event::default() });
    let events = vec(event, 0..20).prop_map(|events| agent_frame::Body::Events(Events { events }));
    let info =
        (vec(any::<u32>(), 0..20), vec(condition(), 0..9)).prop_map(|(schema_versions, conditions)| {
            let info = NodeInfo { schema_versions, conditions, ..NodeInfo::default() };
            agent_frame::Body::Heartbeat(Heartbeat { sequence: 1, info: Some(info) })
        });
    prop_oneof![status, acks, events, info]
}

/// Fields of any number and content, some of them messages of such fields.
fn junk() -> impl Strategy<Value = Vec<u8>> {
    let leaf = prop_oneof![
        vec(any::<u8>(), 0..12),
        (1..18_u32, vec(any::<u8>(), 0..6)).prop_map(|(number, content)| field(number, &content)),
        (1..18_u32, 1..60_usize).prop_map(|(number, times)| field(number, b"").repeat(times)),
        (1..18_u8, any::<u8>()).prop_map(|(number, value)| vec![number << 3, value & 0x7f]),
    ];
    leaf.prop_recursive(4, 64, 6, |inner| {
        vec((1..18_u32, inner), 1..6)
            .prop_map(|fields| fields.iter().flat_map(|(number, content)| field(*number, content)).collect())
    })
}

/// Whether a decoder that may take one byte less than the message took refuses it.
fn is_too_much_for_less(bytes: Bytes, decoded: &AgentFrame) -> bool {
    let taken = size_of::<AgentFrame>() + decoded.heap();
    matches!(decode::<AgentFrame>(bytes, taken - 1), Err(DecodeError::TooMuchMemory { .. }))
}

proptest! {
    #[test]
    fn a_frame_takes_no_more_memory_than_it_may(body in body()) {
        let frame = AgentFrame { body: Some(body) };
        let bytes = Bytes::from(frame.encode_to_vec());
        let decoded = decode_frame::<AgentFrame>(bytes.clone()).unwrap();
        prop_assert!(is_too_much_for_less(bytes, &decoded));
        prop_assert_eq!(decoded, frame);
    }

    #[test]
    fn whatever_comes_takes_no_more_memory_than_it_may(bytes in junk()) {
        let bytes = Bytes::from(bytes);
        // Groups apart, which no message has, what prost can read can be measured.
        if let Ok(decoded) = decode::<AgentFrame>(bytes.clone(), usize::MAX) {
            prop_assert!(is_too_much_for_less(bytes.clone(), &decoded));
        }
        if let Ok(decoded) = decode_frame::<AgentFrame>(bytes.clone()) {
            prop_assert_eq!(decoded, AgentFrame::decode(bytes).unwrap());
        }
    }
}
