//! Exit codes, and how a failure is told on the way out.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done (for `agent reconcile`: converged, or valid with `--dry-run`) |
//! | 1 | failed, refused, or not converged |
//! | 2 | the command line, a settings file or an input file could not be understood |
//! | 3 | gave up waiting: what was asked is stored and still goes on |
//! | 4 | could not reach the coordinator or the agent |
//! | 130, 143 | ended by Ctrl-C or SIGTERM |
//!
//! `mvm instance exec` ends with the exit code of the command that it ran, or 128 and the signal that ended it.

use std::process::ExitCode;

use mvm_agent::AgentError;
use mvm_agent::node::assemble::NodeError;
use mvm_agent::upkeep::certs::CertsError;

#[derive(Debug)]
pub(crate) enum Outcome {
    Done,
    Failed(anyhow::Error),
    Usage(anyhow::Error),
    TimedOut(anyhow::Error),
    Unreachable(anyhow::Error),
    /// A command inside an instance ended with this code, and has said why itself.
    Command(u8),
    /// A signal ended the command; the shell's code for it.
    Interrupted(u8),
}

impl From<anyhow::Error> for Outcome {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

/// What commands return: `?` turns plain errors into [`Outcome::Failed`].
pub(crate) type Run = Result<(), Outcome>;

pub(crate) fn report(outcome: &Outcome) -> ExitCode {
    let (code, error) = match outcome {
        Outcome::Done => (0, None),
        Outcome::Failed(error) => (1, Some(error)),
        Outcome::Usage(error) => (2, Some(error)),
        Outcome::TimedOut(error) => (3, Some(error)),
        Outcome::Unreachable(error) => (4, Some(error)),
        Outcome::Command(code) | Outcome::Interrupted(code) => (*code, None),
    };
    if let Some(error) = error {
        crate::output::error(&causes(error));
    }
    ExitCode::from(code)
}

/// The error and its causes, without repeating what an outer text already holds; then what to do about it.
fn causes(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str("\n  because: ");
            text.push_str(&cause);
        }
    }
    if let Some(remediation) = remediation(error).filter(|hint| !text.contains(hint)) {
        text.push('\n');
        text.push_str(&remediation);
    }
    text
}

/// What to do next, where the error knows.
fn remediation(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|cause| {
        let of_agent = cause.downcast_ref().map(AgentError::remediation);
        let of_node = || cause.downcast_ref().and_then(NodeError::remediation);
        of_agent.or_else(of_node).or_else(|| cause.downcast_ref().map(CertsError::remediation))
    })
}
