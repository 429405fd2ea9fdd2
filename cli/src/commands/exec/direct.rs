//! A command through the agent of its node, over the node's socket or HTTP/3.

use std::collections::BTreeMap;
use std::io::Read;

use anyhow::{Context, anyhow};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::Method;
use mvm_proto::Problem;
use serde::Deserialize;
use serde_json::json;

use super::{ExecArgs, ended, streamed};
use crate::agent_client::Pieces;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::instances::InstanceName;
use crate::instances::Instances;
use crate::progress::Progress;

/// As much input as one request carries.
const MAX_INPUT_BYTES: u64 = 2 * 1024 * 1024;

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

pub(super) async fn run(global: &Global, args: ExecArgs, name: &InstanceName) -> Run {
    let found = Instances::open(global, &args.endpoint).await?.find(name).await?;
    let agent = args.endpoint.open_agent(global, "exec").await?;
    if args.stdin && agent.is_local() || args.needs_stream() {
        return streamed::run(&agent, &found.path("/exec"), args, Progress::new(global.quiet)).await;
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
    Ok(line.exit.map(|Exit { code, signal, timed_out }| ended(code, signal, timed_out)))
}
