//! From the agent that is asked directly.

use std::time::Duration;

use anyhow::{Context as _, anyhow};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::Method;
use mvm_proto::Problem;
use serde::Deserialize;

use super::{LogsArgs, Shown};
use crate::agent_client::AgentClient;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::instances::Instances;

/// Between two tries to go on after the agent went away.
const TRY_AGAIN: Duration = Duration::from_millis(500);

pub(super) async fn run(global: &Global, args: &LogsArgs) -> Run {
    let found = Instances::open(global, &args.endpoint).await?.find(&args.instance).await?;
    let agent = args.endpoint.open_agent(global, "logs").await?;
    let (mut shown, mut at) = (Shown::new(global, args), None);
    let path = found.path("/logs");
    let mut lost = None;
    loop {
        match follow(&agent, &format!("{path}?{}", query(args, at)), &mut shown, &mut at).await {
            Ok(true) => return Ok(shown.finish()?),
            Ok(false) if !args.follow => {
                return Err(Outcome::Unreachable(anyhow!("the agent ended its answer before the log's end")));
            }
            Ok(false) => lost = None,
            // What it answered is its word; that it does not answer may pass.
            Err(error @ (Outcome::Failed(_) | Outcome::Usage(_))) => return Err(error),
            Err(error) if !args.follow || at.is_none() => return Err(error),
            Err(error) => {
                let since = *lost.get_or_insert_with(tokio::time::Instant::now);
                if since.elapsed() > global.timeout() {
                    return Err(error);
                }
            }
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
}

/// What is asked for: at first from where the user says, then from where it was.
fn query(args: &LogsArgs, at: Option<u64>) -> String {
    let mut query = vec![format!("follow={}", args.follow)];
    match at {
        Some(at) => query.push(format!("offset={at}")),
        None => {
            query.extend(args.bytes().map(|bytes| format!("bytes={bytes}")));
            // Without any of these the answer is no lines.
            query.extend((args.tail.is_none() && args.since.is_none()).then(|| "offset=0".to_owned()));
            query.extend(args.tail.map(|lines| format!("tail={lines}")));
            query.extend(args.since.map(|since| format!("since={since}")));
        }
    }
    query.join("&")
}

/// One line of the answer.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Line {
    offset: u64,
    data: Option<String>,
    lost: u64,
    end: bool,
    error: Option<Problem>,
}

/// Shows what comes; whether that was all there is.
async fn follow(
    agent: &AgentClient,
    path: &str,
    shown: &mut Shown,
    at: &mut Option<u64>,
) -> Result<bool, Outcome> {
    let mut answer = agent.stream(Method::GET, path, Bytes::new()).await?;
    let mut rest = Vec::new();
    while let Ok(Some(piece)) = answer.next().await {
        rest.extend_from_slice(&piece);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            if line.len() > 1 && show(&line, shown, at)? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Whether it was the last line.
fn show(line: &[u8], shown: &mut Shown, at: &mut Option<u64>) -> Result<bool, Outcome> {
    let line: Line = serde_json::from_slice(line).context("could not read the agent's answer")?;
    if let Some(problem) = line.error {
        return Err(Outcome::Failed(anyhow::Error::new(problem)));
    }
    shown.lose(line.lost);
    if let Some(text) = line.data {
        let data = STANDARD.decode(text).context("could not read the console")?;
        *at = Some(line.offset + data.len() as u64);
        shown.show(&data)?;
    }
    Ok(line.end)
}
