//! The state of a guest: one value under one lock, which outlives every connection.

mod exec;
mod health;
mod identity;
mod incoming;
mod link;
mod output;
mod readiness;
mod reading;
mod relay;
mod requests;
mod workload;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use crate::limits;
use crate::protocol::guest_frame::Body;
use crate::protocol::{Readiness, WriteFile};
use crate::settings::{ImageConfig, Settings};

pub(crate) use exec::{Exec, Order};
pub(crate) use health::Health;
pub(crate) use identity::Identity;
pub(crate) use incoming::{Bundle, Incoming};
pub(crate) use link::{Link, Next, frame};
pub(crate) use reading::Reading;
pub(crate) use relay::{Relay, Way};
pub(crate) use requests::{Request, Requests};
pub(crate) use workload::Workload;

/// A guest. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Guest(pub(crate) Arc<Shared>);

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) boot_id: String,
    /// Pieces of files, in the order in which they came.
    pub(crate) writes: mpsc::SyncSender<(u64, WriteFile)>,
    /// Takes a job while its thread has none: to begin one costs a guest that just woke milliseconds.
    pub(crate) idle_thread: mpsc::SyncSender<Job>,
    /// Held while the machine is changed: who it is is one decision at a time.
    pub(crate) rebirth: Mutex<()>,
    /// Held while the workload is started again.
    pub(crate) restart: Mutex<()>,
    pub(crate) secrets: Incoming,
    pub(crate) state: Mutex<State>,
    /// Something in the state changed that a thread may wait for.
    pub(crate) changed: Condvar,
}

pub(crate) type Job = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) link: Link,
    pub(crate) requests: Requests,
    pub(crate) readiness: Readiness,
    /// Why the readiness is what it is, for people.
    pub(crate) message: String,
    /// The image's configuration, or why it can't be used.
    pub(crate) config: Result<ImageConfig, String>,
    pub(crate) workload: Workload,
    pub(crate) health: Health,
    /// `reborn` was carried out; its generation; what it said about the environment.
    pub(crate) configured: bool,
    pub(crate) generation: u64,
    /// Who this machine is, once it is all of that.
    pub(crate) identity: Option<Identity>,
    pub(crate) env: BTreeMap<String, String>,
    /// The request that prepares sleep, while it waits.
    pub(crate) preparing: Option<u64>,
    /// The workload may have been told that sleep comes.
    pub(crate) announced: bool,
    /// Shutdown has begun: nothing new is started.
    pub(crate) going: bool,
    /// Shutdown is complete: the program may end, or the machine go down.
    pub(crate) ended: bool,
}

impl Guest {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change, or for the time to pass.
    pub(crate) fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        timeout: Option<Duration>,
    ) -> MutexGuard<'a, State> {
        match timeout {
            None => self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(timeout) => {
                self.0.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }

    /// Changes something that a thread may wait for.
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.lock());
        self.0.changed.notify_all();
        changed
    }

    /// A request that a thread carried out is over.
    pub(crate) fn answer(&self, number: u64, outcome: Result<Body, crate::refusal::Refusal>) {
        let body = outcome.unwrap_or_else(crate::refusal::Refusal::into_body);
        self.update(|state| {
            let Some(Request::Working { asked }) = state.requests.all.get(&number) else { return };
            if *asked == state.link.epoch {
                state.link.reply(number, body.clone());
            }
            state.requests.all.insert(number, Request::Answered(body));
            state.requests.is_over(number);
        });
    }

    /// Has a thread do this: the one that waits for work, or else a new one.
    pub(crate) fn do_beside(&self, job: impl FnOnce() + Send + 'static) -> io::Result<()> {
        match self.0.idle_thread.try_send(Box::new(job)) {
            Ok(()) => Ok(()),
            Err(mpsc::TrySendError::Full(job) | mpsc::TrySendError::Disconnected(job)) => {
                spawn("request", job).map(drop)
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn set_readiness(&self, readiness: Readiness, message: impl Into<String>) {
        let message = message.into();
        self.update(|state| {
            state.readiness = readiness;
            state.message = message;
        });
    }
}

/// A thread with a small stack.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).stack_size(limits::STACK_BYTES).spawn(work)
}
