//! Programs run for the agent.

mod run;
mod terminal;

use crate::limits;
use crate::protocol::{self, FailureCode};
use crate::refusal::Refusal;
use crate::state::Guest;
use crate::state::Request;

pub(crate) use run::check_directory;

impl Guest {
    /// Starts an exec; or follows one that was started, from the byte that the request names.
    pub(crate) fn exec(&self, number: u64, request: &protocol::Exec) {
        enum Known {
            No,
            Yes,
            Refused(Refusal),
        }
        let known = self.update(|state| {
            let open = state.requests.execs().filter(|exec| exec.is_open()).count();
            match state.requests.all.get_mut(&number) {
                Some(Request::Exec(exec)) => {
                    exec.attach(request);
                    Known::Yes
                }
                Some(Request::Answered(body)) => {
                    let body = body.clone();
                    state.link.reply(number, body);
                    Known::Yes
                }
                Some(_) => Known::Refused(Refusal::invalid("this number belongs to another request")),
                None if state.going => {
                    Known::Refused(Refusal::new(FailureCode::Busy, "this guest is shutting down"))
                }
                None if open >= limits::MAX_EXECS => Known::Refused(Refusal::busy("execs")),
                None => Known::No,
            }
        });
        match known {
            Known::Yes => {}
            Known::Refused(refusal) => self.refuse(number, refusal),
            Known::No => {
                if let Err(refusal) = run::start(self, number, request) {
                    // Remembered: the request was carried out, and this is how it ended.
                    self.update(|state| {
                        let body = refusal.into_body();
                        state.link.reply(number, body.clone());
                        state.requests.all.insert(number, Request::Answered(body));
                        state.requests.is_over(number);
                    });
                }
            }
        }
    }
}
