//! What comes after the first line of a streamed exec: input, sizes of its terminal, signals; one JSON object per line.
//!
//! A line is read when the guest has room for the one before, so that a caller is never ahead of its program by more than a
//! window. The end of the body is the end of the input.

use axum::body::{Body, BodyDataStream};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::BytesMut;
use futures::StreamExt as _;
use mvm_proto::Problem;
use serde::Deserialize;

use super::super::problem::{self, Refused};
use crate::guest::ExecHandle;

/// A line of input: what the command line sends at once, and base64's third above it, is far below.
const MAX_LINE_BYTES: usize = 256 * 1024;
/// The last of Linux's signals.
const MAX_SIGNAL: u32 = 64;

/// The lines of a body as it arrives.
pub(super) struct Lines {
    body: BodyDataStream,
    held: BytesMut,
    ended: bool,
    /// It ended in the middle: its caller is gone.
    broken: bool,
}

impl Lines {
    pub(super) fn of(body: Body) -> Self {
        Self { body: body.into_data_stream(), held: BytesMut::new(), ended: false, broken: false }
    }

    /// The next line that says anything; none at the end.
    pub(super) async fn next(&mut self, most: usize) -> Result<Option<BytesMut>, Refused> {
        let mut looked = 0;
        loop {
            let end = self.held[looked..].iter().position(|byte| *byte == b'\n').map(|at| looked + at);
            let line = match end {
                Some(end) => self.held.split_to(end + 1),
                None if self.ended => self.held.split(),
                None if self.held.len() > most => return Err(problem::too_large(most)),
                None => {
                    looked = self.held.len();
                    match self.body.next().await {
                        Some(Ok(piece)) => self.held.extend_from_slice(&piece),
                        Some(Err(_)) => {
                            self.held.clear();
                            (self.ended, self.broken) = (true, true);
                        }
                        None => self.ended = true,
                    }
                    continue;
                }
            };
            looked = 0;
            if line.len() > most {
                return Err(problem::too_large(most));
            }
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line));
            }
            if self.ended && self.held.is_empty() {
                return Ok(None);
            }
        }
    }
}

/// What a command is given.
pub(super) enum Input {
    None,
    /// All of it came with the request.
    Whole(Vec<u8>),
    Lines {
        lines: Lines,
        /// Input is among them.
        interactive: bool,
    },
}

impl Input {
    /// Gives it to the command as that takes it; answers what was wrong with it, if anything was.
    pub(super) async fn pass_on(self, handle: &ExecHandle) -> Option<Problem> {
        match self {
            Self::None => None,
            Self::Whole(input) => {
                // A command that does not read its input, or ended, is no error.
                if handle.write(&input).await.is_ok() {
                    let _ = handle.close_input().await;
                }
                None
            }
            Self::Lines { lines, interactive } => pass_on(lines, handle, interactive).await,
        }
    }
}

/// One line: whatever it has of these.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Line {
    /// Base64.
    stdin: Option<String>,
    /// The input ends here, though more lines may come.
    end: bool,
    resize: Option<Size>,
    signal: Option<u32>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct Size {
    rows: u16,
    columns: u16,
}

/// Passes lines on until the body's end; answers what was wrong with the last one, if anything was.
async fn pass_on(mut lines: Lines, handle: &ExecHandle, interactive: bool) -> Option<Problem> {
    let mut open = interactive;
    loop {
        let line = match lines.next(MAX_LINE_BYTES).await {
            Ok(Some(line)) => line,
            Ok(None) => break,
            Err(Refused(problem)) => return Some(problem),
        };
        match read(&line, open) {
            // A program that ended, or does not read its input, is no error: how it ended is told by its answer.
            Ok((line, input)) => open &= pass(handle, &line, input).await,
            Err(Refused(problem)) => return Some(problem),
        }
    }
    if lines.broken {
        // Its caller is gone, which its answer shows only when something is written to it: a quiet command would go on.
        let _ = handle.signal(0);
    } else if open {
        let _ = handle.close_input().await;
    }
    None
}

fn read(line: &[u8], open: bool) -> Result<(Line, Vec<u8>), Refused> {
    let line: Line = serde_json::from_slice(line).map_err(|cause| problem::bad_body(cause.to_string()))?;
    if !open && line.stdin.is_some() {
        return Err(problem::bad_body("`stdin` comes after the input's end, or where none was announced"));
    }
    if line.signal.is_some_and(|signal| signal > MAX_SIGNAL) {
        return Err(problem::bad_body(format!("`signal` must be 0..={MAX_SIGNAL}; 0 cancels the command")));
    }
    let input = line.stdin.as_deref().map(|text| STANDARD.decode(text)).transpose();
    let input = input.map_err(|_| problem::bad_body("`stdin` must be base64"))?;
    Ok((line, input.unwrap_or_default()))
}

/// Whether the input goes on after it.
async fn pass(handle: &ExecHandle, line: &Line, input: Vec<u8>) -> bool {
    handle.wait_until_read().await;
    if let Some(Size { rows, columns }) = line.resize {
        let _ = handle.resize(rows.into(), columns.into());
    }
    if let Some(signal) = line.signal {
        let _ = handle.signal(signal);
    }
    let _ = handle.write(&input).await;
    if line.end {
        let _ = handle.close_input().await;
    }
    !line.end
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn lines(pieces: &[&str]) -> Vec<String> {
        let pieces: Vec<_> =
            pieces.iter().map(|piece| Ok::<_, std::io::Error>((*piece).to_owned())).collect();
        let mut lines = Lines::of(Body::from_stream(futures::stream::iter(pieces)));
        let mut found = Vec::new();
        loop {
            match lines.next(10).await {
                Ok(Some(line)) => found.push(String::from_utf8_lossy(&line).trim_end().to_owned()),
                Ok(None) => return found,
                Err(Refused(problem)) => {
                    found.push(problem.code);
                    return found;
                }
            }
        }
    }

    #[tokio::test]
    async fn lines_are_whole_whatever_pieces_they_came_in() {
        assert_eq!(lines(&["one\ntw", "o", "\n\n", "three"]).await, ["one", "two", "three"]);
        assert_eq!(lines(&[]).await, [""; 0]);
        assert_eq!(lines(&["one\n", "0123456789", "a"]).await, ["one", "body_too_large"]);
        assert_eq!(lines(&["0123456789a\n"]).await, ["body_too_large"]);
    }

    #[test]
    fn a_line_that_can_not_be_understood_is_refused() {
        let read = |text: &str, open| read(text.as_bytes(), open).map(|(_, input)| input).ok();
        assert_eq!(read(r#"{"stdin": "aGk=", "end": true}"#, true), Some(b"hi".to_vec()));
        assert_eq!(read(r#"{"resize": {"rows": 1, "columns": 2}, "signal": 2}"#, false), Some(Vec::new()));
        for bad in [r#"{"stdin": "?"}"#, r#"{"signal": 65}"#, r#"{"stdim": ""}"#, "[]x", r#"{"resize": {}}"#]
        {
            assert_eq!(read(bad, true), None, "{bad}");
        }
        assert_eq!(read(r#"{"stdin": "aGk="}"#, false), None);
    }
}
