//! Waits until a template's kernel is idle before it is saved.
//!
//! A kernel that has just booted still has work: about a second later it switches to the clock that it has measured by then. If
//! the template were saved before, every fork would do that work first, while a request waits.

use std::time::Duration;

use mvm_proto::InstanceId;

use super::Executor;

/// What the guest's kernel tells time by. The first one, which it gives up later, says so.
const CLOCK: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
const FIRST_CLOCK: &[u8] = b"tsc-early";
const CLOCK_BYTES: u64 = 64;

/// How often that is asked, and how long at most: a fork of one that was saved before is slower, and no worse.
const EVERY: Duration = Duration::from_millis(50);
const AT_MOST: Duration = Duration::from_secs(3);

/// Left alone for this long afterwards, it has done what being asked gave it to do.
const QUIET: Duration = Duration::from_millis(100);

impl Executor {
    /// Waits until the guest's kernel has its clock. A guest that can't be asked is not waited for.
    pub(super) async fn settle(&self, template: &InstanceId) {
        let settled = async {
            while let Ok(clock) = self.links.read_piece(template, CLOCK, 0, CLOCK_BYTES).await {
                if !clock.starts_with(FIRST_CLOCK) {
                    tokio::time::sleep(QUIET).await;
                    return;
                }
                tokio::time::sleep(EVERY).await;
            }
        };
        if tokio::time::timeout(AT_MOST, settled).await.is_err() {
            tracing::debug!(%template, "its kernel did not become idle");
        }
    }
}
