//! `exec` and `attach`: a program in a guest, and the stream that follows it.
//!
//! A program belongs to no stream. It has an id, its number in the guest's protocol, under which asking again is asking once:
//! `exec` with the id of a program that runs goes on with it, `attach` does so and starts none. Output is confirmed to the
//! guest once the caller has it, so that whatever was under way when a stream, a coordinator or an agent was lost is told
//! again. A program that lost its stream waits [`GRACE`] with what it says next; then its guest keeps the newest of its output and
//! it runs on for [`LEFT_ALONE`] at most ([`parked`]).
//!
//! One task follows one stream, with four concerns side by side: output, frames of the caller, input that the program has
//! yet to take, and the hold, which lapses when nothing moves. None waits for another.

mod activity;
mod input;
mod parked;
mod traced;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mvm_proto::text::chain;
use mvm_proto::wire::tunnel::v1::{self as wire, frame};
use mvm_proto::{InstanceId, Phase, Problem};
use mvm_telemetry::{Attribute, Span};
use parking_lot::Mutex;
use tokio::time::timeout;

use self::activity::Activity;
use self::input::InputQueue;
use self::traced::TracedGuest;
use super::limits::StreamSlot;
use super::stream::{Answers, Frames, Opening, bad, finish, framed, lost};
use crate::guest::{ExecEvent, ExecHandle, ExecRequest, ExecTerminal, GoOn, LinkError};
use crate::intake::api::exec::{Audited, guest_problem};

/// What begins an exec's id.
const ID_PREFIX: &str = "x-";
/// The highest number of a signal.
const MAX_SIGNAL: u32 = 64;

/// How long a program that lost its stream waits with its output for another: a coordinator or an agent restarts within it.
pub(super) const GRACE: Duration = Duration::from_secs(30);
/// How long it runs on without one; then it is ended. Else programs that everyone forgot would fill their guest.
pub(super) const LEFT_ALONE: Duration = Duration::from_secs(3600);
/// How long the end of one that ended without a stream can be asked for.
pub(super) const END_KEPT: Duration = Duration::from_secs(120);

/// The slots of the programs that are followed or left alone, by their ids: the next stream of one takes over the slot of the last.
#[derive(Debug, Default)]
pub(super) struct Execs(Mutex<BTreeMap<(InstanceId, u64), Weak<StreamSlot>>>);

impl Execs {
    fn slot(&self, opening: &Opening, number: u64) -> Result<Arc<StreamSlot>, Problem> {
        let mut slots = self.0.lock();
        // No more than there are slots.
        slots.retain(|_, slot| slot.strong_count() > 0);
        let key = (opening.place.instance.clone(), number);
        if let Some(slot) = slots.get(&key).and_then(Weak::upgrade) {
            return Ok(slot);
        }
        let slot = Arc::new(opening.shared.limits.take(&opening.place.tenant, &opening.actor)?);
        slots.insert(key, Arc::downgrade(&slot));
        Ok(slot)
    }
}

/// Runs a program.
pub(super) async fn run(
    opening: Opening,
    (may_wake, is_activity): (bool, bool),
    asked: wire::Exec,
    span: &mut Span,
    frames_in: Frames,
    frames_out: &mut Answers,
) -> Result<(), Problem> {
    let number = match asked.exec_id.as_str() {
        "" => fastrand::u64(1..),
        id => number_of(id)?,
    };
    let mut request = request(asked)?;
    let guest = TracedGuest::begin(&opening.shared.parts.tracer, span);
    guest.tell(&mut request);
    let slot = opening.shared.execs.slot(&opening, number)?;
    let (node, instance) = (opening.shared.parts.node.clone(), opening.place.instance.clone());
    let metrics = &opening.shared.parts.metrics;
    let mut audited = Audited::begin(&node, metrics, &instance, opening.actor.clone(), &request.command);
    let begun = async {
        let activity = Activity::begin(&node, &opening.place, may_wake, is_activity).await?;
        let handle = node.guests().exec_under(&instance, number, request).await;
        Ok((activity, handle.map_err(|error| guest_problem(&instance, &error))?))
    };
    let begun = timeout(opening.deadline, begun).await.unwrap_or_else(|_| Err(opening.late()));
    let (activity, handle) = begun.inspect_err(|problem| audited.fail(problem.detail.clone()))?;
    span.set(Attribute::Woken, activity.has_woken);
    let followed = Followed { opening, handle: Arc::new(handle), audited, slot, guest, is_attached: false };
    followed.follow(&activity, frames_in, frames_out).await
}

