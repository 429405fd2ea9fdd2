//! `POST .../exec`: runs one command inside an instance and streams what comes of it, one JSON object per line. Its input is in
//! the request, or streamed behind it over the node's own socket ([`request`], [`input`]).
//!
//! Every line has one member: `stdout` or `stderr` (base64, for output need not be text), `lost` (bytes that the guest
//! could not keep), and last `exit` or, when the guest went away, `error` (a problem). The answer begins when the guest
//! has accepted the command, so everything that prevents that is an ordinary problem. A caller that goes away before
//! the end kills the command.
//!
//! Both the command's begin and what became of it are in the tenant's audit log: who asked, for which program and with how
//! many arguments. The arguments themselves, variables, input and output are not: secrets are passed in them.

mod audited;
mod input;
mod request;

use std::convert::Infallible;
use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, State};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::{Stream, stream};
use http::{HeaderMap, header};
use mvm_proto::text::chain;
use mvm_proto::{InstanceId, Phase, Problem};
use serde_json::json;
use tokio::sync::oneshot;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::input::Input;
use super::Api;
use super::input::{InstancePath, JSON, media_type, no_query};
use super::instances::find;
use super::problem::Refused;
use super::watch::NDJSON;
use crate::guest::{ExecEvent, ExecHandle, ExecRequest, LinkError};
use crate::intake::authz::Caller;

pub(in crate::intake) use self::audited::Audited;

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
    let is_streamed = media_type(&headers, &[NDJSON]).is_ok();
    // Elsewhere a body has to arrive whole within a time.
    if is_streamed && caller != Caller::Local {
        return Err(only_here());
    }
    let path = InstancePath::read(path)?;
    let (request, input) =
        if is_streamed { request::streamed(body).await? } else { request::whole(body).await? };
    let found = find(&api, &path)?;
    if found.phase != Phase::Running.as_str() {
        return Err(not_running(&path.instance, &found.phase));
    }
    let running = begin(&api, &caller, path.instance, request, input).await?;
    Ok(([(header::CONTENT_TYPE, NDJSON)], Body::from_stream(answer(running))).into_response())
}

/// Has the guest begin it, and its input given to it as it comes.
async fn begin(
    api: &Api,
    caller: &Caller,
    instance: InstanceId,
    request: ExecRequest,
    input: Input,
) -> Result<Running, Refused> {
    let (node, metrics) = (&api.shared.node, &api.shared.metrics);
    let mut audited = Audited::begin(node, metrics, &instance, caller.describe(), &request.command);
    let begun = async {
        let handle = node.guests().exec(&instance, request).await?;
        let first = handle.next().await?;
        Ok((handle, first))
    };
    let (handle, first) = begun.await.map_err(|error: LinkError| {
        audited.fail(chain(&error));
        Refused(guest_problem(&instance, &error))
    })?;
    let handle = Arc::new(handle);
    let (left, (tell, fault)) = (CancellationToken::new(), oneshot::channel());
    let running = Running {
        instance,
        audited,
        handle: Arc::clone(&handle),
        first: Some(first),
        over: false,
        fault: Some(fault),
        shutdown: api.shared.shutdown.clone(),
        _left: left.clone().drop_guard(),
    };
    let passed = async move {
        if let Some(problem) = input.pass_on(&handle).await {
            let _ = tell.send(problem);
        }
    };
    // With its caller the command goes, also while it takes no input.
    tokio::spawn(async move { left.run_until_cancelled(passed).await });
    Ok(running)
}

struct Running {
    instance: InstanceId,
    audited: Audited,
    handle: Arc<ExecHandle>,
    first: Option<ExecEvent>,
    over: bool,
    /// What was wrong with a line of its input.
    fault: Option<oneshot::Receiver<Problem>>,
    shutdown: CancellationToken,
    /// Ends what passes input on, which holds the command too.
    _left: DropGuard,
}

fn answer(running: Running) -> impl Stream<Item = Result<Bytes, Infallible>> {
    stream::unfold(running, |mut running| async move {
        if running.over {
            return None;
        }
        let next = async {
            match running.first.take() {
                Some(first) => Ok(first),
                None => running.handle.next().await,
            }
        };
        let event = tokio::select! {
            event = next => event,
            problem = wrong(&mut running.fault) => {
                running.over = true;
                running.audited.fail("its input could not be read".to_owned());
                return Some((Ok(one(&json!({ "error": problem })).into()), running));
            }
            () = running.shutdown.cancelled() => return None,
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

/// For ever, if nothing is wrong.
async fn wrong(fault: &mut Option<oneshot::Receiver<Problem>>) -> Problem {
    if let Some(told) = fault
        && let Ok(problem) = told.await
    {
        return problem;
    }
    *fault = None;
    std::future::pending().await
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

fn only_here() -> Refused {
    let detail = "input is streamed over the node's own unix socket";
    let remediation = "Run the command on its node, or send all input in `stdin` of a JSON body.";
    Refused(Problem::new(409, "only_local", detail, remediation))
}
