//! The current connection: the frames that wait to be sent, and their order.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::limits;
use crate::protocol::guest_frame::Body;
use crate::protocol::{self, GuestFrame, GuestHello, OPENING, Readiness, Workload};
use crate::state::Request;
use crate::state::State;

/// The connection of the moment. `epoch` counts them, so that a thread of an older one knows that it is over.
#[derive(Debug, Default)]
pub(crate) struct Link {
    pub(crate) epoch: u64,
    /// Of the agent's hello; absent: it has not opened yet, or is gone.
    pub(crate) nonce: Option<u64>,
    /// What both speak; 0: nothing.
    pub(crate) version: u32,
    /// The answer to a hello that was not sent yet. It goes first.
    hello: Option<GuestHello>,
    replies: VecDeque<(u64, Body)>,
    /// What this connection was told last of the guest's readiness: a hello has no message.
    told: Option<(Readiness, String, Workload)>,
    /// It is told how the workload fares.
    follows_workload: bool,
    next_heartbeat: Option<Instant>,
    /// The request that was served last: the others come first.
    turn: u64,
    /// A frame is on its way to the channel.
    pub(crate) writing: bool,
}

/// What the writing thread does next.
#[derive(Debug)]
pub(crate) enum Next {
    Bytes(Vec<u8>),
    /// Its figures are read without the lock.
    Heartbeat {
        nonce: u64,
    },
    Wait(Option<Duration>),
}

impl Link {
    /// An agent said hello. Replies to another one are void.
    pub(crate) fn open(&mut self, nonce: u64, hello: GuestHello) {
        let (epoch, turn, writing) = (self.epoch, self.turn, self.writing);
        let follows_workload = hello.workload.is_some();
        let told = Some((hello.readiness(), String::new(), hello.workload.unwrap_or_default()));
        let version = hello.version;
        let next_heartbeat = (version >= 2).then(|| Instant::now() + limits::FIRST_HEARTBEAT);
        *self = Self {
            epoch,
            nonce: Some(nonce),
            version,
            hello: Some(hello),
            told,
            follows_workload,
            next_heartbeat,
            turn,
            writing,
            ..Self::default()
        };
    }

    pub(crate) fn lose(&mut self) {
        *self = Self { epoch: self.epoch, turn: self.turn, writing: self.writing, ..Self::default() };
    }

    pub(crate) fn reply(&mut self, request: u64, body: Body) {
        if self.nonce.is_some() {
            self.replies.push_back((request, body));
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.replies.len() >= limits::MAX_REPLIES
    }

    /// Everything was handed to the channel.
    pub(crate) fn is_flushed(&self) -> bool {
        self.nonce.is_none() || (self.replies.is_empty() && self.hello.is_none() && !self.writing)
    }
}

impl State {
    /// What to write next: first the hello, then answers, then news, all that there are of these at once; then whatever
    /// streams have, each in its turn.
    pub(crate) fn next(&mut self, now: Instant) -> Next {
        let Some(nonce) = self.link.nonce else { return Next::Wait(None) };
        let bytes = self.due(nonce);
        if !bytes.is_empty() {
            return Next::Bytes(bytes);
        }
        if self.link.version == 0 {
            return Next::Wait(None);
        }
        if self.link.next_heartbeat.is_some_and(|due| due <= now) {
            self.link.next_heartbeat = Some(now + limits::HEARTBEAT);
            return Next::Heartbeat { nonce };
        }
        match self.next_of_streams() {
            Some((request, body)) => Next::Bytes(frame(nonce, request, body)),
            None => Next::Wait(self.link.next_heartbeat.map(|due| due.saturating_duration_since(now))),
        }
    }

    /// All frames that can be sent now, up to what is written in one piece.
    fn due(&mut self, nonce: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Some(hello) = self.link.hello.take() {
            bytes.extend(OPENING);
            bytes.extend(frame(nonce, 0, Body::Hello(hello)));
        }
        while let Some((request, body)) = self.link.replies.pop_front() {
            bytes.extend(frame(nonce, request, body));
            if bytes.len() >= limits::WRITE_BYTES {
                return bytes;
            }
        }
        if self.link.version == 0 {
            return bytes;
        }
        let mut current = self.told();
        if !self.link.follows_workload {
            current.2 = Workload::default();
        }
        if self.link.told.as_ref() != Some(&current) {
            let (readiness, message, workload) = current.clone();
            self.link.told = Some(current);
            let workload = self.link.follows_workload.then_some(workload);
            let body = protocol::State { readiness: readiness.into(), message, workload };
            bytes.extend(frame(nonce, 0, Body::State(body)));
        }
        bytes
    }

    fn next_of_streams(&mut self) -> Option<(u64, Body)> {
        let (turn, version) = (self.link.turn, self.link.version);
        let after: Vec<u64> =
            self.requests.all.range(turn.saturating_add(1)..).map(|(number, _)| *number).collect();
        let before: Vec<u64> = self.requests.all.range(..=turn).map(|(number, _)| *number).collect();
        for number in after.into_iter().chain(before) {
            let body = match self.requests.all.get_mut(&number) {
                Some(Request::Exec(exec)) => exec.next(version),
                Some(Request::Relay(relay)) => relay.next(),
                Some(Request::Reading(reading)) => reading.next(),
                _ => None,
            };
            let Some(body) = body else { continue };
            self.link.turn = number;
            let ended = match self.requests.all.get(&number) {
                Some(Request::Relay(relay)) => relay.is_over(),
                Some(Request::Reading(reading)) => reading.is_over(),
                _ => false,
            };
            if ended {
                self.requests.remove(number);
            }
            return Some((number, body));
        }
        None
    }
}

/// A frame of ours is always short enough: streams are cut, and texts are ours.
pub(crate) fn frame(nonce: u64, request: u64, body: Body) -> Vec<u8> {
    let mut bytes = Vec::new();
    let frame = GuestFrame { nonce, request, body: Some(body) };
    if protocol::put_frame(&mut bytes, &frame).is_err() {
        let refusal = crate::refusal::Refusal::new(
            protocol::FailureCode::Io,
            "the answer exceeds the size of a message",
        );
        let frame = GuestFrame { nonce, request, body: Some(refusal.into_body()) };
        let _ = protocol::put_frame(&mut bytes, &frame);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Guest, Settings};

    #[test]
    fn a_new_connection_is_told_why_a_guest_failed_and_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let guest = Guest::new(Settings::borrowed(folder.path())).unwrap();
        guest.set_readiness(Readiness::Failed, "exit code 7");
        for nonce in 1..3 {
            let mut state = guest.lock();
            let hello =
                GuestHello { version: 1, readiness: Readiness::Failed.into(), ..GuestHello::default() };
            state.link.open(nonce, hello);
            let now = Instant::now();
            let body = protocol::State {
                readiness: Readiness::Failed.into(),
                message: "exit code 7".into(),
                workload: None,
            };
            let told = frame(nonce, 0, Body::State(body));
            let Next::Bytes(bytes) = state.next(now) else { panic!("nothing to say") };
            assert!(bytes.starts_with(OPENING) && bytes.ends_with(&told), "{bytes:?}");
            assert!(matches!(state.next(now), Next::Wait(None)));
            state.link.lose();
        }
    }
}
