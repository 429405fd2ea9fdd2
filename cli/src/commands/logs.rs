//! `mvm logs` and `mvm instance logs`: what an instance writes to its console, which is what its workload prints too.
//!
//! Through a coordinator ([`relayed`]) or from the agent that is named ([`direct`]); shown the same.

mod direct;
mod relayed;

use std::time::SystemTime;

use clap::Args;
use mvm_proto::Timestamp;

use crate::endpoint::{EndpointArgs, Route};
use crate::exit::Run;
use crate::global::Global;
use crate::instances::InstanceName;
use crate::output;
use crate::progress::Progress;

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
    match args.endpoint.route() {
        Route::Coordinator(operator) => relayed::run(global, &args, operator.channel(global).await?).await,
        Route::Agent => direct::run(global, &args).await,
    }
}

impl LogsArgs {
    /// How much of the end is wanted; none: as much as the others say.
    fn bytes(&self) -> Option<u32> {
        let default = (self.tail.is_none() && self.since.is_none()).then_some(DEFAULT_BYTES);
        self.bytes.or(default)
    }
}

/// What was shown so far.
struct Shown {
    /// A character whose end has not come yet.
    half: Vec<u8>,
    raw: bool,
    progress: Progress,
}

impl Shown {
    fn new(global: &Global, args: &LogsArgs) -> Self {
        Self { half: Vec::new(), raw: args.raw, progress: Progress::new(global.quiet) }
    }

    fn lose(&self, bytes: u64) {
        if bytes > 0 {
            self.progress.say(format!("warning: {bytes} bytes were cut off before they were read"));
        }
    }

    fn show(&mut self, data: &[u8]) -> anyhow::Result<()> {
        self.half.extend(data);
        let whole = self.half.len() - unfinished(&self.half);
        let whole: Vec<u8> = self.half.drain(..whole).collect();
        output::console(&whole, self.raw)
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
    use std::time::Duration;

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
