//! Trims the logs of a VMM and its guest, and reads them to explain how a VMM ended.

use mvm_host::{Host, Operation, ProcessEnd};
use mvm_proto::text::one_line;

use super::metrics::Metrics;
use super::paths::{CONSOLE, METRICS, VMM_LOG};
use super::vmm::{Live, Vmms};
use crate::run_files;

/// How much of a log explains an end.
const LOG_TAIL_BYTES: usize = 2048;
/// How long it all may be together.
const MAX_REASON_BYTES: usize = 2 * LOG_TAIL_BYTES;
const LOG_TAIL_LINES: usize = 4;
/// How much of the metrics file holds its last line.
const METRICS_TAIL_BYTES: usize = 64 * 1024;

/// What a guest's kernel says last, wherever it is configured to go on from there.
const PANIC: &str = "Kernel panic";

/// A console is cut when it is longer; a guest can't fill the host's disk by talking.
const MAX_CONSOLE_BYTES: u64 = 4 * 1024 * 1024;
/// How much of what the VMM writes itself may be on the disk. Its metrics alone are 9.5 MB a day.
const MAX_WRITTEN_BYTES: u64 = 1024 * 1024;

impl<H: Host> Vmms<H> {
    /// Waits for the end of a VMM, and keeps its logs short meanwhile.
    pub(super) async fn end_of(&self, live: &Live) -> ProcessEnd {
        let mut trim = tokio::time::interval(self.settings.limits.trim);
        loop {
            let waiting = self.host.wait_end(&live.vmm);
            tokio::pin!(waiting);
            let end = loop {
                tokio::select! {
                    end = &mut waiting => break end,
                    _ = trim.tick() => self.trim_logs(live).await,
                }
            };
            match end {
                Ok(end) => return end,
                // For want of a descriptor, perhaps. Without another try the end would never be told.
                Err(error) => {
                    tracing::warn!(error = %mvm_proto::text::chain(&error), "could not wait for a VMM's end");
                    trim.tick().await;
                }
            }
        }
    }

    async fn trim_logs(&self, live: &Live) {
        let instance = || live.vmm.instance.clone();
        let (name, max_bytes) = (CONSOLE.to_owned(), MAX_CONSOLE_BYTES);
        let mut trims = vec![Operation::TrimLog { instance: instance(), name, max_bytes }];
        // Firecracker opens none of its files to append: what is cut off one is a hole in it. Behind a jailer that leaves a
        // daemon, the console is such a file, too.
        let own = [VMM_LOG, METRICS].into_iter().chain(live.paths.jail.is_some().then_some(CONSOLE));
        trims.extend(own.map(|name| {
            let (name, max_bytes) = (live.paths.inside(name), MAX_WRITTEN_BYTES);
            Operation::PunchLog { instance: instance(), name, max_bytes }
        }));
        for trim in &trims {
            if let Err(error) = self.host.perform(trim).await {
                tracing::warn!(error = %mvm_proto::text::chain(&error), "could not cut a log");
            }
        }
    }
}

/// How a VMM ended, for people. Firecracker exits with 0 when its guest shut down and when it panicked alike, so the
/// code alone says little: what the guest and the VMM wrote last says more.
pub(super) async fn explain(host: &impl Host, end: &ProcessEnd, live: &Live) -> String {
    let mut parts = vec![match (end.signal, end.exit_code) {
        (Some(signal), _) => format!("ended by signal {signal}"),
        (None, Some(code)) => format!("exited with code {code}"),
        (None, None) => "ended".to_owned(),
    }];
    let text = async |name: &str, from: u64, bytes: usize| {
        let read = run_files::tail_from(host, &live.vmm.instance, name, from, bytes).await;
        String::from_utf8_lossy(&read.unwrap_or_default()).into_owned()
    };
    let paths = &live.paths;
    let mut console = text(CONSOLE, live.file.console_from, LOG_TAIL_BYTES).await;
    if paths.jail.is_some() {
        console.push_str(&text(&paths.inside(CONSOLE), 0, LOG_TAIL_BYTES).await);
    }
    if let Some(line) = console.lines().rev().find(|line| line.contains(PANIC)) {
        parts.push(format!("the guest panicked: {}", line.trim()));
    }
    if let Some(metrics) = Metrics::newest(&text(&paths.inside(METRICS), 0, METRICS_TAIL_BYTES).await) {
        parts.extend(metrics.troubles());
    }
    let log = text(&paths.inside(VMM_LOG), 0, LOG_TAIL_BYTES).await;
    let last: Vec<_> = log.lines().rev().take(LOG_TAIL_LINES).map(str::trim).collect();
    if !last.is_empty() {
        parts.push(last.into_iter().rev().collect::<Vec<_>>().join(" | "));
    }
    one_line(&parts.join("; "), MAX_REASON_BYTES)
}
