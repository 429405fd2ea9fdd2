//! One line of the table: our figure, the peer's in the same run, what was hoped for, and whether it came true.

use serde::Serialize;

use crate::statistics::{Ratio, Summary};

/// What is measured. Each is also a name for `--only`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Subject {
    /// Documents verified and validated
    Documents,
    /// A node's plan
    Planner,
    Placement,
    /// A day of requests through the planner on virtual time
    Day,
    /// Full mutual-TLS handshakes
    Handshakes,
    /// From a push to the agent's word that it is durable
    Push,
    /// From an applied pool to its nodes
    Apply,
    /// Pausing and resuming a real guest
    Pause,
    /// Sleeping, waking, forking and resuming a real guest
    Rest,
    /// Programs in a real guest through the coordinator
    Exec,
    /// Packets and new tenants through the firewall of many tenants
    Firewall,
    /// Memory and CPU of an idle agent
    Idle,
    /// Coordinator's memory per connected node
    Sessions,
    /// From exec to ready
    Startup,
    /// One document to every connected node
    Fanout,
}

/// In what order of size a unit reads well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Unit {
    #[serde(rename = "1/s")]
    PerSecond,
    #[serde(rename = "ms")]
    Milliseconds,
    #[serde(rename = "us")]
    Microseconds,
    #[serde(rename = "MiB")]
    Mebibytes,
    #[serde(rename = "KiB")]
    Kibibytes,
    #[serde(rename = "% of a core")]
    PercentOfCore,
    #[serde(rename = "%")]
    Percent,
    #[serde(rename = "")]
    Times,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Figure {
    pub value: f64,
    pub unit: Unit,
}

/// Judged on medians: on the figure itself, or on its ratio to the peer's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    FigureBelow(f64),
    RatioAtLeast(f64),
    RatioAtMost(f64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Met,
    Missed,
    /// There is no goal.
    Information,
    /// There is no figure: the note says why.
    Failed,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Peer {
    pub name: String,
    pub figure: Figure,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    pub subject: Subject,
    pub name: String,
    pub ours: Option<Figure>,
    /// Of the samples behind `ours`.
    pub spread: Option<Summary>,
    pub peer: Option<Peer>,
    pub ratio: Option<Ratio>,
    pub goal: Option<Goal>,
    pub verdict: Verdict,
    pub notes: Vec<String>,
}

impl Row {
    /// A row whose figure is the median of `samples`.
    #[must_use]
    pub fn of(subject: Subject, name: impl Into<String>, samples: &[f64], unit: Unit) -> Self {
        let spread = Summary::of(samples);
        let ours = spread.map(|spread| Figure { value: spread.median, unit });
        Self { spread, ..Self::single(subject, name, ours) }.judged()
    }

    /// A row of one figure without samples behind it.
    #[must_use]
    pub fn single(subject: Subject, name: impl Into<String>, ours: Option<Figure>) -> Self {
        let name = name.into();
        let verdict = Verdict::Information;
        Self {
            subject,
            name,
            ours,
            spread: None,
            peer: None,
            ratio: None,
            goal: None,
            verdict,
            notes: Vec::new(),
        }
        .judged()
    }

    #[must_use]
    pub fn failed(subject: Subject, why: impl Into<String>) -> Self {
        Self { notes: vec![why.into()], ..Self::single(subject, "could not be measured", None) }
    }

    /// Beside a peer, measured in alternation with ours as `(ours, peer)` in our row's unit.
    #[must_use]
    pub fn beside(mut self, peer: impl Into<String>, pairs: &[(f64, f64)]) -> Self {
        let theirs: Vec<f64> = pairs.iter().map(|(_, peer)| *peer).collect();
        if let (Some(ours), Some(theirs)) = (self.ours, Summary::of(&theirs)) {
            self.peer = Some(Peer { name: peer.into(), figure: Figure { value: theirs.median, ..ours } });
        }
        self.ratio = Ratio::of(pairs);
        self.judged()
    }

    #[must_use]
    pub fn goal(mut self, goal: Goal) -> Self {
        self.goal = Some(goal);
        self.judged()
    }

    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    fn judged(mut self) -> Self {
        let held = |held: bool| if held { Verdict::Met } else { Verdict::Missed };
        self.verdict = match (self.ours, self.goal, self.ratio) {
            (None, _, _) => Verdict::Failed,
            (Some(_), None, _) => Verdict::Information,
            (Some(ours), Some(Goal::FigureBelow(limit)), _) => held(ours.value < limit),
            (Some(_), Some(Goal::RatioAtLeast(limit)), Some(ratio)) => held(ratio.median >= limit),
            (Some(_), Some(Goal::RatioAtMost(limit)), Some(ratio)) => held(ratio.median <= limit),
            (Some(_), Some(_), None) => Verdict::Missed,
        };
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_on_the_figure_is_judged_on_its_median() {
        let row = Row::of(Subject::Startup, "start", &[10.0, 49.0, 500.0], Unit::Milliseconds);
        assert_eq!(row.clone().goal(Goal::FigureBelow(50.0)).verdict, Verdict::Met);
        assert_eq!(row.goal(Goal::FigureBelow(49.0)).verdict, Verdict::Missed);
    }

    #[test]
    fn a_goal_on_the_ratio_is_judged_on_the_pairs() {
        let row =
            Row::of(Subject::Handshakes, "shake", &[83.0], Unit::PerSecond).beside("bare", &[(83.0, 100.0)]);
        assert_eq!(row.clone().goal(Goal::RatioAtLeast(0.83)).verdict, Verdict::Met);
        assert_eq!(row.goal(Goal::RatioAtLeast(0.84)).verdict, Verdict::Missed);
    }

    #[test]
    fn a_row_without_a_figure_failed_whatever_its_goal() {
        let row = Row::failed(Subject::Push, "no coordinator").goal(Goal::FigureBelow(1.0));
        assert_eq!(row.verdict, Verdict::Failed);
    }
}
