//! One guest's requests: what was asked, what is still to be sent, what came back.
//!
//! The link's task moves bytes; callers put requests in and take answers out. A request stays here until its last
//! answer was taken or its caller went away, so that a link that breaks sends it again under the same number.

use std::collections::BTreeMap;
use std::sync::Arc;

use mvm_proto::InstanceId;
use mvm_proto::guest::{Exec, Forget, GuestFrame, GuestHello, HostFrame, guest_frame, host_frame, put_frame};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, watch};
use zeroize::Zeroizing;

use super::call::{Call, Event, Inbox, Work};
use super::error::LinkError;
use super::pending::{ExecState, InboundBuffer, Kind, Pending};
use super::view::GuestView;
use crate::clock::Clock;

/// More requests than this to one guest at once are refused: each costs memory on both sides.
const MAX_PENDING: usize = 256;

/// The sender of a stream waits while this much is in flight.
const OUT_LIMIT_BYTES: usize = 256 * 1024;

/// A guest that does not read its channel gets no more than this kept for it: all that may be pending, whole, fits.
const MAX_OUT_BYTES: usize = 64 * 1024 * 1024;

/// Whether the guest's processors run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Running,
    /// What is sent waits; nothing is expected.
    Paused,
    /// The VM is gone, or belongs to another instance.
    Closed,
}

#[derive(Debug)]
pub(super) struct Link {
    pub(super) instance: InstanceId,
    pub(super) clock: Clock,
    /// For the task: there is something to send, or the mode changed.
    pub(super) work: Notify,
    /// For senders of streams: there is room again.
    room: Notify,
    view: watch::Sender<GuestView>,
    changed: Arc<watch::Sender<u64>>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    mode: Mode,
    session: Option<Session>,
    /// There may be secrets in it.
    out: Zeroizing<Vec<u8>>,
    pending: BTreeMap<u64, Pending>,
}

/// Both sides greeted each other on the stream that is open now.
#[derive(Debug, Clone, Copy)]
struct Session {
    nonce: u64,
    version: u32,
}

