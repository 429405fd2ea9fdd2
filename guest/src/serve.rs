//! Starts a guest, and the two threads of a connection.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Instant;

use crate::files::Uploads;
use crate::limits;
use crate::protocol::guest_frame::Body;
use crate::protocol::{Deframer, Found, HostFrame, Readiness};
use crate::settings::{ImageConfig, Machine, Settings};
use crate::state::{
    Guest, Health, Incoming, Job, Link, Next, Requests, Shared, State, Workload, frame, spawn,
};
use crate::{readiness, reborn, sleep, vitals};

impl Guest {
    /// Begins to watch what the workload says about itself. The workload is started by `reborn`.
    pub fn new(settings: Settings) -> io::Result<Self> {
        std::fs::create_dir_all(&settings.run_dir)?;
        sleep::remove_old_marker(&settings.run_dir);
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
                // The thread that waits until all answers have left.
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
