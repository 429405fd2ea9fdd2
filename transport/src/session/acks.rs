//! Collects acks so that many travel in one frame, without making a lone one wait.

use std::time::Duration;

use mvm_proto::wire::session::v1::{Ack, Acks};
use tokio::time::Instant;

/// The least time between two batches. An ack after a silence goes at once: someone waits for it. Those that follow
/// closely wait for company.
pub const FLUSH_AFTER: Duration = Duration::from_millis(5);
/// Acks that make a batch go at once.
pub const FLUSH_AT: usize = 64;

/// A batch of acks that is being collected. The owner's loop selects on [`AckBatcher::ready`].
#[derive(Debug, Default)]
pub struct AckBatcher {
    waiting: Vec<Ack>,
    due: Option<Instant>,
    last_taken: Option<Instant>,
}

impl AckBatcher {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one; it is due [`FLUSH_AFTER`] after the last batch, or with the batch that it joins.
    pub fn push(&mut self, ack: Ack) {
        self.waiting.push(ack);
        let now = Instant::now();
        let next = self.last_taken.map_or(now, |taken| taken + FLUSH_AFTER);
        let due = *self.due.get_or_insert(next);
        if self.waiting.len() >= FLUSH_AT {
            self.due = Some(due.min(now));
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Waits until a batch is due, and takes it; waits for ever while there is none. Cancel-safe.
    pub async fn ready(&mut self) -> Acks {
        match self.due {
            Some(due) => tokio::time::sleep_until(due).await,
            None => std::future::pending().await,
        }
        self.take()
    }

    /// Takes what is there, due or not: before a goodbye.
    pub fn take(&mut self) -> Acks {
        self.due = None;
        self.last_taken = Some(Instant::now());
        Acks { acks: std::mem::take(&mut self.waiting) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    /// One that has just sent a batch.
    fn busy() -> AckBatcher {
        let mut batcher = AckBatcher::new();
        batcher.push(Ack::default());
        batcher.take();
        batcher
    }

    #[tokio::test(start_paused = true)]
    async fn an_ack_after_a_silence_does_not_wait() {
        let mut batcher = busy();
        tokio::time::advance(FLUSH_AFTER).await;
        batcher.push(Ack::default());
        assert_eq!(batcher.ready().now_or_never().map(|batch| batch.acks.len()), Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn acks_soon_after_a_batch_travel_together() {
        let mut batcher = busy();
        let begun = Instant::now();
        batcher.push(Ack::default());
        tokio::time::advance(Duration::from_millis(3)).await;
        batcher.push(Ack::default());
        assert_eq!(batcher.ready().await.acks.len(), 2);
        assert_eq!(begun.elapsed(), FLUSH_AFTER);
    }

    #[tokio::test(start_paused = true)]
    async fn sixty_four_acks_do_not_wait() {
        let mut batcher = AckBatcher::new();
        (0..FLUSH_AT).for_each(|_| batcher.push(Ack::default()));
        assert_eq!(batcher.ready().now_or_never().map(|batch| batch.acks.len()), Some(FLUSH_AT));
    }

    #[tokio::test(start_paused = true)]
    async fn an_empty_batcher_is_never_ready() {
        let mut batcher = AckBatcher::new();
        assert!(tokio::time::timeout(Duration::from_secs(3600), batcher.ready()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_given_up_loses_no_ack() {
        let mut batcher = busy();
        batcher.push(Ack::default());
        assert!(batcher.ready().now_or_never().is_none());
        assert_eq!(batcher.ready().await.acks.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_taken_early_leaves_nothing_due() {
        let mut batcher = AckBatcher::new();
        batcher.push(Ack::default());
        assert_eq!(batcher.take().acks.len(), 1);
        assert!(batcher.is_empty() && batcher.ready().now_or_never().is_none());
    }
}
