//! Conversations as they were once held, against the guest of today.

use std::path::Path;

use crate::host::{Host, Machine};
use mvm_guest::protocol::guest_frame::Body;
use mvm_guest::protocol::host_frame::Body as Ask;
use mvm_guest::protocol::{Deframer, Found, GuestFrame, HostFrame, OPENING, Readiness};

/// The nonce of the recorded conversation.
const NONCE: u64 = 0x1122_3344_5566_7788;

fn recorded(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto/tests/recorded").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// One frame's bytes after the other; the opening belongs to the first.
fn frames(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let header = if bytes.starts_with(OPENING) { OPENING.len() } else { 0 };
        let length = u32::from_be_bytes(bytes[header..header + 4].try_into().unwrap()) as usize;
        let (frame, rest) = bytes.split_at(header + 8 + length);
        found.push(frame);
        bytes = rest;
    }
    found
}

fn understood<M: mvm_guest::protocol::Message + Default>(bytes: &[u8]) -> Vec<Found<M>> {
    let mut deframer = Deframer::default();
    deframer.push(bytes);
    std::iter::from_fn(|| deframer.next()).collect()
}

#[test]
fn an_agent_of_version_1_is_served_as_it_always_was() {
    let bytes = recorded("guest-v1-host.bin");
    let [hello, exec, shutdown] = frames(&bytes)[..] else { panic!("another conversation was recorded") };
    let machine = Machine::new();
    let mut host: Host = machine.connect();
    host.nonce = NONCE;

    host.send_bytes(hello);
    let Body::Hello(answer) = host.next_of(0) else { panic!("no hello") };
    assert_eq!((answer.version, answer.readiness()), (1, Readiness::Starting));
    let Body::State(state) = host.next_of(0) else { panic!("no state") };
    assert_eq!(state.readiness(), Readiness::Ready);

    host.send_bytes(exec);
    let mut output = Vec::new();
    let (number, exit) = loop {
        match host.receive() {
            (_, Body::Output(piece)) => output.extend(piece.data),
            (number, Body::Exit(exit)) => break (number, exit),
            other => panic!("not in version 1: {other:?}"),
        }
    };
    assert_eq!((number, exit.code), (101, 0));
    assert!(output.starts_with(b"Linux "));

    host.send_bytes(shutdown);
    assert!(matches!(host.receive(), (102, Body::Done(_))));
    machine.guest.wait_until_ended();
}

#[test]
fn a_guest_of_version_1_is_understood_as_it_always_was() {
    let [Found::Opening, Found::Message(hello), Found::Message(state), rest @ ..] =
        &understood::<GuestFrame>(&recorded("guest-v1-guest.bin"))[..]
    else {
        panic!("another conversation was recorded")
    };
    let Some(Body::Hello(hello)) = &hello.body else { panic!("no hello") };
    assert_eq!((hello.version, hello.guest_min, hello.guest_max), (1, 1, 1));
    let Some(Body::State(state)) = &state.body else { panic!("no state") };
    assert_eq!(state.readiness(), Readiness::Ready);
    let kinds: Vec<_> = rest
        .iter()
        .map(|found| match found {
            Found::Message(GuestFrame { nonce: NONCE, request, body: Some(body) }) => match body {
                Body::Output(output) if output.data.starts_with(b"Linux ") => ("output", *request),
                Body::Exit(exit) if exit.code == 0 => ("exit", *request),
                Body::Done(_) => ("done", *request),
                _ => ("another", *request),
            },
            _ => ("none", 0),
        })
        .collect();
    assert_eq!(kinds, [("output", 101), ("exit", 101), ("done", 102)]);
}

#[test]
fn every_message_of_version_2_is_understood_as_it_was_when_it_was_stored() {
    let asked: Vec<_> = understood::<HostFrame>(&recorded("guest-v2-host.bin"));
    let told: Vec<_> = understood::<GuestFrame>(&recorded("guest-v2-guest.bin"));
    let text = format!("{asked:#?}\n{told:#?}\n");
    let stored = String::from_utf8(recorded("guest-v2.txt")).unwrap();
    assert_eq!(text, stored);
    let kinds = |text: &str, what: &str| text.matches(what).count();
    assert_eq!((kinds(&stored, "HostFrame {"), kinds(&stored, "GuestFrame {")), (16, 11));
    assert!(asked.iter().any(|found| matches!(
        found,
        Found::Message(HostFrame { body: Some(Ask::Reborn(reborn)), .. }) if reborn.generation == 9
    )));
}
