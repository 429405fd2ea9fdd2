//! The agent's tasks: started together, watched together, stopped together.

use std::future::Future;
use std::sync::Arc;

use axum::Router;
use axum::serve::Listener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use crate::metrics::Metrics;
use crate::node::handle::NodeHandle;
use crate::serve::shutdown::DRAIN_DEADLINE;

/// Tasks with names. All of them are meant to run until they are told to stop.
#[derive(Debug)]
pub(super) struct Tasks {
    running: JoinSet<&'static str>,
    stop: CancellationToken,
}

impl Tasks {
    pub(super) fn new(shutdown: &CancellationToken) -> Self {
        Self { running: JoinSet::new(), stop: shutdown.child_token() }
    }

    /// Cancelled when the tasks are to end.
    pub(super) fn stop_token(&self) -> CancellationToken {
        self.stop.clone()
    }

    pub(super) fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.running.spawn(async move {
            task.await;
            name
        });
    }

    /// A task that may end before the others.
    pub(super) fn spawn_short(
        &mut self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let stop = self.stop.clone();
        self.spawn(name, async move {
            task.await;
            stop.cancelled().await;
        });
    }

    /// The name of the first task that ends, which none should.
    pub(super) async fn first_to_end(&mut self) -> &'static str {
        match self.running.join_next().await {
            Some(Ok(name)) => name,
            Some(Err(error)) => {
                error!(%error, "a task failed");
                "unknown"
            }
            None => "all",
        }
    }

    /// Tells all tasks to end and waits; what is not done in time is cut off.
    pub(super) async fn stop(mut self) {
        self.stop.cancel();
        let all = async {
            while let Some(ended) = self.running.join_next().await {
                if let Err(error) = ended {
                    error!(%error, "a task failed while stopping");
                }
            }
        };
        if tokio::time::timeout(DRAIN_DEADLINE, all).await.is_err() {
            warn!(waited = ?DRAIN_DEADLINE, left = self.running.len(), "stopped before all tasks ended");
            self.running.shutdown().await;
        }
    }
}

/// Serves HTTP/1 or HTTP/2 on a local listener until `stop`; requests in flight are finished.
pub(super) async fn http_task<L>(listener: L, router: Router, stop: CancellationToken)
where
    L: Listener,
    L::Addr: std::fmt::Debug,
{
    let serving = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned());
    if let Err(error) = serving.await {
        error!(%error, "a local listener failed");
    }
}

/// Notes each pass of the reconcile loop, for liveness and for the metrics, each wake and each step.
pub(super) async fn passes_task(
    node: NodeHandle,
    metrics: Arc<Metrics>,
    last_pass: watch::Sender<Instant>,
    stop: CancellationToken,
) {
    let mut passes = node.passes();
    let mut wakes = node.wakes();
    let mut ends = node.step_ends();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            wake = wakes.recv() => {
                if let Ok(wake) = wake {
                    metrics.woken(&wake);
                }
                continue;
            }
            end = ends.recv() => {
                if let Ok(end) = end {
                    metrics.step(&end);
                }
                continue;
            }
            changed = passes.changed() => if changed.is_err() { return stop.cancelled().await },
        }
        let took = passes.borrow_and_update().took;
        last_pass.send_replace(Instant::now());
        metrics.reconciled(took);
        metrics.network(&node.network().borrow());
    }
}
