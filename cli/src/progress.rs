//! What long work is doing, on standard error, so that results on standard output stay clean.

/// Tells progress unless `--quiet`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    quiet: bool,
}

impl Progress {
    pub(crate) fn new(quiet: bool) -> Self {
        Self { quiet }
    }

    /// One line: what is in it can't begin another.
    pub(crate) fn say(self, line: impl AsRef<str>) {
        if !self.quiet {
            crate::output::say(line.as_ref());
        }
    }
}
