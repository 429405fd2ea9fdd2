//! What a request asks to run: the whole body, or the first line of one that is streamed.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::body::Body;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::input::{Input, Lines};
use crate::guest::{ExecRequest, ExecTerminal};
use crate::intake::api::input::{object, read_body};
use crate::intake::api::problem::{self, Refused};

/// Input travels with the request; what is larger belongs into a file, or is streamed.
const MAX_BODY_BYTES: usize = 4 * 1024 * 1024;

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Whole {
    command: Vec<String>,
    env: BTreeMap<String, String>,
    directory: String,
    /// Absent: it may run for ever.
    timeout_seconds: Option<u64>,
    /// Base64.
    stdin: Option<String>,
}

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

/// A body with all that there is.
pub(super) async fn whole(body: Body) -> Result<(ExecRequest, Input), Refused> {
    let body: Whole = object(&read_body(body, MAX_BODY_BYTES).await?)?;
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
    request.check().map_err(problem::bad_body)?;
    Ok((request, input.map_or(Input::None, Input::Whole)))
}

/// A body whose first line is the command, and whose others come as they are given.
pub(super) async fn streamed(body: Body) -> Result<(ExecRequest, Input), Refused> {
    let mut lines = Lines::of(body);
    let first: First = object(&lines.next(MAX_BODY_BYTES).await?.unwrap_or_default())?;
    let request = ExecRequest {
        command: first.command,
        env: first.env,
        directory: first.directory,
        timeout: first.timeout_seconds.map(Duration::from_secs),
        stdin: first.interactive.unwrap_or(true),
        user: first.user.as_deref().map(Into::into),
        terminal: first.tty.map(|Tty { rows, columns, term }| ExecTerminal {
            rows: rows.into(),
            columns: columns.into(),
            term,
        }),
        ..ExecRequest::default()
    };
    request.check().map_err(problem::bad_body)?;
    let interactive = request.stdin;
    Ok((request, Input::Lines { lines, interactive }))
}
