//! What is remembered of a log beside it: how much was cut off its front, and when it was how long. From these a reader
//! counts every byte that was ever written to it, also those that are gone.
//!
//! Kept in `<name>.marks` by whatever cuts the log, and read by whatever follows it.

use std::fmt::Write as _;

/// More is not remembered: of the older half then every other mark goes.
const MAX_MARKS: usize = 256;

/// Whose file this is beside a log.
pub const MARKS_SUFFIX: &str = ".marks";

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogMarks {
    /// How many bytes were cut off, ever.
    pub cut: u64,
    /// The log is about to be cut at this length, or was: then it is shorter.
    pub cutting: Option<u64>,
    /// When it was last written to, in milliseconds since 1970, and how many bytes that made in all; in order.
    marks: Vec<(i64, u64)>,
}

impl LogMarks {
    /// Lines that can't be understood say nothing.
    #[must_use]
    pub fn read(bytes: &[u8]) -> Self {
        let mut read = Self::default();
        for line in String::from_utf8_lossy(bytes).lines() {
            let Some((first, second)) = line.split_once(' ') else { continue };
            let Ok(bytes) = second.parse::<u64>() else { continue };
            match first {
                "cut" => read.cut = bytes,
                "cutting" => read.cutting = Some(bytes),
                at => read.marks.extend(at.parse().ok().map(|at: i64| (at, bytes))),
            }
        }
        read.marks.truncate(2 * MAX_MARKS);
        read
    }

    #[must_use]
    pub fn written(&self) -> String {
        let mut text = format!("cut {}\n", self.cut);
        if let Some(length) = self.cutting {
            let _ = writeln!(text, "cutting {length}");
        }
        for (at, bytes) in &self.marks {
            let _ = writeln!(text, "{at} {bytes}");
        }
        text
    }

    /// The log is this long now, and was last written to then. Whether that is news.
    pub(crate) fn note(&mut self, at_ms: i64, length: u64) -> bool {
        let bytes = self.cut.saturating_add(length);
        let last = self.marks.last().copied();
        if last.map_or(bytes == 0, |(_, last)| bytes <= last) {
            return false;
        }
        // A clock that was set back orders nothing anew.
        self.marks.push((at_ms.max(last.map_or(at_ms, |(at, _)| at)), bytes));
        if self.marks.len() > MAX_MARKS {
            let older = self.marks.len() / 2;
            let mut index = 0;
            self.marks.retain(|_| {
                index += 1;
                index > older || index % 2 == 0
            });
        }
        true
    }

    /// Finishes what a cut that was begun and not ended did: a log that is shorter than it was then was cut.
    pub(crate) fn settle(&mut self, length: u64) -> bool {
        let Some(at) = self.cutting.take() else { return false };
        if length < at {
            self.cut = self.cut.saturating_add(at);
        }
        true
    }

    /// From which byte on everything was written at or after this time, as far as is remembered: never too late a one.
    #[must_use]
    pub fn since(&self, at_ms: i64) -> u64 {
        self.marks.iter().take_while(|(at, _)| *at < at_ms).last().map_or(0, |(_, bytes)| *bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_what_is_no_mark_says_nothing() {
        let mut marks = LogMarks { cut: 7, cutting: Some(9), ..LogMarks::default() };
        assert!(marks.note(1000, 5) && marks.note(2000, 6) && !marks.note(3000, 6));
        assert_eq!(marks.written(), "cut 7\ncutting 9\n1000 12\n2000 13\n");
        assert_eq!(LogMarks::read(marks.written().as_bytes()), marks);
        assert_eq!(LogMarks::read(b"\xff\xfe\nfoo\ncut x\n9 9 9\n"), LogMarks::default());
    }

    #[test]
    fn a_time_is_found_by_the_last_mark_before_it() {
        let mut marks = LogMarks::default();
        for (at, length) in [(10, 100), (20, 200), (15, 300)] {
            marks.note(at, length);
        }
        let found: Vec<_> = [5, 10, 11, 20, 21, 99].map(|at| marks.since(at)).into();
        // What came after the clock was set back counts as of the time before.
        assert_eq!(found, [0, 0, 100, 100, 300, 300]);
    }

    #[test]
    fn marks_stay_few_in_order_and_reach_back_far() {
        let mut marks = LogMarks::default();
        for second in 0..100_000 {
            marks.note(second * 1000, 1 + second.unsigned_abs());
            assert!(marks.marks.len() <= MAX_MARKS);
        }
        assert!(marks.marks.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(marks.marks.last(), Some(&(99_999_000, 100_000)));
        // Never later than asked for, whatever was thinned out.
        for second in (0..100_000).step_by(97) {
            assert!(marks.since(second * 1000) <= second.unsigned_abs());
        }
    }

    #[test]
    fn a_cut_that_was_begun_is_settled_by_how_long_the_log_is() {
        let begun = LogMarks { cut: 100, cutting: Some(50), ..LogMarks::default() };
        for (length, cut) in [(60, 100), (50, 100), (3, 150)] {
            let mut settled = begun.clone();
            assert!(settled.settle(length));
            assert_eq!((settled.cut, settled.cutting), (cut, None), "{length}");
            assert!(!settled.settle(length));
        }
    }
}
