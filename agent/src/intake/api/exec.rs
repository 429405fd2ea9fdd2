//! `POST .../exec`: runs one command inside an instance and streams what comes of it, one JSON object per line. Its input is in
//! the request, or streamed behind it ([`stream`]).
//!
//! Every line has one member: `stdout` or `stderr` (base64, for output need not be text), `lost` (bytes that the guest
//! could not keep), and last `exit` or, when the guest went away, `error` (a problem). The answer begins when the guest
//! has accepted the command, so everything that prevents that is an ordinary problem. A caller that goes away before
//! the end kills the command.
//!
//! Both the command's begin and what became of it are in the tenant's audit log: who asked, for which program and with how
//! many arguments. The arguments themselves, variables, input and output are not: secrets are passed in them.

mod input;
mod stream;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, State};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::{Stream, stream as streams};
use http::{HeaderMap, header};
use mvm_proto::text::chain;
use mvm_proto::{InstanceId, Phase, Problem};
use serde::Deserialize;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::Api;
use super::input::{InstancePath, JSON, media_type, no_query, object, read_body};
use super::instances::find;
use super::problem::{self, Refused};
use super::watch::NDJSON;
use crate::guest::{ExecEvent, ExecHandle, ExecRequest, LinkError};
use crate::intake::authz::Caller;
use crate::metrics::{ExecResult, Metrics};
use crate::node::handle::NodeHandle;

/// Input travels with the request; what is larger belongs into a file.
const MAX_BODY_BYTES: usize = 4 * 1024 * 1024;

/// What the audit log calls it.
const ACTION: &str = "exec";

/// How much of a program's name the audit log repeats.
const MAX_AUDITED_CHARS: usize = 256;

/// The longest that a command may be allowed to run.
pub(in crate::intake) const MAX_TIMEOUT_SECONDS: u64 = 7 * 86_400;

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExecBody {
    #[serde(default)]
    command: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    directory: String,
    /// Absent: it may run for ever.
    timeout_seconds: Option<u64>,
    /// Base64.
    stdin: Option<String>,
}

pub(super) async fn exec(
    State(api): State<Api>,
    Extension(caller): Extension<Caller>,
    path: Result<Path<(String, String, String)>, PathRejection>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    media_type(&headers, &[JSON, NDJSON])?;
    if media_type(&headers, &[NDJSON]).is_ok() {
        return stream::exec(api, caller, path, body).await;
    }
    let path = InstancePath::read(path)?;
    let body: ExecBody = object(&read_body(body, MAX_BODY_BYTES).await?)?;
    let (request, input) = request(body)?;
    let found = find(&api, &path)?;
    if found.phase != Phase::Running.as_str() {
        return Err(not_running(&path.instance, &found.phase));
    }
    let guests = api.shared.node.guests();
    let (node, metrics) = (&api.shared.node, &api.shared.metrics);
    let mut audited = Audited::begin(node, metrics, &path.instance, caller.describe(), &request.command);
    let mut broken = |error: &LinkError| {
        audited.end(ExecResult::Failed, Err(chain(error)));
        Refused(guest_problem(&path.instance, error))
    };
    let handle = guests.exec(&path.instance, request).await.map_err(|error| broken(&error))?;
    let first = handle.next().await.map_err(|error| broken(&error))?;
    let running = Running {
        instance: path.instance,
        audited,
        handle: Arc::new(handle),
        first: Some(first),
        over: false,
        shutdown: api.shared.shutdown.clone(),
    };
    if let Some(input) = input {
        let handle = Arc::downgrade(&running.handle);
        tokio::spawn(async move {
            // A command that does not read its input, or ended, is no error.
            if let Some(handle) = handle.upgrade()
                && handle.write(&input).await.is_ok()
            {
                let _ = handle.close_input().await;
            }
        });
    }
    Ok(([(header::CONTENT_TYPE, NDJSON)], Body::from_stream(lines(running))).into_response())
}

fn request(body: ExecBody) -> Result<(ExecRequest, Option<Vec<u8>>), Refused> {
    if body.command.first().is_none_or(String::is_empty) {
        return Err(problem::bad_body("`command` must name a program"));
    }
    if body.timeout_seconds.is_some_and(|seconds| !(1..=MAX_TIMEOUT_SECONDS).contains(&seconds)) {
        let text = format!("`timeout_seconds` must be 1..={MAX_TIMEOUT_SECONDS}");
        return Err(problem::bad_body(text));
    }
    let input = body.stdin.map(|text| STANDARD.decode(text)).transpose();
    let input = input.map_err(|_| problem::bad_body("`stdin` must be base64"))?;
    let request = ExecRequest {
        command: body.command,
        env: body.env,
        directory: body.directory,
        timeout: body.timeout_seconds.map(Duration::from_secs),
        stdin: input.is_some(),
        ..ExecRequest::default()
    };
    Ok((request, input))
}

/// What the audit log says of one command: that it began, and once what became of it.
pub(in crate::intake) struct Audited {
    node: NodeHandle,
    instance: InstanceId,
    actor: String,
    reason: String,
    metrics: Arc<Metrics>,
    begun: Instant,
    over: bool,
}

impl Audited {
    pub(in crate::intake) fn begin(
        node: &NodeHandle,
        metrics: &Arc<Metrics>,
        instance: &InstanceId,
        actor: String,
        command: &[String],
    ) -> Self {
        let (program, arguments) =
            command.split_first().map_or(("", 0), |(first, rest)| (first.as_str(), rest.len()));
        let program: String = program.chars().take(MAX_AUDITED_CHARS).collect();
        let reason = format!("{program:?} with {arguments} argument(s), asked by {actor}");
        Self::of(node, metrics, instance, actor, reason)
    }

