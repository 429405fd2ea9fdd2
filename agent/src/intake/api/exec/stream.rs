//! An exec whose body is a stream: the command is its first line, and the others are input of any length, sizes of its terminal
//! and signals ([`super::input`]). Over the node's own socket alone: elsewhere a body has to arrive whole within a time.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, stream};
use http::header;
use mvm_proto::text::chain;
use mvm_proto::{InstanceId, Phase, Problem};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::oneshot;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::input::{Lines, pass_on};
use super::{Audited, ExecBody, MAX_BODY_BYTES, guest_problem, line, not_running, one, request};
use crate::guest::{ExecEvent, ExecHandle, ExecRequest, ExecTerminal, ExecUser};
use crate::intake::api::Api;
use crate::intake::api::input::{InstancePath, object};
use crate::intake::api::instances::find;
use crate::intake::api::problem::Refused;
use crate::intake::api::watch::NDJSON;
use crate::intake::authz::Caller;
use crate::metrics::ExecResult;

/// The first line.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct First {
    command: Vec<String>,
    env: BTreeMap<String, String>,
    directory: String,
    timeout_seconds: Option<u64>,
    /// Whether input follows; it does unless this says otherwise.
    interactive: Option<bool>,
    /// A name or number in the guest's `/etc/passwd`; absent: root.
    user: Option<String>,
    /// Absent: pipes.
    tty: Option<Tty>,
}

/// A terminal for the command; what is shown on it is `stdout`.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Tty {
    rows: u16,
    columns: u16,
    term: String,
}

impl First {
    fn request(self) -> Result<ExecRequest, Refused> {
        let stdin = self.interactive.unwrap_or(true);
        let user = self.user.map(|user| match user.parse() {
            Ok(id) => ExecUser::Id(id),
            Err(_) => ExecUser::Name(user),
        });
        let terminal = self.tty.map(|Tty { rows, columns, term }| ExecTerminal {
            rows: rows.into(),
            columns: columns.into(),
            term,
        });
        let (command, env, directory) = (self.command, self.env, self.directory);
        let body = ExecBody { command, env, directory, timeout_seconds: self.timeout_seconds, stdin: None };
        Ok(ExecRequest { stdin, user, terminal, ..request(body)?.0 })
    }
}

pub(super) async fn exec(
    api: Api,
    caller: Caller,
    path: Result<Path<(String, String, String)>, PathRejection>,
    body: Body,
) -> Result<Response, Refused> {
    if caller != Caller::Local {
        return Err(only_here());
    }
    let path = InstancePath::read(path)?;
    let mut lines = Lines::of(body);
    let first: First = object(&lines.next(MAX_BODY_BYTES).await?.unwrap_or_default())?;
    let request = first.request()?;
    let interactive = request.stdin;
    let found = find(&api, &path)?;
    if found.phase != Phase::Running.as_str() {
        return Err(not_running(&path.instance, &found.phase));
    }
    let (node, metrics) = (&api.shared.node, &api.shared.metrics);
    let mut audited = Audited::begin(node, metrics, &path.instance, caller.describe(), &request.command);
    let begun = api.shared.node.guests().exec(&path.instance, request).await;
    let begun = match begun {
        Ok(handle) => handle.next().await.map(|first| (handle, first)),
        Err(error) => Err(error),
    };
    let (handle, first) = begun.map_err(|error| {
        audited.end(ExecResult::Failed, Err(chain(&error)));
        Refused(guest_problem(&path.instance, &error))
    })?;
    let (left, (tell, fault)) = (CancellationToken::new(), oneshot::channel());
    let running = Running {
        instance: path.instance,
        audited,
        handle: Arc::new(handle),
        first: Some(first),
        over: false,
        fault: Some(fault),
        shutdown: api.shared.shutdown.clone(),
        _left: left.clone().drop_guard(),
    };
    let handle = Arc::clone(&running.handle);
    let passed = async move {
        if let Some(problem) = pass_on(lines, &handle, interactive).await {
            let _ = tell.send(problem);
        }
    };
    // With its caller the command goes, also while it takes no input.
    tokio::spawn(async move { left.run_until_cancelled(passed).await });
    Ok(([(header::CONTENT_TYPE, NDJSON)], Body::from_stream(answer(running))).into_response())
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
                let unread = "its input could not be read".to_owned();
                running.audited.end(ExecResult::Failed, Err(unread));
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

fn only_here() -> Refused {
    let detail = "input is streamed over the node's own unix socket";
    let remediation = "Run the command on its node, or send all input in `stdin` of a JSON body.";
    Refused(Problem::new(409, "only_local", detail, remediation))
}
