//! Whether a second session of one node is the same agent coming back, or another machine with the same certificate. Pure.
//!
//! An agent says which process it is, which data directory that runs on, and how often an agent was started on it. What
//! these do not settle is settled by asking the older session: an agent that comes back has none any more that answers.

use std::net::SocketAddr;
use std::time::Duration;

use mvm_proto::Timestamp;
use mvm_proto::wire::session::v1::AgentStart;

/// How long the older session has to answer. A newer one waits that long for its welcome, and agents give it longer.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(3);
/// How long a second machine is shown after it last tried: an agent tries twice a minute at least.
const SHOWN_FOR: Duration = Duration::from_secs(300);
/// Of what a node says that it is.
const MAX_ID_BYTES: usize = 64;

/// What an agent said of itself in its hello.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Agent {
    pub(crate) start: Option<AgentStart>,
    pub(crate) boot_id: String,
    pub(crate) hostname: String,
}

impl Agent {
    /// The process that it is; empty where it did not say.
    pub(crate) fn process(&self) -> String {
        self.start.as_ref().map(|start| start.id.clone()).unwrap_or_default()
    }
}

/// What to do with a second session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is the same agent: its older session is over.
    Replace,
    /// Only the older session can tell.
    Ask,
}

/// A start that is told within limits; any other is as if none was told.
pub(crate) fn checked(start: Option<AgentStart>) -> Option<AgentStart> {
    start.filter(|start| {
        let fits = |id: &str| !id.is_empty() && id.len() <= MAX_ID_BYTES;
        fits(&start.id) && fits(&start.data_dir)
    })
}

pub(crate) fn judge(older: &Agent, newer: &Agent) -> Verdict {
    let (Some(old), Some(new)) = (&older.start, &newer.start) else { return Verdict::Ask };
    let same_boot = older.boot_id == newer.boot_id && !older.boot_id.is_empty();
    let restarted = old.data_dir == new.data_dir && new.number > old.number && same_boot;
    if old.id == new.id || restarted { Verdict::Replace } else { Verdict::Ask }
}

/// Another machine that wanted a session as a node that has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SecondMachine {
    pub(crate) address: SocketAddr,
    pub(crate) hostname: String,
    pub(crate) since: Timestamp,
    pub(crate) last_at: Timestamp,
}

impl SecondMachine {
    /// Until when it is shown.
    pub(crate) fn until(&self) -> Timestamp {
        self.last_at + SHOWN_FOR
    }
}

/// What both machines and the operator are told.
pub(crate) fn told(node: &str, (host, address): (&str, &str), (second, at): (&str, &str)) -> String {
    format!(
        "two machines use the certificate of node {node}: {host} at {address} has the session, and {second} at {at} was \
         refused. Stop the agent that is not to be this node. If that does not help, or the machine with the session is \
         the wrong one: `mvm node remove {node}`, `mvm coordinator token create --node {node}`, and enrol the right machine anew, which \
         makes every older certificate of the node useless"
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn agent(id: &str, data_dir: &str, number: u64, boot: &str) -> Agent {
        let start = AgentStart { id: id.to_owned(), data_dir: data_dir.to_owned(), number };
        Agent { start: Some(start), boot_id: boot.to_owned(), hostname: String::new() }
    }

    #[test]
    fn an_agent_that_comes_back_is_known_and_all_else_is_asked_for() {
        let known = agent("p1", "d1", 4, "b1");
        for (newer, verdict, why) in [
            (agent("p1", "d1", 4, "b1"), Verdict::Replace, "the same process over another network"),
            (agent("p2", "d1", 5, "b1"), Verdict::Replace, "restarted"),
            (agent("p2", "d1", 5, "b2"), Verdict::Ask, "rebooted, or a copy on another machine"),
            (agent("p2", "d1", 4, "b1"), Verdict::Ask, "a copy that was started as often"),
            (agent("p2", "d1", 3, "b1"), Verdict::Ask, "an older copy, or what a copy has pushed out"),
            (agent("p2", "d2", 9, "b1"), Verdict::Ask, "another data directory with the same certificate"),
            (Agent::default(), Verdict::Ask, "an older version"),
        ] {
            assert_eq!(judge(&known, &newer), verdict, "{why}");
        }
        assert_eq!(judge(&Agent::default(), &known), Verdict::Ask);
        let no_boot = (agent("p1", "d1", 4, ""), agent("p2", "d1", 5, ""));
        assert_eq!(judge(&no_boot.0, &no_boot.1), Verdict::Ask, "not known to be one boot");
    }

    #[test]
    fn ids_that_are_none_or_too_long_are_as_if_none_was_told() {
        let start = |id: &str| Some(AgentStart { id: id.to_owned(), data_dir: "d".to_owned(), number: 1 });
        assert!(checked(start("a")).is_some());
        assert!(checked(start("")).is_none() && checked(start(&"x".repeat(65))).is_none());
    }

    proptest! {
        /// Two processes never take a session from each other in turns without the older one having been asked.
        #[test]
        fn of_two_processes_at_most_one_takes_over_unasked(
            a in (0..3_u8, 0..3_u64, 0..2_u8), b in (0..3_u8, 0..3_u64, 0..2_u8),
        ) {
            let of = |id: &str, (dir, number, boot): (u8, u64, u8)| agent(id, &dir.to_string(), number, &boot.to_string());
            let (a, b) = (of("a", a), of("b", b));
            prop_assert!(judge(&a, &b) == Verdict::Ask || judge(&b, &a) == Verdict::Ask);
        }
    }
}
