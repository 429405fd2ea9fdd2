//! Returns memory of an idle agent to the system.
//!
//! Starting, and applying a document, touches most of the program once; an idle agent then uses a small part of it. One task
//! follows the passes. After a while without a planned step it unmaps the code pages and trims the heap; the kernel pages
//! them in again when they are needed.

mod pages;

use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::node::reconcile_task::Pass;

/// Longer than the pauses between the steps of a document that is being made true.
const QUIET: Duration = Duration::from_secs(5);

/// A node that comes to rest often would otherwise fetch the same pages again and again.
const AT_MOST_EVERY: Duration = Duration::from_secs(600);

pub(crate) async fn give_back_task(passes: watch::Receiver<Pass>, stop: CancellationToken) {
    let give_back = || async {
        // Reads `/proc` and makes the kernel walk tables: a millisecond or two.
        match tokio::task::spawn_blocking(pages::give_back).await {
            Ok(Ok(bytes)) => tracing::debug!(bytes, "released memory that an idle agent does not need"),
            Ok(Err(error)) => tracing::debug!(%error, "could not release memory"),
            Err(error) => tracing::error!(%error, "releasing memory panicked"),
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = at_rest(passes, give_back) => stop.cancelled().await,
    }
}

/// Calls `act` whenever the node has become idle; ends with the reconcile loop.
async fn at_rest<F>(mut passes: watch::Receiver<Pass>, act: impl Fn() -> F)
where
    F: Future<Output = ()>,
{
    let mut seen = 0;
    loop {
        // Every document is planned for at least once, so that there is a rest to come to.
        let Ok(plans) = passes.wait_for(|pass| pass.plans != seen).await.map(|pass| pass.plans) else {
            return;
        };
        seen = plans;
        let more = tokio::time::timeout(QUIET, passes.wait_for(|pass| pass.plans != plans)).await;
        match more.map(|more| more.is_ok()) {
            Ok(true) => {}
            Ok(false) => return,
            Err(_) => {
                act().await;
                tokio::time::sleep(AT_MOST_EVERY).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    struct Node {
        passes: watch::Sender<Pass>,
        acts: Arc<AtomicU64>,
    }

    impl Node {
        fn followed() -> Self {
            let passes = watch::Sender::new(Pass::default());
            let acts = Arc::new(AtomicU64::new(0));
            let (receiver, counted) = (passes.subscribe(), Arc::clone(&acts));
            tokio::spawn(at_rest(receiver, move || {
                counted.fetch_add(1, Ordering::SeqCst);
                std::future::ready(())
            }));
            Self { passes, acts }
        }

        fn plan(&self) {
            self.passes.send_modify(|pass| pass.plans += 1);
        }

        /// How often memory was given back, when this much more time has gone by.
        async fn acts_after(&self, time: Duration) -> u64 {
            Self::let_it_look().await;
            tokio::time::advance(time).await;
            Self::let_it_look().await;
            self.acts.load(Ordering::SeqCst)
        }

        async fn let_it_look() {
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
        }
    }

    const A_LITTLE: Duration = Duration::from_millis(1);

    #[tokio::test(start_paused = true)]
    async fn a_node_that_has_come_to_rest_gives_back_once() {
        let node = Node::followed();
        assert_eq!(node.acts_after(QUIET * 2).await, 0, "nothing was planned yet");
        for _ in 0..5 {
            node.plan();
            assert_eq!(node.acts_after(QUIET - A_LITTLE).await, 0);
        }
        assert_eq!(node.acts_after(A_LITTLE * 2).await, 1);
        assert_eq!(node.acts_after(AT_MOST_EVERY * 3).await, 1, "nothing was planned since");
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_comes_to_rest_often_gives_back_seldom() {
        let node = Node::followed();
        node.plan();
        assert_eq!(node.acts_after(A_LITTLE).await, 0);
        assert_eq!(node.acts_after(QUIET).await, 1);
        node.plan();
        assert_eq!(node.acts_after(AT_MOST_EVERY - A_LITTLE).await, 1);
        assert_eq!(node.acts_after(A_LITTLE * 2).await, 1);
        assert_eq!(node.acts_after(QUIET).await, 2);
    }
}
