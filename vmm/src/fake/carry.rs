//! Fake VMs on their way to another node: their one file is what they remember.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};

use mvm_proto::InstanceId;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::super::at_rest::Form;
use super::super::{DriverError, Keeping, Part, SnapshotRef, VmSpec};
use super::world::{Entry, FakeVm};
use super::{FakeDriver, same_revision};

const MEMORY: &str = "snapshot/memory.json";

#[derive(Serialize, Deserialize)]
struct Carried {
    snapshot: SnapshotRef,
    asleep: FakeVm,
    form: Form,
    console: String,
}

fn io(instance: &InstanceId, action: &'static str, cause: impl Into<std::io::Error>) -> DriverError {
    DriverError::Io { instance: instance.clone(), action, cause: cause.into() }
}

fn unusable(instance: &InstanceId, reason: &str) -> DriverError {
    DriverError::Unusable { instance: instance.clone(), reason: reason.to_owned() }
}

impl FakeDriver {
    pub(super) async fn carry_out(&self, wanted: &SnapshotRef) -> Result<Vec<Part>, DriverError> {
        const ACTION: &str = "export";
        let instance = &wanted.instance;
        let fault = self.faults.of(ACTION, instance, None);
        self.faults.before(fault, ACTION, instance).await?;
        let entry = self.host.world().get(instance).unwrap_or_default();
        let saved = entry.snapshot.filter(|snapshot| snapshot == wanted).zip(entry.asleep);
        let Some((snapshot, asleep)) = saved else {
            return Err(DriverError::NoSnapshot { instance: instance.clone(), digest: wanted.digest });
        };
        let carried = Carried { snapshot, asleep, form: entry.form, console: entry.console };
        let text = serde_json::to_vec(&carried).map_err(|cause| io(instance, ACTION, cause))?;
        let mut file = File::from(
            memfd_create("mvm-fake", MemfdFlags::CLOEXEC).map_err(|cause| io(instance, ACTION, cause))?,
        );
        file.write_all(&text).map_err(|cause| io(instance, ACTION, cause))?;
        Ok(vec![Part { name: MEMORY.to_owned(), file }])
    }

    pub(super) async fn make_room(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.change(instance, "begin to import", |entry, _| {
            // Something is there from here on, as a directory would be.
            *entry = Entry { console: "arriving\n".to_owned(), ..Entry::default() };
            Ok(())
        })
        .await
    }

    pub(super) fn incoming_part(&self, instance: &InstanceId, name: &str) -> Result<File, DriverError> {
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

    pub(super) async fn carry_in(
        &self,
        spec: &VmSpec,
        exported: &SnapshotRef,
        keeping: &Keeping,
    ) -> Result<SnapshotRef, DriverError> {
        const ACTION: &str = "import";
        let instance = &spec.instance;
        let file = self.incoming().remove(instance);
        let Some(mut file) = file else { return Err(unusable(instance, "nothing of it came")) };
        let mut text = Vec::new();
        let read = file.rewind().and_then(|()| file.read_to_end(&mut text));
        read.map_err(|cause| io(instance, ACTION, cause))?;
        let carried: Carried =
            serde_json::from_slice(&text).map_err(|error| unusable(instance, &error.to_string()))?;
        if carried.snapshot != *exported {
            return Err(unusable(instance, "it is not the snapshot that its record names"));
        }
        same_revision(instance, carried.snapshot.revision, spec.revision)?;
        if let Some(reason) = keeping.refuses(&carried.form) {
            return Err(unusable(instance, &reason));
        }
        let opened = keeping.lock_to_open(&carried.form, instance, spec.revision);
        opened.map_err(|cause| DriverError::Key { instance: instance.clone(), action: ACTION, cause })?;
        self.change(instance, ACTION, |entry, _| {
            entry.snapshot = Some(carried.snapshot.clone());
            entry.asleep = Some(carried.asleep);
            entry.form = carried.form;
            entry.console = carried.console + "arrived\n";
            Ok(carried.snapshot)
        })
        .await
    }
}
