//! What was asked for: under way, or answered and remembered until the agent says that the answer arrived.

use std::collections::{BTreeMap, VecDeque};

use crate::limits;
use crate::protocol::guest_frame::Body;
use crate::state::Exec;
use crate::state::Reading;
use crate::state::Relay;

#[derive(Debug)]
pub(crate) enum Request {
    Exec(Exec),
    Relay(Relay),
    Reading(Reading),
    /// Carried out by a thread. `asked` is the connection that wants to hear the end of it.
    Working {
        asked: u64,
    },
    Answered(Body),
}

/// All requests by number.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    pub(crate) all: BTreeMap<u64, Request>,
    /// Those that are over, the oldest first.
    over: VecDeque<u64>,
}

impl Requests {
    pub(crate) fn exec(&mut self, number: u64) -> Option<&mut Exec> {
        match self.all.get_mut(&number) {
            Some(Request::Exec(exec)) => Some(exec),
            _ => None,
        }
    }

    pub(crate) fn relay(&mut self, number: u64) -> Option<&mut Relay> {
        match self.all.get_mut(&number) {
            Some(Request::Relay(relay)) => Some(relay),
            _ => None,
        }
    }

    pub(crate) fn reading(&mut self, number: u64) -> Option<&mut Reading> {
        match self.all.get_mut(&number) {
            Some(Request::Reading(reading)) => Some(reading),
            _ => None,
        }
    }

    pub(crate) fn execs(&self) -> impl Iterator<Item = &Exec> {
        self.all.values().filter_map(|request| match request {
            Request::Exec(exec) => Some(exec),
            _ => None,
        })
    }

    pub(crate) fn count(&self, kind: impl Fn(&Request) -> bool) -> usize {
        self.all.values().filter(|request| kind(request)).count()
    }

    /// Execs and relays under way, as a heartbeat tells it.
    pub(crate) fn open_work(&self) -> usize {
        self.count(|request| match request {
            Request::Exec(exec) => exec.exit.is_none(),
            Request::Relay(_) => true,
            _ => false,
        })
    }

    /// This request is over: remembered, until too many newer ones are.
    pub(crate) fn is_over(&mut self, number: u64) {
        self.over.push_back(number);
        while self.over.len() > limits::MAX_ANSWERS {
            if let Some(oldest) = self.over.pop_front() {
                self.all.remove(&oldest);
            }
        }
        // Old output goes before old answers.
        let mut kept: usize = self.execs().map(|exec| exec.kept.len()).sum();
        for at in 0..self.over.len() {
            if kept <= limits::KEPT_OUTPUT_OF_ALL_BYTES {
                break;
            }
            let number = self.over[at];
            if let Some(exec) = self.exec(number).filter(|exec| exec.attached.is_none()) {
                kept -= exec.kept.len();
                exec.kept.keep_at_most(0);
            }
        }
    }

    /// The agent has the answer.
    pub(crate) fn remove(&mut self, number: u64) -> Option<Request> {
        self.over.retain(|over| *over != number);
        self.all.remove(&number)
    }

    /// The connection is gone: what can't be asked for again ends with it.
    pub(crate) fn lose_connection(&mut self) {
        self.all.retain(|_, request| match request {
            Request::Relay(relay) => {
                relay.wake.wake();
                false
            }
            Request::Reading(_) => false,
            _ => true,
        });
        for request in self.all.values_mut() {
            match request {
                Request::Exec(exec) => exec.lose_connection(),
                Request::Working { asked } => *asked = 0,
                _ => {}
            }
        }
    }
}
