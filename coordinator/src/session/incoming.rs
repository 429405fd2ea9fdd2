//! Handles the frames that a node sends after its hello.

use std::time::Duration;

use mvm_proto::status::NodeStatus;
use mvm_proto::status::delta::{KeptStatus, NeedsWhole, is_news};
use mvm_proto::status::fit::{fit_info, fit_instance};
use mvm_proto::wire::session::v1::{Ack, Reply, Stage, StatusDelta, agent_frame, reply};
use mvm_proto::{NodeId, Problem};
use tokio::time::Instant;

use super::{End, RETRY_REFUSED, Talk, check_info, check_mark};
use crate::fleet::Refused;
use crate::records::Numbers;
use crate::stored::now;

/// The largest explanation of a refusal that is read.
const MAX_PROBLEM_BYTES: usize = 64 * 1024;
/// Acks in one frame. Agents send no more than 256: so many documents they take before they send.
const MAX_ACKS: usize = 1024;
/// Refusals are told in the log this often per session, with how many there were.
const REFUSALS_EVERY: Duration = Duration::from_secs(10);
/// A node that is ahead of us is followed this often per session; one that keeps running ahead is broken or lying.
const MAX_RENUMBERINGS: u32 = 3;

/// Which of a node's marks its word moved forward.
#[derive(Debug, Default, Clone, Copy)]
struct Moved {
    accepted: bool,
    converged: bool,
}

impl Talk<'_> {
    /// Sends nothing: an answer goes to its slot, so that hearing never waits for the node to read.
    pub(super) async fn hear_body(&mut self, body: agent_frame::Body) -> Result<(), End> {
        match body {
            agent_frame::Body::Hello(_) => return Err(End::protocol("a second hello came".to_owned())),
            agent_frame::Body::Heartbeat(heartbeat) => {
                self.attached.live.lock().seen(now());
                if let Some(mut info) = heartbeat.info {
                    check_info(&self.attached.node, Some(&info))?;
                    fit_info(&mut info, now());
                    let is_news = self.attached.live.change(|live| {
                        let info = Some(info);
                        let is_news = live.info != info;
                        live.info = info;
                        is_news
                    });
                    if is_news {
                        self.state.fleet.mark_dirty(&self.attached.node);
                    }
                }
                self.unanswered = Some(heartbeat.sequence);
            }
            agent_frame::Body::Acks(acks) => {
                if acks.acks.len() > MAX_ACKS {
                    return Err(End::protocol(format!("a frame holds more than {MAX_ACKS} acks")));
                }
                for ack in acks.acks {
                    self.hear_ack(ack).await?;
                }
            }
            agent_frame::Body::Status(status) => self.hear_status(status)?,
            agent_frame::Body::StatusDelta(delta) => self.hear_delta(delta)?,
            agent_frame::Body::Events(events) => {
                self.attached.live.change(|live| live.add_events(events.events));
            }
            agent_frame::Body::Reply(reply) => self.hear_reply(reply),
            agent_frame::Body::SecretsWanted(wanted) => {
                self.secrets.want(wanted.bundles).map_err(End::protocol)?;
            }
            agent_frame::Body::DocumentWanted(_) => self.send_whole().await?,
        }
        Ok(())
    }

    async fn hear_ack(&mut self, ack: Ack) -> Result<(), End> {
        check_mark(ack.mark.as_ref())?;
        check_mark(ack.high_water.as_ref())?;
        let stage = ack.stage();
        let Some(mark) = &ack.mark else { return Ok(()) };
        match stage {
            Stage::Unspecified => {}
            Stage::Accepted => self.news(|live| Moved { accepted: live.accept(mark), converged: false }),
            Stage::Converged => {
                self.news(|live| Moved { converged: live.converge(mark), accepted: false });
            }
            Stage::Refused => return self.hear_refusal(ack).await,
        }
        Ok(())
    }

    /// Changes the node's marks. What it made true is written to the store soon; that it accepted a document is told to
    /// placement only, for the node says it again in its next hello.
    fn news(&self, change: impl FnOnce(&mut crate::fleet::Live) -> Moved) {
        let (moved, push_seconds) = self.attached.live.change(|live| {
            live.seen(now());
            (change(live), live.take_push_time())
        });
        if let Some(seconds) = push_seconds {
            self.state.metrics.push_to_accepted.observe(seconds);
        }
        if moved.converged {
            self.state.fleet.mark_dirty(&self.attached.node);
        } else if moved.accepted {
            self.state.fleet.tell_news(&self.attached.node);
        }
    }

    async fn hear_refusal(&mut self, ack: Ack) -> Result<(), End> {
        let node = self.attached.node.clone();
        let mark = ack.mark.unwrap_or_default();
        let problem = if ack.problem.len() > MAX_PROBLEM_BYTES { Vec::new() } else { ack.problem };
        let told: Option<Problem> = serde_json::from_slice(&problem).ok();
        let code = told.as_ref().map_or("", |problem| problem.code.as_str());
        self.refusals.tell(&node, mark.generation, code, Instant::now());
        self.state.metrics.documents_refused.inc();

        // The node may be ahead without having said so: another coordinator, or a push past this one.
        let ahead = ack.high_water.as_ref().filter(|_| self.renumbered < MAX_RENUMBERINGS);
        if let Some(high_water) = ahead {
            let documents = &self.state.documents;
            let renumbered = documents.renumber_if_past(&node, &self.attached.live, high_water, now()).await;
            if let Some(stored) = renumbered.map_err(|problem| End::problem(&problem))? {
                self.renumbered += 1;
                self.attached.outbox.put_document(stored);
                return Ok(());
            }
        }
        if told.is_some_and(|problem| problem.status >= 500) {
            self.retry = Some(Instant::now() + RETRY_REFUSED);
        }
        // What could not be read far enough to know its numbers is what was sent last.
        let numbers = if mark.generation == 0 { self.sent } else { Some(Numbers::from(&mark)) };
        if let Some(numbers) = numbers {
            self.attached.live.change(|live| live.refused = Some(Refused { numbers, problem }));
            self.state.fleet.mark_dirty(&node);
        }
        Ok(())
    }

    fn hear_status(&mut self, status: NodeStatus) -> Result<(), End> {
        self.check_status(&status)?;
        self.whole_wanted = false;
        // Ending the session would cut the node off for ever: it would come back with the same status. What is kept of
        // it says what is missing.
        let kept = KeptStatus::whole(status, now());
        let before = self.attached.live.lock().status().cloned();
        let is_news = before.is_none_or(|before| is_news(&before, kept.get()));
        self.news(|live| {
            let status = kept.get();
            let accepted = status.accepted.as_ref().is_some_and(|mark| live.accept(mark));
            // Of a mark from before a reset of numbers nothing follows.
            live.reported = status.accepted.clone().filter(|mark| live.is_accepted(mark));
            let converged = status.converged.as_ref().is_some_and(|mark| live.converge(mark));
            live.set_status(kept);
            Moved { accepted, converged }
        });
        self.told_status(is_news);
        Ok(())
    }

    fn hear_delta(&mut self, mut delta: StatusDelta) -> Result<(), End> {
        let changed = delta.changed.get_or_insert_default();
        self.check_status(changed)?;
        let (accepted, converged) = (changed.accepted.clone(), changed.converged.clone());
        let mut taken = Err(NeedsWhole);
        let mut tells_news = false;
        self.news(|live| {
            taken = live.status.as_mut().ok_or(NeedsWhole).and_then(|status| status.apply(delta, now()));
            let Ok(touched) = &mut taken else { return Moved::default() };
            tells_news = touched.is_news;
            live.note_touched(std::mem::take(touched));
            let is_new = accepted.as_ref().is_some_and(|mark| live.accept(mark));
            live.reported = accepted.filter(|mark| live.is_accepted(mark));
            let converged = converged.as_ref().is_some_and(|mark| live.converge(mark));
            Moved { accepted: is_new, converged }
        });
        match taken {
            Ok(_) => self.told_status(tells_news),
            // Asked for once: what comes before the whole is passed over.
            Err(NeedsWhole) if !self.whole_wanted => {
                tracing::debug!(node = %self.attached.node, "asks for the whole status");
                (self.whole_wanted, self.ask_for_whole) = (true, true);
            }
            Err(NeedsWhole) => {}
        }
        Ok(())
    }

    fn check_status(&self, status: &NodeStatus) -> Result<(), End> {
        if status.node_id != self.attached.node.as_str() {
            return Err(End::protocol("the node sent the status of another node".to_owned()));
        }
        check_mark(status.accepted.as_ref())?;
        check_mark(status.converged.as_ref())
    }

    /// Placement hears of a status only where it says something new.
    fn told_status(&self, is_news: bool) {
        if self.attached.live.lock().presence.report() {
            self.state.fleet.note_session(&self.attached.node);
        }
        if is_news {
            self.state.fleet.tell_news(&self.attached.node);
        }
    }

    fn hear_reply(&self, reply: Reply) {
        let waiting = self.attached.live.lock().take_waiting(&reply.id);
        let Some(waiting) = waiting else { return };
        let answer = if reply.problem.is_empty() {
            Ok(reply.answer.map(fit_answer))
        } else if reply.problem.len() > MAX_PROBLEM_BYTES {
            Err(unreadable())
        } else {
            Err(serde_json::from_slice(&reply.problem).unwrap_or_else(|_| unreadable()))
        };
        // The caller may have given up meanwhile.
        let _ = waiting.send(answer);
    }
}

