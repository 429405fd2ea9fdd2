//! What each request does: the same for one that comes for the first time and one that comes again.

use crate::guest::{Guest, State, spawn};
use crate::limits;
use crate::protocol::guest_frame::Body;
use crate::protocol::host_frame::Body as Asked;
use crate::protocol::{self, Accepted, Done, GuestHello, HostFrame, HostHello};
use crate::refusal::Refusal;
use crate::requests::Request;
use crate::{files, relay, shutdown, sleep, workload};

impl Guest {
    /// Takes one frame. Those of another connection than the one that said hello last are dropped.
    pub(crate) fn handle(&self, frame: HostFrame) {
        let HostFrame { nonce, request: number, body: Some(body) } = frame else { return };
        if let Asked::Hello(hello) = body {
            self.greet(nonce, &hello);
            return;
        }
        let version = {
            let state = self.lock();
            if state.link.nonce != Some(nonce) || number == 0 || state.link.version == 0 {
                return;
            }
            state.link.version
        };
        if version < since(&body) {
            self.refuse(
                number,
                Refusal::new("unsupported", format!("not in version {version} of the protocol")),
            );
            return;
        }
        match body {
            Asked::Hello(_) => {}
            Asked::Exec(exec) => self.exec(number, &exec),
            Asked::Input(input) => self.update(|state| {
                if let Some(exec) = state.requests.exec(number) {
                    exec.take_input(&input);
                }
            }),
            Asked::Signal(signal) => self.update(|state| {
                if let Some(exec) = state.requests.exec(number) {
                    exec.signal(signal.number);
                }
            }),
            Asked::Window(window) => self.update(|state| match state.requests.all.get_mut(&number) {
                Some(Request::Exec(exec)) => exec.acknowledge(window.bytes),
                Some(Request::Relay(relay)) => relay.acknowledge(window.bytes),
                _ => {}
            }),
            Asked::RelayOpen(open) => relay::open(self, number, &open),
            Asked::RelayData(chunk) => self.update(|state| {
                if let Some(relay) = state.requests.relay(number) {
                    relay.take(&chunk);
                }
            }),
            Asked::ReadFile(read) => files::read(self, number, read),
            Asked::ListDirectory(list) => files::list(self, number, list.path),
            Asked::WriteFile(piece) => {
                if self.begin(number, false) && self.0.writes.try_send((number, piece)).is_err() {
                    self.abandon(number, Refusal::busy("pieces of files"));
                }
            }
            Asked::Ping(_) => self.update(|state| state.link.reply(number, Body::Done(Done {}))),
            Asked::Forget(_) => self.forget(number),
            Asked::PrepareSleep(request) => {
                self.work(number, move |guest| sleep::prepare(guest, number, &request));
            }
            Asked::CancelSleep(_) => self.work(number, |guest| {
                sleep::cancel(guest);
                Ok(())
            }),
            Asked::SetEntry(request) => self.work(number, move |_| files::set_entry(&request)),
            Asked::EndWork(request) => self.work(number, move |guest| {
                shutdown::end_work(guest, request.grace_seconds);
                Ok(())
            }),
            Asked::Reborn(reborn) => self.work(number, move |guest| guest.reborn(&reborn)),
            Asked::Secrets(piece) => self.work(number, move |guest| guest.take_secrets(&piece)),
            Asked::WipeSecrets(_) => self.work(number, Guest::wipe_secrets),
            Asked::Shutdown(request) => self.work(number, move |guest| {
                shutdown::end_work(guest, request.grace_seconds);
                // Answered first, so that the answer can still leave.
                guest.answer(number, Ok(Body::Done(Done {})));
                shutdown::finish(guest);
                Ok(())
            }),
        }
    }