impl Link {
    pub(super) fn new(instance: InstanceId, clock: Clock, changed: Arc<watch::Sender<u64>>) -> Self {
        let inner =
            Inner { mode: Mode::Running, session: None, out: Zeroizing::default(), pending: BTreeMap::new() };
        Self {
            instance,
            clock,
            work: Notify::new(),
            room: Notify::new(),
            view: watch::Sender::new(GuestView::default()),
            changed,
            inner: Mutex::new(inner),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    pub(super) fn view(&self) -> GuestView {
        self.view.borrow().clone()
    }

    pub(super) fn follow(&self) -> watch::Receiver<GuestView> {
        self.view.subscribe()
    }

    /// Changes the view, and wakes the reconcile loop if that mattered.
    pub(super) fn modify_view(&self, change: impl FnOnce(&mut GuestView)) {
        let mut mattered = false;
        self.view.send_modify(|view| {
            let before = view.matters();
            change(view);
            mattered = before != view.matters();
        });
        if mattered {
            self.changed.send_modify(|count| *count += 1);
        }
    }

    pub(super) fn mode(&self) -> Mode {
        self.lock().mode
    }

    pub(super) fn set_mode(&self, mode: Mode) {
        let mut inner = self.lock();
        if inner.mode == mode || inner.mode == Mode::Closed {
            return;
        }
        let resumed = inner.mode == Mode::Paused && mode == Mode::Running;
        inner.mode = mode;
        if mode == Mode::Closed {
            for pending in std::mem::take(&mut inner.pending).into_values() {
                pending.inbox.push(Event::Broken(LinkError::NoLink(self.instance.clone())));
            }
            inner.out = Zeroizing::default();
            inner.session = None;
        }
        drop(inner);
        if mode == Mode::Closed {
            self.modify_view(|view| *view = GuestView::default());
        }
        if resumed {
            self.modify_view(|view| view.resumed(self.clock.now()));
        }
        self.work.notify_one();
        self.room.notify_waiters();
    }

    /// Puts a request in; it goes out now, or once the link stands.
    pub(super) fn begin(self: &Arc<Self>, body: host_frame::Body) -> Result<Call, LinkError> {
        let kind = match &body {
            host_frame::Body::Exec(_) => Kind::Exec(ExecState::default()),
            host_frame::Body::RelayOpen(_) => Kind::Relay { inward: InboundBuffer::default() },
            _ => Kind::Plain,
        };
        self.begin_as(body, kind, None)
    }

    /// The same of an exec under a number that its caller knows, and may have asked under before: then it goes on with the
    /// byte of output that the request names, and with this byte of input, or the one that the guest says. An earlier caller
    /// is told that it was replaced.
    pub(super) fn begin_exec(
        self: &Arc<Self>,
        exec: Exec,
        number: u64,
        input_from: u64,
    ) -> Result<Call, LinkError> {
        let kind = Kind::Exec(ExecState::going_on(&exec, input_from));
        self.begin_as(host_frame::Body::Exec(exec), kind, Some(number))
    }

    fn begin_as(
        self: &Arc<Self>,
        body: host_frame::Body,
        kind: Kind,
        known: Option<u64>,
    ) -> Result<Call, LinkError> {
        let work = if matches!(kind, Kind::Plain) { Work::No } else { Work::Yes };
        let inbox = Arc::new(Inbox::default());
        let mut inner = self.lock();
        if inner.mode == Mode::Closed {
            return Err(LinkError::NoLink(self.instance.clone()));
        }
        if inner.pending.len() >= MAX_PENDING {
            return Err(LinkError::TooMany);
        }
        let number = match known {
            Some(number) => number,
            None => std::iter::repeat_with(|| fastrand::u64(1..))
                .find(|number| !inner.pending.contains_key(number))
                .ok_or(LinkError::TooMany)?,
        };
        let is_other = |pending: &Pending| !matches!(pending.kind, Kind::Exec(_));
        if number == 0 || inner.pending.get(&number).is_some_and(is_other) {
            return Err(LinkError::NumberTaken);
        }
        let sent = inner.session.is_some();
        inner.put(number, &body)?;
        let pending = Pending { body, inbox: Arc::clone(&inbox), kind, sent, with_hello: None };
        if let Some(replaced) = inner.pending.insert(number, pending) {
            replaced.inbox.push(Event::Broken(LinkError::Replaced));
        }
        drop(inner);
        self.count_work(Work::No, work);
        self.work.notify_one();
        // A sender of the replaced one finds its request gone, or this one's room.
        self.room.notify_waiters();
        Ok(Call::new(Arc::clone(self), number, inbox, work))
    }

    /// A request counts otherwise among the signs of work from here on.
    pub(super) fn count_work(&self, before: Work, now: Work) {
        if before == now {
            return;
        }
        self.modify_view(|view| {
            match before {
                Work::No => {}
                Work::Yes => view.asked_work = view.asked_work.saturating_sub(1),
                Work::Lapsed => view.lapsed_work = view.lapsed_work.saturating_sub(1),
            }
            match now {
                Work::No => {}
                Work::Yes => view.asked_work += 1,
                Work::Lapsed => view.lapsed_work += 1,
            }
            view.settle(self.clock.now());
        });
    }

    /// Sends more for a request that is under way. Nothing happens when it has ended.
    pub(super) fn send(&self, number: u64, body: &host_frame::Body) -> Result<(), LinkError> {
        let mut inner = self.lock();
        let kind = inner.pending.get_mut(&number).map(|pending| &mut pending.kind);
        match (body, kind) {
            (host_frame::Body::Input(piece), Some(Kind::Exec(exec))) => {
                exec.give(piece);
            }
            (host_frame::Body::Detach(_), Some(Kind::Exec(exec))) => exec.let_go = true,
            (host_frame::Body::RelayData(piece), Some(Kind::Relay { inward })) => {
                inward.sent += piece.data.len() as u64;
            }
            _ => {}
        }
        inner.put(number, body)?;
        drop(inner);
        self.work.notify_one();
        Ok(())
    }

    /// Waits until more of a stream may be sent.
    pub(super) async fn wait_room(&self, number: u64) -> Result<(), LinkError> {
        loop {
            let room = self.room.notified();
            tokio::pin!(room);
            // Registered before looking, so that room made in between is not missed.
            room.as_mut().enable();
            {
                let mut inner = self.lock();
                let Some(pending) = inner.pending.get_mut(&number) else { return Err(LinkError::Broken) };
                let wanted = pending.kind.inward().is_none_or(|inward| inward.has_room());
                if wanted && inner.session.is_some() && inner.out.len() < OUT_LIMIT_BYTES {
                    return Ok(());
                }
            }
            room.await;
        }
    }

    /// Waits while the guest does not read what was sent before.
    pub(super) async fn wait_until_read(&self) {
        loop {
            let room = self.room.notified();
            tokio::pin!(room);
            room.as_mut().enable();
            {
                let inner = self.lock();
                if inner.mode == Mode::Closed || inner.out.len() < OUT_LIMIT_BYTES {
                    return;
                }
            }
            room.await;
        }
    }

    /// The caller has its answer, or no longer wants one. `forget`: the guest need not keep it, nor go on with it.
    pub(super) fn end(&self, number: u64, inbox: &Arc<Inbox>, work: Work, forget: bool) {
        let mut inner = self.lock();
        let is_its_own = inner.pending.get(&number).is_some_and(|pending| Arc::ptr_eq(&pending.inbox, inbox));
        let pending = if is_its_own { inner.pending.remove(&number) } else { None };
        if pending.is_some_and(|pending| pending.sent)
            && forget
            && inner.session.is_some_and(|session| session.version >= 2)
        {
            // An exec that still runs is cancelled by it.
            let _ = inner.put(number, &host_frame::Body::Forget(Forget {}));
        }
        drop(inner);
        self.count_work(work, Work::No);
        self.work.notify_one();
    }

    /// What goes out right behind the hello: who a guest is. It is a guest's first question and waits for no other.
    pub(super) fn put_early(&self, nonce: u64, out: &mut Vec<u8>) {
        for (number, pending) in &mut self.lock().pending {
            if matches!(pending.body, host_frame::Body::Reborn(_)) {
                let body = Some(pending.body.clone());
                // One that is too long is refused once the guest has greeted.
                if put_frame(out, &HostFrame { nonce, request: *number, body }).is_ok() {
                    (pending.sent, pending.with_hello) = (true, Some(nonce));
                }
            }
        }
    }

    /// What is to be sent now, if anything.
    pub(super) fn take_out(&self) -> Zeroizing<Vec<u8>> {
        let out = std::mem::take(&mut self.lock().out);
        if !out.is_empty() {
            self.room.notify_waiters();
        }
        out
    }

    /// The guest greeted back: everything that is under way is asked (again) on this stream.
    pub(super) fn greeted(&self, nonce: u64, hello: &GuestHello) {
        let mut inner = self.lock();
        let again = inner.session.is_some();
        inner.session = Some(Session { nonce, version: hello.version });
        // A guest that greets without end must not make this side send without end.
        if !again || inner.out.is_empty() {
            inner.out = Zeroizing::default();
            inner.ask_all();
        }
        drop(inner);
        self.modify_view(|view| view.greet(hello, self.clock.now()));
        self.work.notify_one();
        self.room.notify_waiters();
    }

    /// The stream is gone.
    pub(super) fn lost(&self) {
        let mut inner = self.lock();
        let Some(session) = inner.session.take() else { return };
        inner.out = Zeroizing::default();
        inner.pending.retain(|_, pending| {
            let goes_on = match &pending.kind {
                _ if !pending.sent => return true,
                Kind::Relay { .. } => false,
                // Version 1 has no way back to an exec.
                Kind::Exec(_) => session.version >= 2,
                Kind::Plain => {
                    pending.inbox.push(Event::Again);
                    true
                }
            };
            if !goes_on {
                pending.inbox.push(Event::Broken(LinkError::Broken));
            }
            goes_on
        });
        drop(inner);
        self.modify_view(|view| {
            view.connected = false;
            view.settle(self.clock.now());
        });
        self.room.notify_waiters();
    }

    /// Takes one frame. Answers without a request, or of an earlier connection, are dropped.
    pub(super) fn take(&self, frame: GuestFrame) {
        use guest_frame::Body;
        let now = self.clock.now();
        match frame.body {
            Some(Body::State(state)) if frame.request == 0 => {
                self.modify_view(|view| view.hear_state(&state, now));
            }
            Some(Body::Heartbeat(beat)) => self.modify_view(|view| view.hear_heartbeat(&beat, now)),
            Some(body) => self.answer(frame.request, body),
            None => {}
        }
    }

    fn answer(&self, number: u64, body: guest_frame::Body) {
        use guest_frame::Body;
        let mut inner = self.lock();
        let Some(pending) = inner.pending.get_mut(&number) else { return };
        let event = match (body, &mut pending.kind) {
            (Body::Output(mut output), Kind::Exec(ExecState { received, .. })) => {
                // After a break the guest may repeat what had already arrived.
                let known = received.saturating_sub(output.offset);
                let length = output.data.len() as u64;
                if known > 0 && known >= length {
                    return;
                }
                output.data.drain(..usize::try_from(known).unwrap_or(0));
                output.offset = output.offset.saturating_add(known);
                *received = output.offset.saturating_add(output.data.len() as u64);
                Event::Output(output)
            }
            (Body::Exit(exit), Kind::Exec(_)) => Event::Exit(exit),
            (Body::Window(window), kind) => {
                let taken = match kind {
                    Kind::Exec(exec) => exec.hear(&window),
                    Kind::Relay { inward } => {
                        inward.take(window.bytes);
                        None
                    }
                    Kind::Plain => None,
                };
                if taken.is_some_and(|taken| !pending.inbox.push(Event::Taken(taken))) {
                    inner.pending.remove(&number);
                }
                drop(inner);
                self.room.notify_waiters();
                return;
            }
            (Body::Chunk(chunk), Kind::Plain | Kind::Relay { .. }) => Event::Chunk(chunk),
            (Body::Directory(directory), Kind::Plain) => Event::Directory(directory),
            (Body::Done(_), Kind::Plain) => Event::Done,
            (Body::Accepted(_), _) => Event::Accepted,
            (Body::Failure(failure), _) => Event::Broken(failure.into()),
            _ => Event::Broken(LinkError::Unexpected),
        };
        if !pending.inbox.push(event) {
            inner.pending.remove(&number);
        }
    }

    /// The version spoken; absent while the link does not stand.
    pub(super) fn version(&self) -> Option<u32> {
        self.lock().session.map(|session| session.version)
    }
}

impl Inner {
    fn put(&mut self, number: u64, body: &host_frame::Body) -> Result<(), LinkError> {
        let Some(session) = self.session else { return Ok(()) };
        if self.out.len() > MAX_OUT_BYTES {
            return Err(LinkError::Flooded);
        }
        let frame = HostFrame { nonce: session.nonce, request: number, body: Some(body.clone()) };
        put_frame(&mut self.out, &frame).map_err(|_| LinkError::TooLong)
    }

    fn ask_all(&mut self) {
        let Some(session) = self.session else { return };
        let mut refused = Vec::new();
        for (number, pending) in &mut self.pending {
            if pending.with_hello == Some(session.nonce) {
                continue;
            }
            let mut bodies = Vec::new();
            match (&pending.kind, &pending.body) {
                (Kind::Exec(state), host_frame::Body::Exec(exec)) => {
                    bodies.extend(state.again(exec));
                }
                (_, body) => bodies.push(body.clone()),
            }
            pending.sent = true;
            for body in bodies {
                let frame = HostFrame { nonce: session.nonce, request: *number, body: Some(body) };
                if put_frame(&mut self.out, &frame).is_err() {
                    refused.push(*number);
                }
            }
        }
        for number in refused {
            if let Some(pending) = self.pending.remove(&number) {
                pending.inbox.push(Event::Broken(LinkError::TooLong));
            }
        }
    }
}
