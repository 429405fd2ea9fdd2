//! What each request does: the same for one that comes for the first time and one that comes again.

use crate::limits;
use crate::protocol::guest_frame::Body;
use crate::protocol::host_frame::Body as Asked;
use crate::protocol::{self, Accepted, Done, FailureCode, GuestHello, HostFrame, HostHello};
use crate::refusal::Refusal;
use crate::state::Request;
use crate::state::{Guest, State};
use crate::{files, health, relay, shutdown, sleep, workload};

/// What this guest can do beyond its version.
const FEATURES: &[&str] = &[
    protocol::FEATURE_RESTART,
    protocol::FEATURE_HEALTH,
    protocol::FEATURE_WORKLOAD,
    protocol::FEATURE_PTY,
    protocol::FEATURE_EXEC_USER,
    protocol::FEATURE_DETACH,
];

impl Guest {
    /// Takes one frame of the connection of this epoch. Those of another than the one that said hello last are dropped.
    pub(crate) fn handle(&self, frame: HostFrame, epoch: u64) {
        let HostFrame { nonce, request: number, body: Some(body) } = frame else { return };
        if let Asked::Hello(hello) = body {
            self.greet(nonce, &hello, epoch);
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
                Refusal::new(FailureCode::Unsupported, format!("not in version {version} of the protocol")),
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
            Asked::Resize(size) => self.update(|state| {
                if let Some(exec) = state.requests.exec(number) {
                    exec.resize(size);
                }
            }),
            Asked::Detach(_) => self.update(|state| {
                if let Some(exec) = state.requests.exec(number) {
                    exec.let_go();
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
                if self.begin(number, true) {
                    let announced = sleep::announce(self, number);
                    let begun = self.carry_out(number, move |guest| {
                        announced.and_then(|()| sleep::prepare(guest, number, &request))
                    });
                    if !begun {
                        sleep::cancel(self);
                    }
                }
            }
            Asked::CancelSleep(_) => {
                if self.begin(number, true) {
                    sleep::cancel(self);
                    self.answer(number, Ok(Body::Done(Done {})));
                }
            }
            Asked::SetEntry(request) => self.work(number, move |_| files::set_entry(&request)),
            Asked::EndWork(request) => self.work(number, move |guest| {
                shutdown::end_work(guest, request.grace_seconds);
                Ok(())
            }),
            Asked::Reborn(reborn) => {
                // Over so soon that its answer may as well be the first word about it.
                if self.begin(number, false) {
                    // Whatever sleep this guest prepared for is over; one that is asked for next is not.
                    let announced = sleep::call_off(self);
                    let take_down = move |guest: &Self| {
                        if announced {
                            sleep::remove_marker(guest);
                        }
                    };
                    if !self.carry_out_and(number, move |guest| guest.reborn(&reborn), take_down) {
                        take_down(self);
                    }
                }
            }
            Asked::RestartWorkload(request) => {
                self.work(number, move |guest| workload::restart(guest, &request));
            }
            Asked::SetHealth(request) => self.work(number, move |guest| health::set(guest, request.health)),
            Asked::SetWorkload(request) => self.work(number, move |guest| {
                workload::set(guest, request.workload);
                Ok(())
            }),
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

    fn greet(&self, nonce: u64, hello: &HostHello, epoch: u64) {
        let ours = (protocol::MIN_VERSION, self.0.settings.max_version);
        let version = protocol::negotiate((hello.min_version, hello.max_version), ours).unwrap_or(0);
        // What has no version of its own is for those who know all that have one.
        let features = if version == protocol::MAX_VERSION { FEATURES } else { &[] };
        let answer = |state: &State| GuestHello {
            features: features.iter().map(|feature| (*feature).to_owned()).collect(),
            workload: (!features.is_empty()).then(|| state.told().2),
            version,
            guest_min: ours.0,
            guest_max: ours.1,
            guest: env!("CARGO_PKG_VERSION").to_owned(),
            boot_id: self.0.boot_id.clone(),
            readiness: state.told().0.into(),
            configured: state.configured,
        };
        let unconfigured = self.update(|state| {
            // Of an older connection: the newer one has said hello, or will.
            if state.link.epoch != epoch {
                return false;
            }
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
            self.update(|_| ());
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
                    let refusal = Refusal::invalid("this number belongs to another request");
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
        if self.begin(number, true) {
            self.carry_out(number, work);
        }
    }

    /// The same for one that was begun. Whether there is a thread for it.
    fn carry_out(
        &self,
        number: u64,
        work: impl FnOnce(&Self) -> Result<(), Refusal> + Send + 'static,
    ) -> bool {
        self.carry_out_and(number, work, |_| ())
    }

    /// The same for work without an answer.
    fn carry_out_and(
        &self,
        number: u64,
        work: impl FnOnce(&Self) -> Result<(), Refusal> + Send + 'static,
        then: impl FnOnce(&Self) + Send + 'static,
    ) -> bool {
        let guest = self.clone();
        let begun = self.do_beside(move || {
            let outcome = work(&guest).map(|()| Body::Done(Done {}));
            guest.answer(number, outcome);
            then(&guest);
        });
        if begun.is_err() {
            self.abandon(number, Refusal::busy("threads"));
        }
        begun.is_ok()
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
        Asked::EndWork(_) | Asked::SetEntry(_) | Asked::RestartWorkload(_) | Asked::SetHealth(_) => 3,
        Asked::Resize(_) | Asked::Detach(_) => 3,
        Asked::Exec(exec) => match exec {
            protocol::Exec { terminal: Some(_), .. } | protocol::Exec { user: Some(_), .. } => 3,
            protocol::Exec { stdin: true, .. } => 2,
            _ => 1,
        },
        Asked::Secrets(_) | Asked::WipeSecrets(_) | Asked::SetWorkload(_) => 3,
        _ => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;
    use crate::protocol::{CancelSleep, PrepareSleep, Readiness};

    /// One that said hello to nonce 1 and has work, so that every sleep waits.
    fn busy_guest() -> (tempfile::TempDir, Guest) {
        let folder = tempfile::tempdir().unwrap();
        let guest = Guest::new(Settings::borrowed(folder.path())).unwrap();
        let hello = HostHello { min_version: 1, max_version: 3, agent: "test".into() };
        guest.handle(HostFrame { nonce: 1, request: 0, body: Some(Asked::Hello(hello)) }, 0);
        guest.set_readiness(Readiness::Busy, "");
        (folder, guest)
    }

    /// Waits for it.
    fn answer_to(guest: &Guest, number: u64) -> Body {
        let mut state = guest.lock();
        loop {
            match state.requests.all.get(&number) {
                Some(Request::Answered(body)) => return body.clone(),
                _ => state = guest.wait(state, None),
            }
        }
    }

    #[test]
    fn a_hello_of_an_older_connection_takes_nothing_from_the_newer_one() {
        let (_folder, guest) = busy_guest();
        let hello = |nonce, epoch| {
            let hello = HostHello { min_version: 1, max_version: 3, agent: "test".into() };
            guest.handle(HostFrame { nonce, request: 0, body: Some(Asked::Hello(hello)) }, epoch);
            guest.lock().link.nonce
        };
        // Another connection came, and its agent said hello, while the older one's was about to be heard.
        guest.lock().link.epoch = 1;
        assert_eq!(hello(2, 1), Some(2));
        assert_eq!(hello(3, 0), Some(2));
    }

    #[test]
    fn a_sleep_that_is_asked_for_after_a_rebirth_is_not_called_off_by_it() {
        let (_folder, guest) = busy_guest();
        let ask = |request, body| guest.handle(HostFrame { nonce: 1, request, body: Some(body) }, 0);
        // It can't be carried out yet.
        let held = guest.0.rebirth.lock().unwrap();
        ask(1, Asked::Reborn(protocol::Reborn { entropy: vec![7; 32], ..Default::default() }));
        ask(2, Asked::PrepareSleep(PrepareSleep { timeout_seconds: 60 }));
        drop(held);
        assert_eq!(answer_to(&guest, 1), Body::Done(Done {}));
        assert_eq!(guest.lock().preparing, Some(2));
        guest.set_readiness(Readiness::Idle, "");
        assert_eq!((answer_to(&guest, 2), guest.lock().announced), (Body::Done(Done {}), true));
    }

    #[test]
    fn a_sleep_can_be_called_off_as_soon_as_it_was_asked_for() {
        let (folder, guest) = busy_guest();
        let ask = |request, body| guest.handle(HostFrame { nonce: 1, request, body: Some(body) }, 0);
        // Often enough that a thread which had to begin first would be late once.
        for number in (1..200).step_by(2) {
            ask(number, Asked::PrepareSleep(PrepareSleep { timeout_seconds: 1000 }));
            assert_eq!(guest.lock().preparing, Some(number));
            ask(number + 1, Asked::CancelSleep(CancelSleep {}));
            assert_eq!(guest.lock().preparing, None);
            assert!(!folder.path().join("run/prepare-sleep").exists());
            assert_eq!(answer_to(&guest, number), Refusal::new(FailureCode::Busy, "called off").into_body());
        }
    }
}
