//! Whatever bytes come, from either side: no panic, no memory without bound, and a fresh hello is answered.

use std::io::Write;
use std::time::Duration;

use crate::host::{Machine, done};
use mvm_guest::protocol::host_frame::Body as Ask;
use mvm_guest::protocol::{
    self, CHUNK_BYTES, Deframer, Exec, Found, GuestFrame, HostFrame, Input, MAX_FRAME_BYTES, OPENING,
    put_frame,
};
use proptest::prelude::*;

/// The connection's nonce in generated frames.
const NONCE: u64 = 77;

/// A request that does no harm to the machine that runs this test, with every number that could do some to the guest.
fn request() -> impl Strategy<Value = Ask> + Clone {
    let path = prop_oneof![
        Just("/proc/self/status"),
        Just("/nowhere/file"),
        Just("relative"),
        Just("/\0"),
        Just("")
    ];
    let command = prop_oneof![
        Just(vec!["true"]),
        Just(vec!["cat"]),
        Just(vec!["/nowhere"]),
        Just(vec![""]),
        Just(vec![])
    ];
    let exec =
        (command, any::<bool>(), any::<u64>(), any::<u64>()).prop_map(|(command, stdin, from, most)| Exec {
            command: command.into_iter().map(str::to_owned).collect(),
            stdin,
            output_from: from,
            max_output_bytes: most,
            ..Exec::default()
        });
    let data = prop::collection::vec(any::<u8>(), 0..CHUNK_BYTES);
    prop_oneof![
        4 => exec.prop_map(Ask::Exec),
        2 => (data.clone(), any::<bool>(), any::<u64>()).prop_map(|(data, last, offset)| Ask::Input(Input { data, last, offset })),
        1 => (0..65u32).prop_map(|number| Ask::Signal(protocol::Signal { number })),
        1 => any::<u64>().prop_map(|bytes| Ask::Window(protocol::Window { bytes, received: 0 })),
        1 => any::<u32>().prop_map(|port| Ask::RelayOpen(protocol::RelayOpen { port: 70_000 | port })),
        1 => (data.clone(), any::<bool>()).prop_map(|(data, last)| Ask::RelayData(protocol::Chunk { data, last })),
        1 => (path.clone(), any::<u64>(), any::<u64>()).prop_map(|(path, offset, limit)| {
            Ask::ReadFile(protocol::ReadFile { path: path.into(), offset, limit })
        }),
        1 => path.clone().prop_map(|path| Ask::ListDirectory(protocol::ListDirectory { path: path.into() })),
        1 => (any::<u64>(), data).prop_map(|(offset, data)| Ask::WriteFile(protocol::WriteFile {
            path: "relative".into(), offset, data, ..Default::default()
        })),
        1 => any::<u64>().prop_map(|generation| Ask::Reborn(protocol::Reborn { generation, ..Default::default() })),
        1 => Just(Ask::PrepareSleep(protocol::PrepareSleep { timeout_seconds: 0 })),
        1 => Just(Ask::CancelSleep(protocol::CancelSleep {})),
        1 => Just(Ask::Forget(protocol::Forget {})),
        1 => Just(Ask::Ping(protocol::Ping {})),
        1 => (any::<u32>(), any::<u32>()).prop_map(|(min_version, max_version)| {
            Ask::Hello(protocol::HostHello { min_version, max_version, agent: String::new() })
        }),
    ]
}

fn framed(message: &impl mvm_guest::protocol::Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_frame(&mut bytes, message).unwrap();
    bytes
}

/// Pieces of a conversation, whole and broken.
fn pieces() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let hello = Ask::Hello(protocol::HostHello { min_version: 1, max_version: 2, agent: String::new() });
    let frame = |nonce, request, body| framed(&HostFrame { nonce, request, body: Some(body) });
    let hello = [OPENING.to_vec(), frame(NONCE, 0, hello)].concat();
    // Few numbers, so that requests meet each other.
    let asked = (0..6u64, request(), prop_oneof![8 => Just(NONCE), 1 => any::<u64>()])
        .prop_map(move |(number, body, nonce)| frame(nonce, number, body));
    let piece = prop_oneof![
        12 => asked.clone(),
        2 => Just(hello.clone()),
        1 => Just(OPENING.to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..200),
        1 => (asked, any::<prop::sample::Index>()).prop_map(|(mut bytes, at)| {
            bytes.truncate(at.index(bytes.len()));
            bytes
        }),
        1 => (any::<u32>(), any::<u32>()).prop_map(|(length, sum)| [length.to_be_bytes(), sum.to_be_bytes()].concat()),
        1 => Just(protocol::filler()),
    ];
    prop::collection::vec(piece, 1..40).prop_map(move |mut pieces| {
        pieces.insert(0, hello.clone());
        pieces
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn a_reader_holds_less_than_a_frame_and_understands_what_follows(
        noise in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..4096), 0..40),
        pieces in pieces(),
    ) {
        let mut deframer = Deframer::default();
        for piece in noise.iter().chain(&pieces) {
            deframer.push(piece);
            while deframer.next::<GuestFrame>().is_some() {}
            prop_assert!(deframer.held() < MAX_FRAME_BYTES);
        }
        // As a side does that gets no hello.
        let frame = GuestFrame { nonce: 1, request: 2, body: None };
        deframer.push(&[protocol::filler(), OPENING.to_vec(), framed(&frame)].concat());
        let found: Vec<_> = std::iter::from_fn(|| deframer.next::<GuestFrame>()).collect();
        prop_assert_eq!(found.last(), Some(&Found::Message(frame)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn a_guest_answers_a_fresh_hello_whatever_was_said_before(pieces in pieces()) {
        let machine = Machine::new();
        let mut host = machine.connect();
        host.nonce = NONCE;
        host.send_bytes(&pieces[0]);
        // It is served: the one that comes later is the newer one.
        prop_assert!(host.try_receive().is_some());
        // Its replies are not read: it may well stop to listen.
        host.stream.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
        for piece in &pieces[1..] {
            if host.stream.write_all(piece).is_err() {
                break;
            }
        }
        let mut fresh = machine.connect();
        prop_assert_eq!(fresh.hello(1, 2).version, 2);
        prop_assert_eq!(fresh.ask(Ask::Ping(protocol::Ping {})), done());
        // Programs that wait for input that never comes.
        for number in 0..6 {
            fresh.send(number, Ask::Forget(protocol::Forget {}));
        }
        prop_assert_eq!(fresh.ask(Ask::Ping(protocol::Ping {})), done());
    }
}

#[test]
fn millions_of_requests_cost_no_memory() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    // Failures that are remembered, each under a new number; every hundredth answer is waited for.
    let mut ask = |from: u64, to: u64| {
        for number in (from..to).step_by(100) {
            let mut bytes = Vec::new();
            for request in number..number + 100 {
                let body = Some(Ask::Exec(Exec::default()));
                put_frame(&mut bytes, &HostFrame { nonce: host.nonce, request, body }).unwrap();
            }
            host.send_bytes(&bytes);
            while host.receive().0 != number + 99 {}
        }
    };
    ask(10_000, 30_000);
    let before = resident();
    ask(30_000, 200_000);
    let grown = resident().saturating_sub(before);
    assert!(grown < 4096, "{grown} KiB more after 170,000 requests");
}