/// An answer with its texts cut; how many instances it may have is for the request to say.
fn fit_answer(mut answer: reply::Answer) -> reply::Answer {
    if let reply::Answer::Instances(listed) = &mut answer {
        for instance in &mut listed.instances {
            fit_instance(instance);
        }
    }
    answer
}

/// How many documents the node refused since the log was last told. A node may refuse without end; the log must not grow
/// with it.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    untold: u64,
    told_at: Option<Instant>,
}

impl Refusals {
    fn tell(&mut self, node: &NodeId, generation: u64, code: &str, now: Instant) {
        if let Some(refusals) = self.count(now) {
            let code: String = code.chars().take(64).collect();
            tracing::warn!(%node, generation, ?code, refusals, "the node refused a document");
        }
    }

    /// One more; how many to tell of now, if it is time.
    fn count(&mut self, now: Instant) -> Option<u64> {
        self.untold += 1;
        if self.told_at.is_some_and(|at| now < at + REFUSALS_EVERY) {
            return None;
        }
        self.told_at = Some(now);
        Some(std::mem::take(&mut self.untold))
    }
}

fn unreadable() -> Problem {
    Problem::new(502, "node_answer_unreadable", "the node's answer can't be read", "Upgrade the agent.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_without_end_are_told_once_in_a_while_with_their_number() {
        let (mut refusals, begun) = (Refusals::default(), Instant::now());
        assert_eq!(refusals.count(begun), Some(1));
        assert!((0..100_000).all(|_| refusals.count(begun + REFUSALS_EVERY / 2).is_none()));
        assert_eq!(refusals.count(begun + REFUSALS_EVERY), Some(100_001));
    }
}
