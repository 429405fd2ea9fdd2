//! A running VMM: its process, its spec as far as known, and its control connection.

use std::sync::Arc;
use std::time::Duration;

use mvm_host::{Host, VmmProcess};
use mvm_proto::{Digest, InstanceId};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::args::Accelerator;
use super::qmp::{Qmp, QmpError};
use crate::run_files::{self, Dial};
use crate::{DriverError, Vm, VmSpec, VmState};

/// Written before the VMM is started, so that a process that is found can be told.
pub(super) const RECORD: &str = "vmm.json";

/// After it did not answer, how long a VMM is not asked for its state.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) driver: String,
    pub(super) spec: VmSpec,
    pub(super) qemu: String,
    pub(super) accelerator: Accelerator,
    #[serde(default)]
    pub(super) balloon: bool,
}

impl Record {
    /// None when it is missing or damaged: the process is there all the same.
    pub(super) async fn read(host: &impl Host, instance: &InstanceId) -> Option<Self> {
        let bytes = run_files::read(host, instance, RECORD).await.ok()??;
        serde_json::from_slice(&bytes).ok()
    }
}

#[derive(Debug)]
pub(super) struct Live {
    pub(super) vmm: VmmProcess,
    pub(super) record: Option<Record>,
    control: Dial,
    connection: tokio::sync::Mutex<Connection>,
    /// How the process ended, once it has.
    pub(super) ended: watch::Receiver<Option<String>>,
    watcher: AbortHandle,
    short: Mutex<Short>,
}

/// Whether a guest gave memory back and does not have it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Short {
    /// An earlier agent started it.
    Unknown,
    Yes,
    No,
}

#[derive(Debug, Default)]
struct Connection {
    qmp: Option<Arc<Qmp>>,
    /// When it last did not answer.
    silent: Option<Instant>,
}

impl Drop for Live {
    fn drop(&mut self) {
        self.watcher.abort();
    }
}

impl Live {
    pub(super) fn new(
        vmm: VmmProcess,
        record: Option<Record>,
        control: Dial,
        ended: watch::Receiver<Option<String>>,
        watcher: AbortHandle,
    ) -> Self {
        let (connection, short) = (tokio::sync::Mutex::default(), Mutex::new(Short::Unknown));
        Self { vmm, record, control, connection, ended, watcher, short }
    }

    pub(super) fn instance(&self) -> &InstanceId {
        &self.vmm.instance
    }

    pub(super) fn has_balloon(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.balloon)
    }

    pub(super) fn short(&self) -> Short {
        *self.short.lock()
    }

    /// Says what it was before.
    pub(super) fn set_short(&self, short: Short) -> Short {
        std::mem::replace(&mut self.short.lock(), short)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.borrow().is_some()
    }

    /// How the process ended; absent while it lives.
    pub(super) fn end_detail(&self) -> Option<String> {
        self.ended.borrow().clone()
    }

    /// What it was booted from. One without a record has a revision that matches none.
    pub(super) fn revision(&self) -> Digest {
        self.record.as_ref().map_or_else(|| Digest::of(b"unknown"), |record| record.spec.revision)
    }

    /// The control connection, opened if need be.
    pub(super) async fn qmp(&self, deadline: Duration) -> Result<Arc<Qmp>, QmpError> {
        let mut connection = self.connection.lock().await;
        if let Some(qmp) = connection.qmp.as_ref().filter(|qmp| !qmp.is_closed()) {
            return Ok(Arc::clone(qmp));
        }
        match Qmp::connect(&self.control, deadline).await {
            Ok(qmp) => {
                let qmp = Arc::new(qmp);
                *connection = Connection { qmp: Some(Arc::clone(&qmp)), silent: None };
                Ok(qmp)
            }
            Err(cause) => {
                *connection = Connection { qmp: None, silent: Some(Instant::now()) };
                Err(cause)
            }
        }
    }

    /// The run state as last heard; empty when QEMU does not answer soon.
    pub(super) async fn run(&self, deadline: Duration) -> String {
        if let Ok(connection) = self.connection.try_lock()
            && connection.qmp.is_none()
            && connection.silent.is_some_and(|since| since.elapsed() < LOOK_AGAIN)
        {
            return String::new();
        }
        match tokio::time::timeout(deadline, self.qmp(deadline)).await {
            Ok(Ok(qmp)) => qmp.run(),
            _ => String::new(),
        }
    }

    /// As the driver reports it. One that does not answer is taken to run: that is what it was started for.
    pub(super) fn as_vm(&self, run: &str) -> Vm {
        let state = if run.is_empty() { VmState::Running } else { vm_state(run) };
        Vm { instance: self.instance().clone(), revision: self.revision(), state }
    }

    /// What a failure on the control connection means: a VMM that is gone is no VM.
    pub(super) async fn explain(&self, action: &'static str, cause: QmpError) -> DriverError {
        let instance = self.instance().clone();
        match cause {
            QmpError::Silent { waited, .. } => DriverError::Stuck { instance, action, waited },
            QmpError::Refused { reason, .. } => DriverError::Vmm { instance, reason },
            QmpError::Closed | QmpError::Io(_) => {
                // The socket closes a moment before the process is gone.
                let mut ended = self.ended.clone();
                let gone =
                    tokio::time::timeout(Duration::from_secs(1), ended.wait_for(Option::is_some)).await;
                match (gone, cause) {
                    (Ok(_), _) => DriverError::NoVm { instance, action },
                    (Err(_), QmpError::Io(cause)) => DriverError::Io { instance, action, cause },
                    (Err(_), cause) => DriverError::Vmm { instance, reason: cause.to_string() },
                }
            }
        }
    }
}

/// QEMU has many ways not to run.
pub(super) fn vm_state(run: &str) -> VmState {
    if run == "running" { VmState::Running } else { VmState::Paused }
}