/// Follows a program that an earlier stream began.
pub(super) async fn attach(
    opening: Opening,
    (may_wake, is_activity): (bool, bool),
    asked: wire::Attach,
    span: &mut Span,
    frames_in: Frames,
    frames_out: &mut Answers,
) -> Result<(), Problem> {
    let number = number_of(&asked.exec_id)?;
    let slot = opening.shared.execs.slot(&opening, number)?;
    let (node, instance) = (opening.shared.parts.node.clone(), opening.place.instance.clone());
    let reason = format!("attached to {}, asked by {}", id_of(number), opening.actor);
    let metrics = &opening.shared.parts.metrics;
    let mut audited = Audited::of(&node, metrics, &instance, opening.actor.clone(), reason);
    let input_from = (!asked.input_follows).then_some(asked.input_from);
    let from = GoOn { output_from: asked.output_from, input_from };
    let begun = async {
        let activity = Activity::begin(&node, &opening.place, may_wake, is_activity).await?;
        let handle = node.guests().attach(&instance, number, from).await;
        Ok((activity, handle.map_err(|error| guest_problem(&instance, &error))?))
    };
    let begun = timeout(opening.deadline, begun).await.unwrap_or_else(|_| Err(opening.late()));
    let (activity, handle) = begun.inspect_err(|problem| audited.fail(problem.detail.clone()))?;
    span.set(Attribute::Woken, activity.has_woken);
    let guest = TracedGuest::begin(&opening.shared.parts.tracer, span);
    let followed = Followed { opening, handle: Arc::new(handle), audited, slot, guest, is_attached: true };
    followed.follow(&activity, frames_in, frames_out).await
}

/// A program with its stream.
struct Followed {
    opening: Opening,
    handle: Arc<ExecHandle>,
    audited: Audited,
    slot: Arc<StreamSlot>,
    guest: TracedGuest,
    /// By `attach`: a guest that does not know the program was not asked to run one.
    is_attached: bool,
}

/// How a stream ends.
enum End {
    /// The program has ended, and the caller was told.
    Over,
    /// The stream is gone; the program is not.
    Lost,
    /// The caller is told why.
    Problem(Problem),
    /// This agent stops; the next one goes on.
    Stopping,
}

impl Followed {
    /// An error is why the stream ends, for its caller.
    async fn follow(
        mut self,
        activity: &Activity,
        frames_in: Frames,
        frames_out: &mut Answers,
    ) -> Result<(), Problem> {
        let (handle, input) = (Arc::clone(&self.handle), InputQueue::default());
        let shutdown = self.opening.shared.parts.shutdown.clone();
        let gone = frames_out.gone();
        let ended = tokio::select! {
            end = self.outward(activity, frames_out) => end,
            end = inward(&handle, activity, &input, frames_in) => end,
            () = input.pass_on(&handle) => End::Lost,
            () = activity.lapse(&handle) => End::Lost,
            // One that has said all it had to say, and left, is heard of by this alone.
            () = gone => End::Lost,
            () = shutdown.cancelled() => End::Stopping,
        };
        match ended {
            End::Over => finish(frames_out).await,
            End::Problem(problem) => {
                self.audited.fail(problem.detail.clone());
                self.guest.fail(&problem);
                return Err(problem);
            }
            End::Lost => {
                let Self { handle, audited, slot, .. } = self;
                tokio::spawn(parked::parked(handle, audited, slot, shutdown));
            }
            End::Stopping => self.audited.leave("left running: the agent stopped"),
        }
        Ok(())
    }

    /// Tells what comes of the program.
    async fn outward(&mut self, activity: &Activity, frames_out: &mut Answers) -> End {
        let opened = self.opening.opened(id_of(self.handle.number()), activity.has_woken);
        if let Err(error) = frames_out.send(&opened).await {
            lost(&error);
            return End::Lost;
        }
        loop {
            let event = self.handle.next().await;
            let body = match event {
                Ok(ExecEvent::Accepted) => continue,
                Ok(ExecEvent::Output { stderr, data, offset, lost }) => {
                    activity.moved(&self.handle);
                    frame::Body::Output(wire::Output { stderr, data: data.into(), offset, lost })
                }
                Ok(ExecEvent::Taken(bytes)) => frame::Body::Taken(wire::Taken { bytes }),
                Ok(ExecEvent::Exit { code, signal, timed_out, cancelled }) => {
                    self.audited.hear(&event);
                    self.guest.ended(code, signal);
                    frame::Body::Exit(wire::Exit { code, signal, timed_out, cancelled })
                }
                Err(error) => return End::Problem(self.problem(&error)),
            };
            let is_last = matches!(body, frame::Body::Exit(_));
            match frames_out.send(&framed(body)).await {
                Ok(()) if is_last => return End::Over,
                Ok(()) => {}
                Err(error) => {
                    lost(&error);
                    return End::Lost;
                }
            }
        }
    }

