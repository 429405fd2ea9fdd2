//! A pool's warm-up: a program that runs once in the pool's template, so that every instance starts with its results.
//!
//! It runs in a guest without an identity: no name, secrets or network, and its workload not started.

use std::time::Duration;

use mvm_proto::InstanceId;
use mvm_proto::document::Warmup;
use mvm_proto::text::one_line;

use super::{Executor, StepError};
use crate::guest::{ExecEvent, ExecRequest};

/// The guest ends a program when its time is over; one that does not say so is given up a little later.
const MARGIN: Duration = Duration::from_secs(10);

/// How much of the end of what it printed is told.
const OUTPUT_BYTES: usize = 2048;

/// How long a warm-up takes at most.
pub(super) fn longest(warmup: &Warmup) -> Duration {
    Duration::from_secs(warmup.timeout_seconds) + MARGIN
}

impl Executor {
    pub(super) async fn warm_up(&self, template: &InstanceId, warmup: &Warmup) -> Result<(), StepError> {
        let mut end = End::default();
        let run = async {
            let request = ExecRequest {
                command: warmup.command.clone(),
                timeout: Some(Duration::from_secs(warmup.timeout_seconds)),
                ..ExecRequest::default()
            };
            let program = self.links.exec(template, request).await?;
            loop {
                match program.next().await? {
                    ExecEvent::Accepted | ExecEvent::Taken(_) => {}
                    ExecEvent::Output { data, .. } => end.take(&data),
                    ExecEvent::Exit { code: 0, signal: 0, timed_out: false, .. } => return Ok(None),
                    ExecEvent::Exit { timed_out: true, .. } => return Ok(Some(over(warmup))),
                    ExecEvent::Exit { code, signal: 0, .. } => {
                        return Ok(Some(format!("ended with exit code {code}")));
                    }
                    ExecEvent::Exit { signal, .. } => {
                        return Ok(Some(format!("was ended by signal {signal}")));
                    }
                }
            }
        };
        let failure = match tokio::time::timeout(longest(warmup), run).await {
            Ok(ended) => ended.map_err(|error: crate::guest::LinkError| {
                StepError::Warmup(format!("could not be run: {error}"))
            })?,
            Err(_) => Some(over(warmup)),
        };
        match failure {
            None => Ok(()),
            Some(failure) => Err(StepError::Warmup(format!("{failure}{}", end.as_words()))),
        }
    }
}

fn over(warmup: &Warmup) -> String {
    format!("was not done within {} s", warmup.timeout_seconds)
}

/// The end of what a program printed.
#[derive(Debug, Default)]
struct End(Vec<u8>);

impl End {
    fn take(&mut self, data: &[u8]) {
        self.0.extend_from_slice(&data[data.len().saturating_sub(OUTPUT_BYTES)..]);
        let over = self.0.len().saturating_sub(OUTPUT_BYTES);
        self.0.drain(..over);
    }

    /// As the end of a sentence, in one line; nothing when it printed nothing.
    fn as_words(&self) -> String {
        let text = String::from_utf8_lossy(&self.0);
        let lines = text.split(|c: char| c.is_control()).map(str::trim).filter(|line| !line.is_empty());
        let lines: Vec<_> = lines.collect();
        if lines.is_empty() {
            String::new()
        } else {
            format!("; its output ends with `{}`", one_line(&lines.join(" / "), OUTPUT_BYTES))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_what_a_program_printed_is_told_in_one_line_and_no_more() {
        let mut end = End::default();
        assert_eq!(end.as_words(), "");
        end.take(b"warming\n\x1b[31m  no such model\r\n");
        assert_eq!(end.as_words(), "; its output ends with `warming / [31m  no such model`");
        for _ in 0..100 {
            end.take(&[b'x'; 100]);
        }
        end.take(&[b'y'; 3000]);
        assert_eq!(end.0, vec![b'y'; OUTPUT_BYTES]);
    }
}
