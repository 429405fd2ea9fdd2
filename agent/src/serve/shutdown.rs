//! The life of the process as its service manager sees it: ready, stopping, alive.
//!
//! The daemons call these; nothing here decides. Without a service manager every notice is a no-op.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// How long in-flight work may take to finish once the agent was told to stop. The service manager's own limit, and
/// the promise to operators, is 10 s; what is left over is for writing state and leaving.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(8);

/// Tells the service manager that the daemon answers.
pub fn notify_ready(status: &str) {
    notify(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// Tells the service manager that the daemon is leaving on purpose.
pub fn notify_stopping() {
    notify(&[NotifyState::Stopping]);
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        debug!(%error, "could not notify the service manager");
    }
}

/// Feeds the service manager's watchdog, if it set one, for as long as `alive` holds. A loop that hangs stops being
/// fed and is restarted; instances outlive that.
pub async fn watchdog_task(alive: impl Fn() -> bool, shutdown: CancellationToken) {
    let Some(period) = sd_notify::watchdog_enabled() else { return };
    let mut ticks = tokio::time::interval(period / 2);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = shutdown.cancelled() => return,
        }
        if alive() {
            notify(&[NotifyState::Watchdog]);
        } else {
            warn!("the main loop is not alive; the watchdog is not fed");
        }
    }
}
