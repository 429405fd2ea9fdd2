//! What long work is doing, on standard error, so that results on standard output stay clean.

use std::io::Write;

/// Tells progress unless `--quiet`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    quiet: bool,
}

impl Progress {
    pub(crate) fn new(quiet: bool) -> Self {
        Self { quiet }
    }

    pub(crate) fn say(self, line: impl AsRef<str>) {
        if !self.quiet {
            // A closed stderr can't be told about.
            let _ = writeln!(std::io::stderr(), "{}", line.as_ref());
        }
    }
}
