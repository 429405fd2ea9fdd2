//! Streams between the agent and a port on the guest's loopback.

use std::collections::btree_map::Entry;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};

use rustix::event::{PollFd, PollFlags, poll};

use crate::limits;
use crate::protocol::{CHUNK_BYTES, FailureCode, RelayOpen, WINDOW_BYTES};
use crate::refusal::Refusal;
use crate::state::Request;
use crate::state::{Guest, spawn};
use crate::state::{Relay, Way};
use crate::wake::Wake;

pub(crate) fn open(guest: &Guest, number: u64, request: &RelayOpen) {
    let Ok(port @ 1..) = u16::try_from(request.port) else {
        guest.refuse(number, Refusal::invalid(format!("{} is not a port", request.port)));
        return;
    };
    let wake = match Wake::new() {
        Ok(wake) => wake,
        Err(error) => return guest.refuse(number, Refusal::io("relay", &error)),
    };
    let relay = Relay {
        wake: wake.clone(),
        accept: false,
        to_port: Way::default(),
        to_agent: Way::default(),
        confirmed: 0,
        tell: false,
        failure: None,
        over: false,
    };
    let refused = guest.update(|state| {
        let open = state.requests.count(|request| matches!(request, Request::Relay(_)));
        match state.requests.all.entry(number) {
            Entry::Occupied(_) => {
                Some(Refusal::new(FailureCode::Exists, "this number names a request already"))
            }
            Entry::Vacant(_) if open >= limits::MAX_RELAYS => Some(Refusal::busy("relays")),
            Entry::Vacant(place) => {
                place.insert(Request::Relay(relay));
                None
            }
        }
    });
    if let Some(refusal) = refused {
        guest.refuse(number, refusal);
        return;
    }
    let thread = guest.clone();
    let spawned = spawn("relay", move || {
        let outcome = carry(&thread, number, port, &wake);
        thread.update(|state| match (outcome, state.requests.relay(number)) {
            (Err(error), Some(relay)) => relay.failure = Some(Refusal::io(&format!("port {port}"), &error)),
            // Everything was told before the port had taken its last byte.
            (Ok(()), Some(relay)) if relay.is_over() => drop(state.requests.remove(number)),
            _ => {}
        });
    });
    if spawned.is_err() {
        guest.update(|state| state.requests.remove(number));
        guest.refuse(number, Refusal::busy("threads"));
    }
}

/// Carries bytes until both directions are at their end, or the relay is closed.
fn carry(guest: &Guest, number: u64, port: u16, wake: &Wake) -> io::Result<()> {
    let mut stream =
        TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), limits::CONNECT)?;
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    guest.update(|state| {
        if let Some(relay) = state.requests.relay(number) {
            relay.accept = true;
        }
    });
    loop {
        let now = guest.update(|state| {
            let relay = state.requests.relay(number)?;
            let ended = relay.to_port.last && relay.to_port.buffer.is_empty() && !relay.to_port.told;
            relay.to_port.told |= ended;
            let may_read = !relay.to_agent.last && relay.to_agent.buffer.len() + CHUNK_BYTES <= WINDOW_BYTES;
            let over = relay.over || (relay.to_agent.last && relay.to_port.told);
            Some((relay.to_port.piece(CHUNK_BYTES), ended, may_read, over))
        });
        let Some((data, ended, may_read, over)) = now else { return Ok(()) };
        if ended {
            let _ = stream.shutdown(Shutdown::Write);
        }
        if over {
            return Ok(());
        }
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, may_read);
        wanted.set(PollFlags::OUT, !data.is_empty());
        let ready = {
            let mut fds = vec![PollFd::new(wake, PollFlags::IN)];
            if !wanted.is_empty() {
                fds.push(PollFd::new(&stream, wanted));
            }
            poll(&mut fds, None)?;
            fds.get(1).map_or(PollFlags::empty(), PollFd::revents)
        };
        wake.clear();
        let broken = ready.intersects(PollFlags::ERR | PollFlags::HUP);
        if !data.is_empty() && (broken || ready.contains(PollFlags::OUT)) {
            let taken = or_later(stream.write(&data))?.unwrap_or(0);
            guest.update(|state| {
                if let Some(relay) = state.requests.relay(number) {
                    relay.to_port.deliver(taken);
                    relay.tell = true;
                }
            });
        }
        if may_read && (broken || ready.contains(PollFlags::IN)) {
            let mut buffer = [0; CHUNK_BYTES];
            let Some(length) = or_later(stream.read(&mut buffer))? else { continue };
            guest.update(|state| {
                if let Some(relay) = state.requests.relay(number) {
                    relay.to_agent.buffer.extend(&buffer[..length]);
                    relay.to_agent.last |= length == 0;
                }
            });
        }
    }
}

/// Absent: not now.
fn or_later(outcome: io::Result<usize>) -> io::Result<Option<usize>> {
    match outcome {
        Ok(length) => Ok(Some(length)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