    pub(in crate::intake) fn of(
        node: &NodeHandle,
        metrics: &Arc<Metrics>,
        instance: &InstanceId,
        actor: String,
        reason: String,
    ) -> Self {
        let (node, instance) = (node.clone(), instance.clone());
        node.audit(&instance, &actor, ACTION, reason.clone(), Ok("begun"));
        let metrics = Arc::clone(metrics);
        Self { node, instance, actor, reason, metrics, begun: Instant::now(), over: false }
    }

    /// It could not be run, or its guest went away.
    pub(in crate::intake) fn fail(&mut self, why: String) {
        self.end(ExecResult::Failed, Err(why));
    }

    /// It goes on where nothing more is heard of it here.
    pub(in crate::intake) fn leave(&mut self, outcome: &str) {
        if !std::mem::replace(&mut self.over, true) {
            self.node.audit(&self.instance, &self.actor, ACTION, self.reason.clone(), Ok(outcome));
        }
    }

    fn end(&mut self, result: ExecResult, outcome: Result<&str, String>) {
        if !std::mem::replace(&mut self.over, true) {
            self.metrics.executed(result, self.begun.elapsed());
            self.node.audit(&self.instance, &self.actor, ACTION, self.reason.clone(), outcome);
        }
    }

    pub(in crate::intake) fn hear(&mut self, event: &Result<ExecEvent, LinkError>) {
        match event {
            Ok(ExecEvent::Exit { code, signal, timed_out, cancelled }) => {
                let (result, outcome) = match (timed_out, cancelled, signal) {
                    (true, _, _) => (ExecResult::TimedOut, "ended: it took too long".to_owned()),
                    (_, true, _) => (ExecResult::Cancelled, "ended: it was cancelled".to_owned()),
                    (_, _, 0) => (ExecResult::Exited, format!("exited with {code}")),
                    (_, _, signal) => (ExecResult::Exited, format!("ended by signal {signal}")),
                };
                if result == ExecResult::TimedOut {
                    let record = self.node.records().get(&self.instance);
                    let subject =
                        record.map_or_else(|| self.instance.to_string(), |record| record.full_name());
                    self.node.events().warn("ExecTimeout", subject, "a command was ended: it took too long");
                }
                self.end(result, Ok(&outcome));
            }
            Err(error) => self.end(ExecResult::Failed, Err(chain(error))),
            Ok(_) => {}
        }
    }
}

impl Drop for Audited {
    /// Also when the answer is given up in the middle.
    fn drop(&mut self) {
        let left = "the caller left before its end, and it was cancelled".to_owned();
        self.end(ExecResult::Cancelled, Err(left));
    }
}

struct Running {
    instance: InstanceId,
    audited: Audited,
    handle: Arc<ExecHandle>,
    first: Option<ExecEvent>,
    over: bool,
    shutdown: CancellationToken,
}

fn lines(running: Running) -> impl Stream<Item = Result<Bytes, Infallible>> {
    streams::unfold(running, |mut running| async move {
        if running.over {
            return None;
        }
        let event = match running.first.take() {
            Some(event) => Ok(event),
            None => tokio::select! {
                event = running.handle.next() => event,
                () = running.shutdown.cancelled() => return None,
            },
        };
        running.audited.hear(&event);
        running.over = matches!(event, Ok(ExecEvent::Exit { .. }) | Err(_));
        let line = match event {
            Ok(event) => line(&event),
            Err(error) => one(&json!({ "error": guest_problem(&running.instance, &error) })),
        };
        Some((Ok(line.into()), running))
    })
}

fn line(event: &ExecEvent) -> Vec<u8> {
    match event {
        // Says that the answer has begun, and nothing else.
        ExecEvent::Accepted | ExecEvent::Taken(_) => b"\n".to_vec(),
        ExecEvent::Output { stderr, data, lost, .. } => {
            let mut text = if *lost > 0 { one(&json!({ "lost": lost })) } else { Vec::new() };
            let stream = if *stderr { "stderr" } else { "stdout" };
            text.extend(one(&json!({ stream: STANDARD.encode(data) })));
            text
        }
        ExecEvent::Exit { code, signal, timed_out, cancelled } => one(&json!({
            "exit": { "code": code, "signal": signal, "timed_out": timed_out, "cancelled": cancelled }
        })),
    }
}

fn one(value: &serde_json::Value) -> Vec<u8> {
    let mut text = value.to_string().into_bytes();
    text.push(b'\n');
    text
}

fn not_running(id: &InstanceId, phase: &str) -> Refused {
    let detail = format!("{id} is {phase}; commands run in running instances only");
    Refused(Problem::new(409, "not_running", detail, "Start or wake it first."))
}

pub(in crate::intake) fn guest_problem(id: &InstanceId, error: &LinkError) -> Problem {
    let detail = format!("{id}: {}", chain(error));
    match error {
        LinkError::Refused { .. } => {
            Problem::new(422, "guest_refused", detail, "Correct the command: no shell reads it.")
        }
        LinkError::TooMany => Problem::new(429, "guest_busy", detail, "Wait until others have ended."),
        LinkError::Unsupported { .. } | LinkError::Lacks(_) => {
            Problem::new(409, "guest_too_old", detail, "Rebuild the image with this version's guest program.")
        }
        _ => {
            Problem::new(503, "guest_unreachable", detail, "Look at the instance's console, then ask again.")
        }
    }
}
