//! One task per VMM: waits for its end, reports it, and trims its logs meanwhile.

use std::sync::{Arc, Weak};
use std::time::Duration;

use mvm_host::{Host, Operation, ProcessEnd, VmmProcess};
use mvm_proto::InstanceId;
use mvm_proto::text::one_line;
use tokio::sync::watch;

use super::{Inner, args};
use crate::{VmExit, run_files};

pub(super) const VMM_LOG: &str = "vmm.log";
/// A console or VMM log is cut when it is longer; a guest can't fill the host's disk by talking.
const MAX_LOG_BYTES: u64 = 4 * 1024 * 1024;
const TRIM_EVERY: Duration = Duration::from_secs(10);
/// How much of the VMM's log goes into a message.
const SAID_BYTES: usize = 600;

/// Follows one VMM to its end, and keeps its logs short meanwhile.
pub(super) async fn watch_vmm<H: Host>(
    weak: Weak<Inner<H>>,
    host: Arc<H>,
    vmm: VmmProcess,
    tell: watch::Sender<Option<String>>,
) {
    let mut trim = tokio::time::interval(TRIM_EVERY);
    let waiting = host.wait_end(&vmm);
    tokio::pin!(waiting);
    let end = loop {
        tokio::select! {
            end = &mut waiting => break end,
            _ = trim.tick() => trim_logs(&*host, &vmm.instance).await,
        }
    };
    let detail = match &end {
        Ok(end) => how_it_ended(end, &*host).await,
        Err(cause) => format!("its end could not be awaited: {}", mvm_proto::text::chain(cause)),
    };
    if let Some(inner) = weak.upgrade() {
        // Under the lock: a listener that looks next finds it gone, and no VMM that was started since.
        let mut lives = inner.lives.lock();
        let _ = inner.exits.send(VmExit { instance: vmm.instance.clone(), detail: detail.clone() });
        tell.send_replace(Some(detail));
        if lives.get(&vmm.instance).is_some_and(|live| live.vmm == vmm) {
            lives.remove(&vmm.instance);
        }
    }
}

async fn trim_logs<H: Host>(host: &H, instance: &InstanceId) {
    for name in [args::CONSOLE, VMM_LOG] {
        let (instance, name) = (instance.clone(), name.to_owned());
        let trim = Operation::TrimLog { instance, name, max_bytes: MAX_LOG_BYTES };
        if let Err(cause) = host.perform(&trim).await {
            tracing::warn!(error = %mvm_proto::text::chain(&cause), "could not cut a log");
        }
    }
}

/// For people: the exit code or signal as far as known, and what the VMM last said.
async fn how_it_ended(end: &ProcessEnd, host: &impl Host) -> String {
    let how = match (end.exit_code, end.signal) {
        (Some(code), _) => format!("QEMU ended with exit code {code}"),
        (None, Some(signal)) => format!("QEMU was ended by signal {signal}"),
        (None, None) => "QEMU ended".to_owned(),
    };
    let said = run_files::tail(host, &end.instance, VMM_LOG, SAID_BYTES).await.unwrap_or_default();
    let said = String::from_utf8_lossy(&said).trim().replace('\n', "; ");
    if said.is_empty() { how } else { format!("{how}: {}", one_line(&said, SAID_BYTES)) }
}
