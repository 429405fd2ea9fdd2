//! `mvm instance exec`: one command inside an instance, with its output and exit code as if it had run here.

use std::collections::BTreeMap;
use std::io::Read;

use anyhow::{Context, anyhow};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use clap::Args;
use http::Method;
use mvm_proto::Problem;
use serde::Deserialize;
use serde_json::json;

use crate::agent_client::Pieces;
use crate::commands::exec_stream::{self, StreamArgs};
use crate::endpoint::EndpointArgs;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::instances::InstanceName;
use crate::instances::Instances;
use crate::progress::Progress;

/// As much input as one request carries.
const MAX_INPUT_BYTES: u64 = 2 * 1024 * 1024;
/// What shells add to the number of the signal that ended a command.
const SIGNALLED: i64 = 128;

#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// i-0123abcd, or tenant/pool/i-0123abcd
    instance: InstanceName,
    /// The program and its arguments; no shell reads them
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub(super) command: Vec<String>,
    /// NAME=VALUE for the command's environment (repeatable)
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = parse_variable)]
    pub(super) env: Vec<(String, String)>,
    /// Folder in the guest to run in [default: /]
    #[arg(short = 'w', long, value_name = "DIR")]
    pub(super) workdir: Option<String>,
    /// Kill the command after this long [default: never]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub(super) kill_after: Option<std::time::Duration>,
    /// Give it this process's standard input; 2 MiB at most where its agent is called over the network
    #[arg(short = 'i', long, visible_alias = "interactive")]
    pub(super) stdin: bool,
    #[command(flatten)]
    pub(super) on: StreamArgs,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

fn parse_variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("must be NAME=VALUE".to_owned()),
    }
}

/// One line of the answer.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Line {
    stdout: Option<String>,
    stderr: Option<String>,
    lost: Option<u64>,
    exit: Option<Exit>,
    error: Option<Problem>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Exit {
    code: i64,
    signal: i64,
    timed_out: bool,
}

pub(crate) async fn run(global: &Global, args: ExecArgs) -> Run {
    let found = Instances::open(global, &args.endpoint).await?.find(&args.instance).await?;
    let agent = args.endpoint.open_agent_of(global, &found.node_id, "exec").await?;
    if args.stdin && agent.is_local() || args.on.needs_stream() {
        return exec_stream::run(&agent, &found.path("/exec"), args, Progress::new(global.quiet)).await;
    }
    let env: BTreeMap<_, _> = args.env.into_iter().collect();
    let mut body = json!({ "command": args.command, "env": env });
    if let Some(directory) = args.workdir {
        body["directory"] = json!(directory);
    }
    if let Some(limit) = args.kill_after {
        body["timeout_seconds"] = json!(limit.as_secs().max(1));
    }
    if args.stdin {
        body["stdin"] = json!(STANDARD.encode(read_input()?));
    }
    let answer = agent.stream(Method::POST, &found.path("/exec"), Bytes::from(body.to_string())).await?;
    relay(answer, Progress::new(global.quiet)).await
}

fn read_input() -> Result<Vec<u8>, Outcome> {
    let mut input = Vec::new();
    let read = std::io::stdin().lock().take(MAX_INPUT_BYTES + 1).read_to_end(&mut input);
    read.context("could not read standard input")?;
    if input.len() as u64 > MAX_INPUT_BYTES {
        return Err(Outcome::Usage(anyhow!("standard input is larger than {MAX_INPUT_BYTES} bytes")));
    }
    Ok(input)
}

pub(super) async fn relay(mut answer: Pieces, progress: Progress) -> Run {
    let mut rest = Vec::new();
    while let Some(piece) = answer.next().await? {
        rest.extend_from_slice(&piece);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            if line.len() > 1
                && let Some(done) = show(&line, progress)?
            {
                return done;
            }
        }
    }
    Err(Outcome::Unreachable(anyhow!("the agent ended its answer before the command's end")))
}

/// Passes one line on; the last one says how the command ended.
fn show(line: &[u8], progress: Progress) -> Result<Option<Run>, Outcome> {
    let line: Line = serde_json::from_slice(line).context("could not read the agent's answer")?;
    let decode = |text: &str| STANDARD.decode(text).context("could not read the command's output");
    if let Some(text) = &line.stdout {
        crate::output::of_command(&decode(text)?)?;
    }
    if let Some(text) = &line.stderr {
        crate::output::error_of_command(&decode(text)?);
    }
    if let Some(lost) = line.lost {
        progress.say(format!("warning: {lost} bytes of output were lost"));
    }
    if let Some(problem) = line.error {
        return Ok(Some(Err(Outcome::Failed(anyhow::Error::new(problem)))));
    }
    Ok(line.exit.map(|exit| match exit {
        Exit { timed_out: true, .. } => {
            Err(Outcome::TimedOut(anyhow!("the command was killed, for its time was up")))
        }
        Exit { code: 0, signal: 0, .. } => Ok(()),
        Exit { signal: 0, code, .. } => Err(Outcome::Command(u8::try_from(code).unwrap_or(1))),
        Exit { signal, .. } => Err(Outcome::Command(u8::try_from(SIGNALLED + signal).unwrap_or(u8::MAX))),
    }))
}
