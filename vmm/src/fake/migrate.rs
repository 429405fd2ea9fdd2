//! Migrates fake instances: their one file holds their state.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};

use futures::future::BoxFuture;
use mvm_proto::InstanceId;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::FakeDriver;
use super::world::{Entry, FakeVm};
use crate::encoding::Encoding;
use crate::error::same_revision;
use crate::{DriverError, Migration, Part, SnapshotOptions, SnapshotRef, VmSpec};

const MEMORY: &str = "snapshot/memory.json";

#[derive(Serialize, Deserialize)]
struct Exported {
    snapshot: SnapshotRef,
    asleep: FakeVm,
    encoding: Encoding,
    console: String,
}

fn io(instance: &InstanceId, action: &'static str, cause: impl Into<std::io::Error>) -> DriverError {
    DriverError::Io { instance: instance.clone(), action, cause: cause.into() }
}

fn unusable(instance: &InstanceId, reason: &str) -> DriverError {
    DriverError::Unusable { instance: instance.clone(), reason: reason.to_owned() }
}

impl Migration for FakeDriver {
    fn export<'a>(&'a self, snapshot: &'a SnapshotRef) -> BoxFuture<'a, Result<Vec<Part>, DriverError>> {
        Box::pin(self.export_state(snapshot))
    }

    fn begin_import<'a>(&'a self, instance: &'a InstanceId) -> BoxFuture<'a, Result<(), DriverError>> {
        // Something is there from here on, as a directory would be.
        let arriving = Entry { console: "arriving\n".to_owned(), ..Entry::default() };
        Box::pin(self.change(instance, "begin to import", |entry, _| {
            *entry = arriving;
            Ok(())
        }))
    }

    fn import_part<'a>(
        &'a self,
        instance: &'a InstanceId,
        name: &'a str,
    ) -> BoxFuture<'a, Result<File, DriverError>> {
        Box::pin(std::future::ready(self.create_part(instance, name)))
    }

    fn import<'a>(
        &'a self,
        spec: &'a VmSpec,
        exported: &'a SnapshotRef,
        options: &'a SnapshotOptions,
    ) -> BoxFuture<'a, Result<SnapshotRef, DriverError>> {
        Box::pin(self.import_state(spec, exported, options))
    }
}

impl FakeDriver {
    async fn export_state(&self, wanted: &SnapshotRef) -> Result<Vec<Part>, DriverError> {
        const ACTION: &str = "export";
        let instance = &wanted.instance;
        let fault = self.faults.of(ACTION, instance, None);
        self.faults.before(fault, ACTION, instance).await?;
        let entry = self.host.world().get(instance).unwrap_or_default();
        let saved = entry.snapshot.filter(|snapshot| snapshot == wanted).zip(entry.asleep);
        let Some((snapshot, asleep)) = saved else {
            return Err(DriverError::NoSnapshot { instance: instance.clone(), digest: wanted.digest });
        };
        let state = Exported { snapshot, asleep, encoding: entry.encoding, console: entry.console };
        let text = serde_json::to_vec(&state).map_err(|cause| io(instance, ACTION, cause))?;
        let mut file = File::from(
            memfd_create("mvm-fake", MemfdFlags::CLOEXEC).map_err(|cause| io(instance, ACTION, cause))?,
        );
        file.write_all(&text).map_err(|cause| io(instance, ACTION, cause))?;
        Ok(vec![Part { name: MEMORY.to_owned(), file }])
    }

    fn create_part(&self, instance: &InstanceId, name: &str) -> Result<File, DriverError> {
        const ACTION: &str = "import";
        if name != MEMORY {
            return Err(unusable(instance, &format!("{name:?} is no file of a snapshot")));
        }
        let file = File::from(
            memfd_create("mvm-fake", MemfdFlags::CLOEXEC).map_err(|cause| io(instance, ACTION, cause))?,
        );
        let kept = file.try_clone().map_err(|cause| io(instance, ACTION, cause))?;
        self.incoming().insert(instance.clone(), kept);
        Ok(file)
    }

    async fn import_state(
        &self,
        spec: &VmSpec,
        exported: &SnapshotRef,
        options: &SnapshotOptions,
    ) -> Result<SnapshotRef, DriverError> {
        const ACTION: &str = "import";
        let instance = &spec.instance;
        let file = self.incoming().remove(instance);
        let Some(mut file) = file else { return Err(unusable(instance, "nothing of it came")) };
        let mut text = Vec::new();
        let read = file.rewind().and_then(|()| file.read_to_end(&mut text));
        read.map_err(|cause| io(instance, ACTION, cause))?;
        let state: Exported =
            serde_json::from_slice(&text).map_err(|error| unusable(instance, &error.to_string()))?;
        if state.snapshot != *exported {
            return Err(unusable(instance, "it is not the snapshot that its record names"));
        }
        same_revision(instance, state.snapshot.revision, spec.revision)?;
        if let Some(reason) = options.refuses(&state.encoding) {
            return Err(unusable(instance, &reason));
        }
        let opened = options.key_to_restore(&state.encoding, instance, spec.revision);
        opened.map_err(|cause| DriverError::Key { instance: instance.clone(), action: ACTION, cause })?;
        self.change(instance, ACTION, |entry, _| {
            entry.snapshot = Some(state.snapshot.clone());
            entry.asleep = Some(state.asleep);
            entry.encoding = state.encoding;
            entry.console = state.console + "arrived\n";
            Ok(state.snapshot)
        })
        .await
    }
}
