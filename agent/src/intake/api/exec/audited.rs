//! What the audit log says of what was done in a guest: that it began, and once what became of it.

use std::sync::Arc;
use std::time::Instant;

use mvm_proto::InstanceId;
use mvm_proto::text::chain;

use crate::guest::{ExecEvent, LinkError};
use crate::metrics::{ExecResult, Metrics};
use crate::node::handle::NodeHandle;

/// What the audit log calls it.
const ACTION: &str = "exec";

/// How much of a program's name the audit log repeats.
const MAX_AUDITED_CHARS: usize = 256;

/// One command.
pub(in crate::intake) struct Audited {
    node: NodeHandle,
    instance: InstanceId,
    actor: String,
    reason: String,
    metrics: Arc<Metrics>,
    begun: Instant,
    over: bool,
}

impl Audited {
    pub(in crate::intake) fn begin(
        node: &NodeHandle,
        metrics: &Arc<Metrics>,
        instance: &InstanceId,
        actor: String,
        command: &[String],
    ) -> Self {
        let (program, arguments) =
            command.split_first().map_or(("", 0), |(first, rest)| (first.as_str(), rest.len()));
        let program: String = program.chars().take(MAX_AUDITED_CHARS).collect();
        let reason = format!("{program:?} with {arguments} argument(s), asked by {actor}");
        Self::of(node, metrics, instance, actor, reason)
    }

    pub(in crate::intake) fn of(
        node: &NodeHandle,
        metrics: &Arc<Metrics>,
        instance: &InstanceId,
        actor: String,
        reason: String,
    ) -> Self {
        let (node, instance) = (node.clone(), instance.clone());
        node.audit(&instance, &actor, ACTION, reason.clone(), Ok("begun"));
        let metrics = Arc::clone(metrics);
        Self { node, instance, actor, reason, metrics, begun: Instant::now(), over: false }
    }

    /// It could not be run, or its guest went away.
    pub(in crate::intake) fn fail(&mut self, why: String) {
        self.end(ExecResult::Failed, Err(why));
    }

    /// It goes on where nothing more is heard of it here.
    pub(in crate::intake) fn leave(&mut self, outcome: &str) {
        if !std::mem::replace(&mut self.over, true) {
            self.node.audit(&self.instance, &self.actor, ACTION, self.reason.clone(), Ok(outcome));
        }
    }

    fn end(&mut self, result: ExecResult, outcome: Result<&str, String>) {
        if !std::mem::replace(&mut self.over, true) {
            self.metrics.executed(result, self.begun.elapsed());
            self.node.audit(&self.instance, &self.actor, ACTION, self.reason.clone(), outcome);
        }
    }

    pub(in crate::intake) fn hear(&mut self, event: &Result<ExecEvent, LinkError>) {
        match event {
            Ok(ExecEvent::Exit { code, signal, timed_out, cancelled }) => {
                let (result, outcome) = match (timed_out, cancelled, signal) {
                    (true, _, _) => (ExecResult::TimedOut, "ended: it took too long".to_owned()),
                    (_, true, _) => (ExecResult::Cancelled, "ended: it was cancelled".to_owned()),
                    (_, _, 0) => (ExecResult::Exited, format!("exited with {code}")),
                    (_, _, signal) => (ExecResult::Exited, format!("ended by signal {signal}")),
                };
                if result == ExecResult::TimedOut {
                    let record = self.node.records().get(&self.instance);
                    let subject =
                        record.map_or_else(|| self.instance.to_string(), |record| record.full_name());
                    self.node.events().warn("ExecTimeout", subject, "a command was ended: it took too long");
                }
                self.end(result, Ok(&outcome));
            }
            Err(error) => self.end(ExecResult::Failed, Err(chain(error))),
            Ok(_) => {}
        }
    }
}

impl Drop for Audited {
    /// Also when the answer is given up in the middle.
    fn drop(&mut self) {
        let left = "the caller left before its end, and it was cancelled".to_owned();
        self.end(ExecResult::Cancelled, Err(left));
    }
}
