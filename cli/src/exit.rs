//! Exit codes, and how a failure is told on the way out.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done (for `agent reconcile`: converged, or valid with `--dry-run`) |
//! | 1 | failed, refused, or not converged |
//! | 2 | the command line, a settings file or an input file could not be understood |
//! | 3 | gave up waiting: what was asked is stored and still goes on |
//! | 4 | could not reach the coordinator, the agent or its socket; or the node has no session to its coordinator |
//! | 5 | `push --dry-run`: the node would change something |
//! | 1, 2 | `diff`: something differs (1, and a failure is 2); `plan -f`: something would change (2) |
//! | 130, 143 | ended by Ctrl-C or SIGTERM |
//!
//! `mvm instance exec` ends with the exit code of the command that it ran, or 128 and the signal that ended it.

use std::process::ExitCode;

use mvm_agent::AgentError;
use mvm_agent::node::assemble::NodeError;
use mvm_agent::upkeep::certs::CertsError;
use mvm_proto::Problem;
use mvm_transport::ConnectError;

#[derive(Debug)]
pub(crate) enum Outcome {
    Done,
    Failed(anyhow::Error),
    Usage(anyhow::Error),
    TimedOut(anyhow::Error),
    Unreachable(anyhow::Error),
    /// A dry run found something to do, and has told it.
    Changes,
    /// A comparison found something, and has told it; its own code for that.
    Found(u8),
    /// A command inside an instance ended with this code, and has said why itself.
    Command(u8),
    /// A signal ended the command; the shell's code for it.
    Interrupted(u8),
}

impl From<anyhow::Error> for Outcome {
    fn from(error: anyhow::Error) -> Self {
        if error.chain().any(is_unreachable) { Self::Unreachable(error) } else { Self::Failed(error) }
    }
}

/// Whether no connection came about, or the node that was asked for has none to its coordinator.
fn is_unreachable(cause: &(dyn std::error::Error + 'static)) -> bool {
    let certs = cause.downcast_ref::<CertsError>().is_some_and(CertsError::is_unreachable);
    let problem = cause.downcast_ref::<Problem>().is_some_and(|problem| problem.code == NODE_NOT_CONNECTED);
    certs || problem || cause.is::<ConnectError>()
}

/// What a coordinator answers that has no session with the node.
const NODE_NOT_CONNECTED: &str = "node_not_connected";

/// What commands return: `?` turns plain errors into [`Outcome::Failed`].
pub(crate) type Run = Result<(), Outcome>;

pub(crate) fn report(outcome: &Outcome) -> ExitCode {
    let (code, error) = match outcome {
        Outcome::Done => (0, None),
        Outcome::Failed(error) => (1, Some(error)),
        Outcome::Usage(error) => (2, Some(error)),
        Outcome::TimedOut(error) => (3, Some(error)),
        Outcome::Unreachable(error) => (4, Some(error)),
        Outcome::Changes => (5, None),
        Outcome::Found(code) | Outcome::Command(code) | Outcome::Interrupted(code) => (*code, None),
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
