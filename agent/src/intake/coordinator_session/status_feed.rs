//! What a session sends of the node's status, and when: the whole at first and when it is asked for, then what changed.

use std::time::SystemTime;

use mvm_proto::Timestamp;
use mvm_proto::status::NodeStatus;
use mvm_proto::status::delta::between;
use mvm_proto::status::fit::fit_status;
use mvm_proto::wire::session::v1::agent_frame;
use tokio::sync::watch;
use tokio::time::Instant;

use super::status_pacer::StatusPacer;

pub(super) struct StatusFeed {
    status: watch::Receiver<NodeStatus>,
    pacer: StatusPacer,
    due: Instant,
    /// Whether the coordinator takes changes.
    deltas: bool,
    /// As it was sent last. None: the whole is sent next.
    sent: Option<NodeStatus>,
    sequence: u64,
}

impl StatusFeed {
    pub(super) fn new(status: watch::Receiver<NodeStatus>, deltas: bool) -> Self {
        let (pacer, due) = (StatusPacer::default(), Instant::now());
        Self { status, pacer, due, deltas, sent: None, sequence: 0 }
    }

    /// The coordinator lacks something.
    pub(super) fn send_whole(&mut self) {
        self.sent = None;
        self.due = Instant::now();
    }

    /// Waits until there is something to send. None: the node is closing. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<agent_frame::Body> {
        loop {
            tokio::select! {
                changed = self.status.changed() => {
                    changed.ok()?;
                    let due = self.pacer.due(&self.status.borrow_and_update(), Instant::now());
                    // A whole status that was asked for is not put off.
                    self.due = if self.sent.is_some() || !self.deltas { due } else { self.due.min(due) };
                }
                () = tokio::time::sleep_until(self.due) => return Some(self.body()),
            }
        }
    }

    fn body(&mut self) -> agent_frame::Body {
        let newest = self.status.borrow_and_update().clone();
        // As much as a coordinator keeps; what is missing is said in a condition.
        let mut fitted = newest.clone();
        fit_status(&mut fitted, Timestamp::from(SystemTime::now()));
        self.due = self.pacer.sent(newest, Instant::now());
        let before = self.sent.take().filter(|_| self.deltas);
        let delta = before.and_then(|before| between(&before, &fitted, self.sequence + 1));
        if self.deltas {
            self.sent = Some(fitted.clone());
        }
        match delta {
            Some(delta) => {
                self.sequence = delta.sequence;
                agent_frame::Body::StatusDelta(delta)
            }
            None => {
                self.sequence = 0;
                agent_frame::Body::Status(fitted)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mvm_proto::status::{Counts, PoolStatus};
    use tokio::time::{Interval, interval};

    use super::super::status_pacer::{PACE, REFRESH};
    use super::*;

    fn status(running: u32) -> NodeStatus {
        let pool = |name: &str, running| PoolStatus {
            pool_id: name.to_owned(),
            actual: Some(Counts { running, ..Counts::default() }),
            ..PoolStatus::default()
        };
        NodeStatus { pools: vec![pool("still", 1), pool("moves", running)], ..NodeStatus::default() }
    }

    /// What the feed sends until `beats` heartbeats were sent beside it.
    async fn over(feed: &mut StatusFeed, ticks: &mut Interval, beats: u32) -> Vec<agent_frame::Body> {
        let (mut sent, mut beaten) = (Vec::new(), 0);
        while beaten < beats {
            tokio::select! {
                biased;
                body = feed.next() => sent.push(body.unwrap()),
                _ = ticks.tick() => beaten += 1,
            }
        }
        sent
    }

    #[tokio::test(start_paused = true)]
    async fn heartbeats_of_a_node_at_rest_carry_no_status() {
        let (_sender, receiver) = watch::channel(status(1));
        let mut feed = StatusFeed::new(receiver, true);
        let mut ticks = interval(Duration::from_secs(10));
        let begun = Instant::now();
        assert!(matches!(over(&mut feed, &mut ticks, 1).await[..], [agent_frame::Body::Status(_)]));
        // As long as the times of a status may be old.
        let quiet = over(&mut feed, &mut ticks, 29).await;
        assert_eq!((quiet, begun.elapsed() < REFRESH), (Vec::new(), true));
        let refreshed = over(&mut feed, &mut ticks, 3).await;
        let [agent_frame::Body::StatusDelta(delta)] = &refreshed[..] else { panic!("{refreshed:?}") };
        let changed = delta.changed.as_ref().unwrap();
        assert_eq!((&changed.pools, &changed.conditions), (&Vec::new(), &Vec::new()));
    }

    #[tokio::test(start_paused = true)]
    async fn after_the_whole_only_the_pools_that_changed_are_sent_with_growing_numbers() {
        let (sender, receiver) = watch::channel(status(1));
        let mut feed = StatusFeed::new(receiver, true);
        assert!(matches!(feed.next().await, Some(agent_frame::Body::Status(_))));
        for sequence in 1..4 {
            sender.send_replace(status(u32::try_from(sequence).unwrap() + 1));
            let Some(agent_frame::Body::StatusDelta(delta)) = feed.next().await else { panic!("no change") };
            let pools: Vec<_> = delta.changed.unwrap().pools.into_iter().map(|pool| pool.pool_id).collect();
            assert_eq!((delta.sequence, pools), (sequence, vec!["moves".to_owned()]));
        }
        // What a coordinator that missed something is sent at once, and what comes after it.
        let asked = Instant::now();
        feed.send_whole();
        sender.send_replace(status(9));
        assert_eq!(feed.next().await, Some(agent_frame::Body::Status(status(9))));
        assert!(asked.elapsed() < PACE);
        sender.send_replace(status(10));
        let Some(agent_frame::Body::StatusDelta(delta)) = feed.next().await else { panic!("no change") };
        assert_eq!(delta.sequence, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_coordinator_that_takes_no_changes_is_sent_the_whole_each_time() {
        let (sender, receiver) = watch::channel(status(1));
        let mut feed = StatusFeed::new(receiver, false);
        for running in 1..4 {
            assert_eq!(feed.next().await, Some(agent_frame::Body::Status(status(running))));
            sender.send_replace(status(running + 1));
        }
    }
}
