//! Everything a guest knows, and the two threads of a connection.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::files::Uploads;
use crate::health::Health;
use crate::limits;
use crate::link::{Link, Next, frame};
use crate::protocol::guest_frame::Body;
use crate::protocol::{Deframer, Found, HostFrame, Readiness, WriteFile};
use crate::reborn::Identity;
use crate::requests::{Request, Requests};
use crate::secrets::Incoming;
use crate::settings::{ImageConfig, Machine, Settings};
use crate::workload::Workload;
use crate::{readiness, reborn, sleep, vitals};

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
    idle_thread: mpsc::SyncSender<Job>,
    /// Held while the machine is changed: who it is is one decision at a time.
    pub(crate) rebirth: Mutex<()>,
    /// Held while the workload is started again.
    pub(crate) restart: Mutex<()>,
    pub(crate) secrets: Incoming,
    state: Mutex<State>,
    /// Something in the state changed that a thread may wait for.
    changed: Condvar,
}

type Job = Box<dyn FnOnce() + Send>;

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
    /// Begins to watch what the workload says about itself. The workload is started by `reborn`.
    pub fn new(settings: Settings) -> io::Result<Self> {
        std::fs::create_dir_all(&settings.run_dir)?;
        sleep::forget_sign(&settings.run_dir);
        let state = State {
            link: Link::default(),
            requests: Requests::default(),
            readiness: Readiness::Starting,
            message: String::new(),
            config: ImageConfig::read(&settings.config),
            workload: Workload::default(),
            health: Health::default(),
            configured: false,
            generation: 0,
            identity: None,
            env: BTreeMap::new(),
            preparing: None,
            announced: false,
            going: false,
            ended: false,
        };
        let (writes, pieces) = mpsc::sync_channel(limits::MAX_WORKING);
        let (idle_thread, jobs) = mpsc::sync_channel::<Job>(0);
        let boot_id =
            std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
        let shared = Shared {
            settings,
            boot_id,
            writes,
            idle_thread,
            rebirth: Mutex::new(()),
            restart: Mutex::new(()),
            secrets: Incoming::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        };
        let guest = Self(Arc::new(shared));
        readiness::watch(&guest)?;
        if guest.0.settings.machine == Machine::Own {
            reborn::get_ready(&guest.0.settings.run_dir);
        }
        // Both end with the last clone of this guest, for they hold none themselves while they wait.
        spawn("idle", move || {
            reborn::rehearse();
            jobs.into_iter().for_each(|job| job());
        })?;
        let weak = Arc::downgrade(&guest.0);
        spawn("files", move || {
            let mut uploads = Uploads::default();
            for (number, piece) in pieces {
                let Some(guest) = weak.upgrade().map(Guest) else { return };
                let outcome = uploads.write(&piece);
                guest.answer(number, outcome.map(|()| Body::Done(crate::protocol::Done {})));
            }
        })?;
        Ok(guest)
    }

    /// Blocks until a shutdown was carried out.
    pub fn wait_until_ended(&self) {
        let mut state = self.lock();
        while !state.ended {
            state = self.wait(state, None);
        }
    }

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

/// Serves one connection until its end, or until a newer one takes its place. Blocks.
pub fn serve(mut reader: impl Read, writer: impl Write + Send + 'static, guest: &Guest) -> io::Result<()> {
    let epoch = guest.update(|state| {
        state.requests.lose_connection();
        state.link.lose();
        state.link.epoch += 1;
        state.link.epoch
    });
    let writing = guest.clone();
    let thread = spawn("writer", move || write_frames(writer, &writing, epoch))?;
    let outcome = read_frames(&mut reader, guest, epoch);
    guest.update(|state| {
        if state.link.epoch == epoch {
            state.requests.lose_connection();
            state.link.lose();
            state.link.epoch += 1;
        }
    });
    // A channel has one writer at a time: half a frame of this one must not end up inside the next one's.
    let _ = thread.join();
    outcome
}

fn read_frames(reader: &mut impl Read, guest: &Guest, epoch: u64) -> io::Result<()> {
    let mut deframer = Deframer::default();
    let mut buffer = vec![0; crate::protocol::CHUNK_BYTES];
    loop {
        let length = match reader.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        deframer.push(&buffer[..length]);
        // There may be secrets in it.
        buffer[..length].fill(0);
        while let Some(found) = deframer.next::<HostFrame>() {
            // An agent that does not read its replies is not read either.
            let mut state = guest.lock();
            while state.link.epoch == epoch && state.link.is_full() {
                state = guest.wait(state, None);
            }
            if state.link.epoch != epoch {
                return Ok(());
            }
            drop(state);
            if let Found::Message(frame) = found {
                guest.handle(frame, epoch);
            }
        }
    }
}

fn write_frames(mut writer: impl Write, guest: &Guest, epoch: u64) {
    let mut state = guest.lock();
    loop {
        state.link.writing = false;
        if state.link.epoch != epoch {
            return;
        }
        let bytes = match state.next(Instant::now()) {
            Next::Wait(timeout) => {
                // Whoever waits for everything to have left.
                guest.0.changed.notify_all();
                if state.ended {
                    return;
                }
                state = guest.wait(state, timeout);
                continue;
            }
            Next::Bytes(bytes) => {
                state.link.writing = true;
                drop(state);
                bytes
            }
            Next::Heartbeat { nonce } => {
                state.link.writing = true;
                let (readiness, open_work) = (state.told().0, state.requests.open_work());
                drop(state);
                frame(nonce, 0, Body::Heartbeat(vitals::heartbeat(readiness, open_work)))
            }
        };
        // Space in the queue of replies.
        guest.0.changed.notify_all();
        let written = writer.write_all(&bytes).and_then(|()| writer.flush());
        state = guest.lock();
        if written.is_err() && state.link.epoch == epoch {
            // Reading tells when the channel is at its end; until then another hello may come.
            state.requests.lose_connection();
            state.link.lose();
        }
    }
}

/// A thread with a small stack.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<thread::JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).stack_size(limits::STACK_BYTES).spawn(work)
}
