//! `mvm instance logs`: what an instance writes to its console, which is what its workload prints too.

use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use clap::Args;
use http::Method;
use mvm_proto::{Problem, Timestamp};
use serde::Deserialize;

use crate::agent_client::AgentClient;
use crate::endpoint::EndpointArgs;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::instances::{InstanceName, Instances};
use crate::output;
use crate::progress::Progress;

/// Between two tries to go on after the agent went away.
const TRY_AGAIN: Duration = Duration::from_millis(500);
/// More of a character than this is none.
const LONGEST_CHARACTER: usize = 4;

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// i-0123abcd, or tenant/pool/i-0123abcd
    instance: InstanceName,
    /// How much of the console's end [default: 65536, unless --tail or --since says otherwise]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    bytes: Option<u32>,
    /// How many lines of its end
    #[arg(long, value_name = "LINES", visible_alias = "lines", short = 'n')]
    tail: Option<u64>,
    /// What was written since then, a time or how long ago; to within ten seconds, and never less
    #[arg(long, value_name = "TIME", value_parser = parse_since)]
    since: Option<Timestamp>,
    /// Go on as more is written, through sleep, wake and restart, until the instance is gone
    #[arg(short, long)]
    follow: bool,
    /// Print it as it is on a terminal, too, where a guest can then move the cursor and change the title; what goes to a file or a program is never changed
    #[arg(long)]
    raw: bool,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

/// What is printed where nothing else was asked for.
const DEFAULT_BYTES: u32 = 65_536;

fn parse_since(text: &str) -> Result<Timestamp, String> {
    match (text.parse(), humantime::parse_duration(text)) {
        (Ok(time), _) => Ok(time),
        (_, Ok(ago)) => Ok(Timestamp::from(SystemTime::now()) - ago),
        _ => Err("must be a time such as 2026-01-31T12:00:00Z, or how long ago, such as 10m".to_owned()),
    }
}

pub(crate) async fn run(global: &Global, args: LogsArgs) -> Run {
    let mut instances = Instances::open(global, &args.endpoint).await?;
    let found = instances.find(&args.instance).await?;
    if !args.follow && args.tail.is_none() && args.since.is_none() {
        let end = instances.logs(&found, args.bytes.unwrap_or(DEFAULT_BYTES)).await?;
        return Ok(output::console(&end, args.raw)?);
    }
    let agent = args.endpoint.open_agent_of(global, &found.node_id, "logs").await?;
    let mut shown =
        Shown { at: None, half: Vec::new(), raw: args.raw, progress: Progress::new(global.quiet) };
    let path = found.path("/logs");
    let mut lost = None;
    loop {
        match follow(&agent, &format!("{path}?{}", query(&args, shown.at)), &mut shown).await {
            Ok(true) => return Ok(shown.finish()?),
            Ok(false) if !args.follow => {
                return Err(Outcome::Unreachable(anyhow!("the agent ended its answer before the log's end")));
            }
            Ok(false) => lost = None,
            // What it answered is its word; that it does not answer may pass.
            Err(error @ (Outcome::Failed(_) | Outcome::Usage(_))) => return Err(error),
            Err(error) if !args.follow || shown.at.is_none() => return Err(error),
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
            let default = (args.tail.is_none() && args.since.is_none()).then_some(DEFAULT_BYTES);
            query.extend(args.bytes.or(default).map(|bytes| format!("bytes={bytes}")));
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
async fn follow(agent: &AgentClient, path: &str, shown: &mut Shown) -> Result<bool, Outcome> {
    let mut answer = agent.stream(Method::GET, path, Bytes::new()).await?;
    let mut rest = Vec::new();
    while let Ok(Some(piece)) = answer.next().await {
        rest.extend_from_slice(&piece);
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            if line.len() > 1 && shown.show(&line)? {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// What was shown so far.
struct Shown {
    /// The next byte of the console.
    at: Option<u64>,
    /// A character whose end has not come yet.
    half: Vec<u8>,
    raw: bool,
    progress: Progress,
}

impl Shown {
    /// Whether it was the last line.
    fn show(&mut self, line: &[u8]) -> Result<bool, Outcome> {
        let line: Line = serde_json::from_slice(line).context("could not read the agent's answer")?;
        if let Some(problem) = line.error {
            return Err(Outcome::Failed(anyhow::Error::new(problem)));
        }
        if line.lost > 0 {
            let lost = line.lost;
            self.progress.say(format!("warning: {lost} bytes were cut off before they were read"));
        }
        if let Some(text) = line.data {
            let data = STANDARD.decode(text).context("could not read the console")?;
            self.at = Some(line.offset + data.len() as u64);
            self.half.extend(data);
            let whole = self.half.len() - unfinished(&self.half);
            let whole: Vec<u8> = self.half.drain(..whole).collect();
            output::console(&whole, self.raw)?;
        }
        Ok(line.end)
    }

    fn finish(&self) -> anyhow::Result<()> {
        output::console(&self.half, self.raw)
    }
}

/// How many bytes at the end are the beginning of a character, of which the rest may still come.
fn unfinished(bytes: &[u8]) -> usize {
    let begins = |length: &usize| {
        std::str::from_utf8(&bytes[bytes.len() - length..])
            .is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
    };
    (1..LONGEST_CHARACTER.min(bytes.len() + 1)).find(begins).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_that_came_in_part_waits_for_its_rest() {
        for (bytes, waits) in [
            (&b"plain"[..], 0),
            ("é".as_bytes(), 0),
            (&"aé".as_bytes()[..2], 1),
            (&"€".as_bytes()[..2], 2),
            (&"\u{1f600}".as_bytes()[..3], 3),
            (b"\xff\xff", 0),
            (b"\x80\x80\x80", 0),
            (b"", 0),
        ] {
            assert_eq!(unfinished(bytes), waits, "{bytes:?}");
        }
    }

    #[test]
    fn a_time_is_one_or_how_long_ago() {
        assert_eq!(parse_since("2026-01-31T12:00:00Z"), Ok("2026-01-31T12:00:00Z".parse().unwrap()));
        let ten_minutes_ago = || Timestamp::from(SystemTime::now()) - Duration::from_secs(600);
        let (earliest, parsed, latest) = (ten_minutes_ago(), parse_since("10m"), ten_minutes_ago());
        assert!(parsed.is_ok_and(|parsed| earliest <= parsed && parsed <= latest));
        assert!(parse_since("yesterday").is_err());
    }
}
