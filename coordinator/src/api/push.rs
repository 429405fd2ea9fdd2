//! `Push`: from an operator's JSON to a node that has made it true, told stage by stage.
//!
//! Once stored, the document is the cluster's word: an operator who hangs up, or whose patience ends, does not take it
//! back. The stream watches the node's marks; it is told by the fleet's table, never by a timer.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mvm_proto::control::PushStage;
use mvm_proto::status::Mark;
use mvm_proto::wire::control::v1::{PushProgress, PushRequest};
use mvm_proto::wire::session::v1::{PlanDocument, reply, request};
use mvm_proto::{DesiredState, NodeId, Problem, TraceContext};
use mvm_telemetry::{Attribute, current};
use tokio::sync::mpsc;
use tonic::Status;

use super::instances::{TELL_WAIT, other_answer};
use crate::documents::Stored;
use crate::fleet::Offered;
use crate::objects::Caller;
use crate::records::Numbers;
use crate::state::State;
use crate::stored::now;
use crate::{causes, enrolment, placement, refuse};

/// Stages that may wait to be read; there are never more than this many of one push.
const STAGES: usize = 8;
/// The longest that anyone may wait in one call.
const MAX_WAIT: Duration = Duration::from_secs(24 * 3600);

/// A request to a node has at most 1 MiB, and its frame needs some of that.
const MAX_PLANNED_BYTES: usize = 960 * 1024;

type Progress = mpsc::Sender<Result<PushProgress, Status>>;

/// Checks the document; the rest goes on in a task of its own, which outlives the call.
pub(super) async fn push(
    state: &Arc<State>,
    request: PushRequest,
    by: Caller,
) -> Result<mpsc::Receiver<Result<PushProgress, Status>>, Problem> {
    let node = match request.node_id.as_str() {
        "" => None,
        id => Some(super::parse::<NodeId>("node_id", id)?),
    };
    let desired = state.documents.read(&request.document, node, now())?;
    current::set(Attribute::Node, desired.node_id.as_str());
    enrolment::registered(state, &desired.node_id).await?;
    if state.shutdown.is_cancelled() {
        return Err(refuse::stopping());
    }

    let (progress, stages) = mpsc::channel(STAGES);
    let progress_sender = ProgressSender { node: desired.node_id.clone(), progress };
    progress_sender.tell(PushStage::Validated, None, "the document is valid").await;
    if request.dry_run {
        tokio::spawn(plan(Arc::clone(state), desired, progress_sender));
    } else {
        let wait = Duration::from_secs(request.wait_seconds.into()).min(MAX_WAIT);
        let trace = current::sampled();
        tokio::spawn(store_and_follow(Arc::clone(state), (by, trace), desired, wait, progress_sender));
    }
    Ok(stages)
}

/// What the node would do, in its own planner's words.
async fn plan(state: Arc<State>, desired: DesiredState, progress_sender: ProgressSender) {
    match ask_for_plan(&state, &desired).await {
        Ok(plan) => progress_sender.planned(plan).await,
        Err(problem) => progress_sender.fail(&problem).await,
    }
}

async fn ask_for_plan(state: &State, desired: &DesiredState) -> Result<Vec<u8>, Problem> {
    // A document of strings, numbers and lists always serialises.
    let document = serde_json::to_vec(desired).unwrap_or_default();
    if document.len() > MAX_PLANNED_BYTES {
        let detail = format!("only documents of up to {MAX_PLANNED_BYTES} bytes can be planned");
        return Err(Problem::new(413, "plan_too_large", detail, "It is valid; push it without --dry-run."));
    }
    let ask = request::Ask::Plan(PlanDocument { document });
    match state.fleet.ask(&desired.node_id, ask, TELL_WAIT).await? {
        Some(reply::Answer::Plan(plan)) => Ok(plan),
        _ => Err(other_answer(&desired.node_id)),
    }
}

async fn store_and_follow(
    state: Arc<State>,
    (by, trace): (Caller, Option<TraceContext>),
    desired: DesiredState,
    wait: Duration,
    progress_sender: ProgressSender,
) {
    let begun = Instant::now();
    if let Err(problem) = placement::take_for_push(&state, &desired.node_id, &by).await {
        return progress_sender.fail(&problem).await;
    }
    let span = trace.map(|trace| causes::begin(&state.tracer, &desired.node_id, trace));
    let mut stored = match state.documents.push(&desired, now()).await {
        Ok(stored) => stored,
        Err(problem) => {
            span.into_iter().for_each(|mut span| span.fail(&problem.code));
            return progress_sender.fail(&problem).await;
        }
    };
    span.into_iter().for_each(|span| causes::finish(span, &mut stored));
    state.world.lock().pushed(&desired.node_id, stored.assigned.numbers);
    state.metrics.documents_pushed.inc();
    let mark = stored.assigned.mark();
    tracing::info!(node = %progress_sender.node, generation = mark.generation, "stored a document");
    let offered = state.fleet.offer(&progress_sender.node, stored.clone(), Some(begun));
    progress_sender
        .tell(PushStage::Stored, Some(&mark), "the document is stored and will be delivered")
        .await;
    if wait.is_zero() {
        return;
    }
    if offered == Offered::NotConnected {
        progress_sender.tell(PushStage::Waiting, Some(&mark), "the node is not connected").await;
    }
    let ProgressSender { progress, .. } = &progress_sender;
    tokio::select! {
        () = follow(&state, &stored, &progress_sender) => {}
        // The caller went away.
        () = progress.closed() => {}
        () = state.shutdown.cancelled() => progress_sender.fail(&refuse::stopping()).await,
        () = tokio::time::sleep(wait) => {
            let message = format!("not converged within {} s; the document stays in force", wait.as_secs());
            progress_sender.tell(PushStage::Waiting, Some(&mark), &message).await;
        }
    }
}