    /// Why the guest says no more of the program.
    fn problem(&self, error: &LinkError) -> Problem {
        let id = id_of(self.handle.number());
        let place = &self.opening.place;
        match error {
            LinkError::Replaced => {
                let detail = format!("another stream follows {id} now");
                Problem::new(409, "replaced", detail, "Only one stream follows a program at a time.")
            }
            LinkError::Refused { .. } if self.is_attached => {
                let detail = format!("{} has no program {id}: {}", place.instance, chain(error));
                let remediation =
                    "It ended and its end was told, or the instance was started anew since. Run it again.";
                Problem::new(404, "exec_unknown", detail, remediation)
            }
            LinkError::NoLink(_) => {
                let found = self.opening.shared.parts.node.find(&place.tenant, &place.pool, &place.instance);
                let phase = found.map(|found| found.phase).unwrap_or_else(|_| "gone".to_owned());
                if [Phase::Warm, Phase::Sleeping].iter().any(|rest| rest.as_str() == phase) {
                    let detail = format!("{place} was put to sleep while {id} was followed");
                    let remediation = format!("Wake it and go on: mvm exec {place} --attach {id}");
                    return Problem::new(409, "asleep", detail, remediation);
                }
                let detail = format!("{place} is {phase}, and {id} ended with it");
                Problem::new(409, "not_running", detail, "Start the instance, then run the command again.")
            }
            error => guest_problem(&place.instance, error),
        }
    }
}

/// Takes the frames of the caller.
async fn inward(handle: &ExecHandle, activity: &Activity, input: &InputQueue, mut frames_in: Frames) -> End {
    loop {
        let body = match frames_in.recv().await {
            Ok(Some(frame)) => frame.body,
            // The caller has nothing more to say, and still listens.
            Ok(None) => return std::future::pending().await,
            Err(error) => {
                lost(&error);
                return End::Lost;
            }
        };
        handle.wait_until_read().await;
        match body {
            Some(frame::Body::Taken(taken)) => handle.confirm(taken.bytes),
            Some(frame::Body::Input(piece)) => {
                if let Err(problem) = activity.wanted(handle).await {
                    return End::Problem(problem);
                }
                if !input.push(piece) {
                    let detail =
                        "the input exceeds what the program was said to have taken by more than a window";
                    return End::Problem(bad(detail.to_owned()));
                }
            }
            Some(frame::Body::Signal(signal)) if signal.number <= MAX_SIGNAL => {
                if let Err(problem) = activity.wanted(handle).await {
                    return End::Problem(problem);
                }
                // A link that is down drops it, as it would one that came after the program's end.
                let _ = handle.signal(signal.number);
            }
            Some(frame::Body::Signal(_)) => {
                return End::Problem(bad(format!("a signal is 0 to {MAX_SIGNAL}")));
            }
            // As a signal.
            Some(frame::Body::Resize(size)) => drop(handle.resize(size.rows, size.cols)),
            // Of a kind that a newer peer knows.
            None => {}
            Some(_) => return End::Problem(bad("the frame is not one of an exec's caller".to_owned())),
        }
    }
}

fn request(asked: wire::Exec) -> Result<ExecRequest, Problem> {
    let request = ExecRequest {
        command: asked.command,
        env: asked.env.into_iter().map(|one| (one.name, one.value)).collect(),
        directory: asked.directory,
        timeout: (asked.timeout_seconds > 0).then(|| Duration::from_secs(asked.timeout_seconds.into())),
        stdin: asked.stdin,
        user: (!asked.user.is_empty()).then(|| asked.user.as_str().into()),
        terminal: asked.tty.map(|tty| ExecTerminal { rows: tty.rows, columns: tty.cols, term: tty.term }),
        uid: asked.uid,
        gid: asked.gid,
        max_output_bytes: asked.max_output_bytes,
    };
    request.check().map_err(bad)?;
    Ok(request)
}

/// A program's id: its number in the guest's protocol.
fn id_of(number: u64) -> String {
    format!("{ID_PREFIX}{number:016x}")
}

fn number_of(id: &str) -> Result<u64, Problem> {
    let digits = id.strip_prefix(ID_PREFIX).filter(|digits| {
        digits.len() == 16 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    });
    let number = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()).filter(|number| *number > 0);
    number.ok_or_else(|| {
        bad("an exec's id is x- and sixteen hex digits, as it was told when it began".to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_reads_back_and_no_other_text_is_one() {
        for number in [1, 0xfeed, u64::MAX] {
            assert_eq!(number_of(&id_of(number)).ok(), Some(number));
        }
        for text in
            ["", "x-", "x-0000000000000000", "x-+00000000000000f", "x-FFFFFFFFFFFFFFFF", "00000000000000ff"]
        {
            assert_eq!(number_of(text).expect_err(text).code, "bad_request");
        }
    }
}
