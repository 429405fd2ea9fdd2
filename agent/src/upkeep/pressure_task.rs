//! Watches memory pressure (PSI) of this machine and tells the reconcile loop.
//!
//! Pressure is reported for some time after it ended, so that the sleep policy does not undo at once what it just did.

use std::path::Path;
use std::time::Duration;

use mvm_host::cgroup::{NODE_MEMORY_PRESSURE, PressureWatch, read_pressure};
use tokio_util::sync::CancellationToken;

use crate::node::handle::NodeHandle;

/// So much of so long lost by someone is pressure: short enough to act before anything is killed. The kernel lets
/// anyone ask for windows of two seconds.
const STALL: Duration = Duration::from_millis(200);
const WINDOW: Duration = Duration::from_secs(2);

/// How long it must be quiet before it is over.
const OVER_AFTER: Duration = Duration::from_secs(30);

/// Per cent of the last ten seconds that were lost, when so much of so long was.
const SHARE_OF_TEN_SECONDS: f64 = 1.0;

/// Whether the kernel's averages say so too. Some kernels count from the machine's start when they are first asked to
/// tell, and so tell of what was long ago.
async fn confirmed_by_averages() -> bool {
    // The averages are made anew every two seconds.
    tokio::time::sleep(WINDOW).await;
    let said = read_pressure(Path::new(NODE_MEMORY_PRESSURE));
    said.map_or(true, |pressure| pressure.some.avg10 >= SHARE_OF_TEN_SECONDS)
}

/// Runs until `stop`. A machine that does not tell has none.
pub(crate) async fn pressure_task(node: NodeHandle, stop: CancellationToken) {
    let pressed = node.pressed();
    let micros = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    let watch = PressureWatch::new(Path::new(NODE_MEMORY_PRESSURE), micros(STALL), micros(WINDOW));
    let watch = match watch {
        Ok(watch) => watch,
        Err(error) => {
            tracing::info!(%error, "this machine does not report memory pressure");
            return stop.cancelled().await;
        }
    };
    loop {
        let is_pressed = *pressed.borrow();
        let told = tokio::select! {
            () = stop.cancelled() => return,
            told = watch.pressed() => match told {
                Ok(()) if !confirmed_by_averages().await => continue,
                told => told.map(|()| true),
            },
            () = tokio::time::sleep(OVER_AFTER), if is_pressed => Ok(false),
        };
        match told {
            Ok(now) if now != is_pressed => {
                let (kind, message) = if now {
                    ("MemoryPressure", "the machine is short of memory: idle instances go to sleep")
                } else {
                    ("MemoryPressureOver", "memory is no longer short")
                };
                node.events().publish(kind, "node", message);
                pressed.send_replace(now);
                node.trigger();
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "could not go on watching memory pressure");
                return stop.cancelled().await;
            }
        }
    }
}