/// Tells every stage once, until the node converged on this document or refused it.
async fn follow(state: &State, stored: &Stored, progress_sender: &ProgressSender) {
    let (numbers, mark) = (stored.assigned.numbers, stored.assigned.mark());
    let live = state.fleet.get_or_insert(&progress_sender.node);
    let mut changes = live.watch();
    let mut told = PushStage::Stored;
    loop {
        changes.mark_unchanged();
        // A mark above everything that was issued is no answer to this push: it is from before a reset, or made up.
        let issued = state.documents.assigned(&progress_sender.node).await.ok().flatten();
        let issued = issued.map_or(numbers, |newest| newest.numbers.max(numbers));
        let (reached, newest, refused) = {
            let live = live.lock();
            if live.removed {
                break;
            }
            let refused = live.refused.as_ref().filter(|refused| refused.numbers >= numbers);
            let newest = live.converged.clone().max_by_numbers(live.accepted.clone());
            (reached(&live, &(numbers..=issued)), newest, refused.map(|refused| refused.problem.clone()))
        };
        for stage in [PushStage::Sent, PushStage::Accepted, PushStage::Converged] {
            if stage <= told || reached < stage {
                continue;
            }
            progress_sender.tell(stage, Some(&mark), &message(stage, numbers, newest.as_ref())).await;
            told = stage;
        }
        if reached == PushStage::Converged {
            return;
        }
        if let Some(problem) = refused.filter(|_| reached < PushStage::Accepted) {
            return progress_sender.refused(&mark, problem).await;
        }
        if changes.changed().await.is_err() {
            break;
        }
    }
    progress_sender.fail(&refuse::removed_node(&progress_sender.node)).await;
}

/// How far the node is with one of these documents: the one pushed, or those issued since.
fn reached(live: &crate::fleet::Live, numbers: &RangeInclusive<Numbers>) -> PushStage {
    let has = |mark: &Option<Mark>| mark.as_ref().is_some_and(|mark| numbers.contains(&Numbers::from(mark)));
    if has(&live.converged) {
        PushStage::Converged
    } else if has(&live.accepted) {
        PushStage::Accepted
    } else if live.sent >= Some(*numbers.start()) {
        PushStage::Sent
    } else {
        PushStage::Stored
    }
}

fn message(stage: PushStage, numbers: Numbers, newest: Option<&Mark>) -> String {
    if let Some(newer) = newest.filter(|newest| Numbers::from(*newest) > numbers) {
        return format!("the node is at generation {}, which replaced this one", newer.generation);
    }
    match stage {
        PushStage::Converged => "the node runs what the document says".to_owned(),
        PushStage::Accepted => "the document is durable on the node".to_owned(),
        _ => "the document was sent to the node".to_owned(),
    }
}

trait MaxByNumbers {
    fn max_by_numbers(self, other: Self) -> Self;
}

impl MaxByNumbers for Option<Mark> {
    fn max_by_numbers(self, other: Self) -> Self {
        let numbers = |mark: &Self| mark.as_ref().map(Numbers::from);
        if numbers(&self) >= numbers(&other) { self } else { other }
    }
}

/// Writes the stream. A reader that went away is no reason to stop.
struct ProgressSender {
    node: NodeId,
    progress: Progress,
}

impl ProgressSender {
    async fn tell(&self, stage: PushStage, mark: Option<&Mark>, message: &str) {
        self.send(Ok(self.stage(stage, mark, message.to_owned(), Vec::new()))).await;
    }

    async fn planned(&self, plan: Vec<u8>) {
        let message = "the node's planner says what it would do".to_owned();
        self.send(Ok(PushProgress { plan, ..self.stage(PushStage::Planned, None, message, Vec::new()) }))
            .await;
    }

    async fn refused(&self, mark: &Mark, problem: Vec<u8>) {
        let told: Option<Problem> = serde_json::from_slice(&problem).ok();
        let message = told.map_or_else(|| "the node refused it".to_owned(), |problem| problem.detail);
        self.send(Ok(self.stage(PushStage::Refused, Some(mark), message, problem))).await;
    }

    async fn fail(&self, problem: &Problem) {
        self.send(Err(refuse::status(problem))).await;
    }

    fn stage(
        &self,
        stage: PushStage,
        mark: Option<&Mark>,
        message: String,
        problem: Vec<u8>,
    ) -> PushProgress {
        PushProgress {
            node_id: self.node.to_string(),
            stage: stage.to_string(),
            mark: mark.cloned(),
            message,
            problem,
            at: now().to_string(),
            plan: Vec::new(),
        }
    }

    async fn send(&self, item: Result<PushProgress, Status>) {
        let _ = self.progress.send(item).await;
    }
}
