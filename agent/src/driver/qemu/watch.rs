//! One task per VMM: waits for its end, tells it, and keeps its logs short meanwhile.

use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use mvm_proto::InstanceId;
use tokio::sync::watch;

use super::{Inner, args, lock};
use crate::driver::VmExit;
use crate::host::{Host, Operation, ProcessEnd, VmmProcess};

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
        Ok(end) => how_it_ended(end, &host.run_dir(&vmm.instance)),
        Err(cause) => format!("its end could not be awaited: {}", crate::text::chain(cause)),
    };
    if let Some(inner) = weak.upgrade() {
        let _ = inner.exits.send(VmExit { instance: vmm.instance.clone(), detail: detail.clone() });
        tell.send_replace(Some(detail));
        let mut lives = lock(&inner.lives);
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
            tracing::warn!(error = %crate::text::chain(&cause), "could not cut a log");
        }
    }
}

/// For people: the exit code or signal as far as known, and what the VMM last said.
fn how_it_ended(end: &ProcessEnd, run_dir: &Path) -> String {
    let how = match (end.exit_code, end.signal) {
        (Some(code), _) => format!("QEMU ended with exit code {code}"),
        (None, Some(signal)) => format!("QEMU was ended by signal {signal}"),
        (None, None) => "QEMU ended".to_owned(),
    };
    let said = tail(&run_dir.join(VMM_LOG), SAID_BYTES).unwrap_or_default();
    let said = String::from_utf8_lossy(&said).trim().replace('\n', "; ");
    if said.is_empty() { how } else { format!("{how}: {said}") }
}

/// The end of a file; nothing of one that is not there.
pub(super) fn tail(path: &Path, max_bytes: usize) -> io::Result<Vec<u8>> {
    let mut file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(cause) => return Err(cause),
    };
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(max_bytes as u64)))?;
    let mut end = Vec::new();
    file.take(max_bytes as u64).read_to_end(&mut end)?;
    Ok(end)
}