    fn greet(&self, nonce: u64, hello: &HostHello) {
        let ours = (protocol::MIN_VERSION, self.0.settings.max_version);
        let version = protocol::negotiate((hello.min_version, hello.max_version), ours).unwrap_or(0);
        let answer = |state: &State| GuestHello {
            version,
            guest_min: ours.0,
            guest_max: ours.1,
            guest: env!("CARGO_PKG_VERSION").to_owned(),
            boot_id: self.0.boot_id.clone(),
            readiness: state.readiness.into(),
            configured: state.configured,
        };
        let unconfigured = self.update(|state| {
            // The same hello again: the answer did not arrive in time, and nothing was asked since.
            if state.link.nonce != Some(nonce) {
                state.requests.lose_connection();
            }
            state.link.open(nonce, answer(state));
            !state.configured
        });
        // An agent of version 1 never says who this guest is: the workload can't wait for that.
        if version == 1 && unconfigured {
            workload::start(self);
        }
    }

    /// Whether this request is to be carried out now. One that was is answered again; one that is under way is told to
    /// this connection too.
    pub(crate) fn begin(&self, number: u64, accepts: bool) -> bool {
        self.update(|state| {
            let epoch = state.link.epoch;
            match state.requests.all.get_mut(&number) {
                Some(Request::Answered(body)) => {
                    let body = body.clone();
                    state.link.reply(number, body);
                    return false;
                }
                Some(Request::Working { asked }) => {
                    *asked = epoch;
                    if accepts && state.link.version >= 2 {
                        state.link.reply(number, Body::Accepted(Accepted {}));
                    }
                    return false;
                }
                Some(_) => {
                    let refusal = Refusal::invalid("this number names another request");
                    state.link.reply(number, refusal.into_body());
                    return false;
                }
                None => {}
            }
            let working = state.requests.count(|request| matches!(request, Request::Working { .. }));
            if working >= limits::MAX_WORKING {
                state.link.reply(number, Refusal::busy("requests").into_body());
                return false;
            }
            state.requests.all.insert(number, Request::Working { asked: epoch });
            if accepts && state.link.version >= 2 {
                state.link.reply(number, Body::Accepted(Accepted {}));
            }
            true
        })
    }

    /// A request that a thread carries out and that ends in `done`.
    fn work(&self, number: u64, work: impl FnOnce(&Self) -> Result<(), Refusal> + Send + 'static) {
        if !self.begin(number, true) {
            return;
        }
        let guest = self.clone();
        let spawned = spawn("request", move || {
            let outcome = work(&guest).map(|()| Body::Done(Done {}));
            guest.answer(number, outcome);
        });
        if spawned.is_err() {
            self.abandon(number, Refusal::busy("threads"));
        }
    }

    /// Answers without remembering: the same request may be sent again.
    pub(crate) fn refuse(&self, number: u64, refusal: Refusal) {
        self.update(|state| state.link.reply(number, refusal.into_body()));
    }

    fn abandon(&self, number: u64, refusal: Refusal) {
        self.update(|state| {
            state.requests.remove(number);
            state.link.reply(number, refusal.into_body());
        });
    }

    fn forget(&self, number: u64) {
        self.update(|state| match state.requests.all.get_mut(&number) {
            Some(Request::Exec(exec)) if exec.exit.is_none() => exec.cancel_and_forget(),
            Some(Request::Working { asked }) => *asked = 0,
            Some(_) => {
                if let Some(Request::Relay(relay)) = state.requests.remove(number) {
                    relay.wake.wake();
                }
            }
            None => {}
        });
    }
}

/// The version of the protocol that brought a request.
fn since(body: &Asked) -> u32 {
    match body {
        Asked::Hello(_) | Asked::Shutdown(_) => 1,
        Asked::EndWork(_) | Asked::SetEntry(_) => 3,
        Asked::Exec(exec) => {
            if exec.stdin {
                2
            } else {
                1
            }
        }
        Asked::Secrets(_) | Asked::WipeSecrets(_) => 3,
        _ => 2,
    }
}
