//! Measures the memory that instances use (PSS): seldom, because the kernel walks all pages for it.

use std::sync::Arc;

use mvm_proto::text::chain;
use mvm_proto::{InstanceId, Phase};
use mvm_vmm::Driver;

use super::Executor;
use crate::instance::records::Records;
use crate::isolation::Isolation;

impl Executor {
    /// Measures one instance after a step that changed its memory use, in the background.
    pub(super) fn measure_memory_after_step(&self, id: &InstanceId) {
        let lives = matches!(self.phase_of(id), Phase::Running | Phase::Warm);
        if lives && self.driver.kind().uses_host_resources() {
            let (isolation, records) = (Arc::clone(&self.isolation), Arc::clone(&self.records));
            let id = id.clone();
            tokio::spawn(async move { measure(&isolation, &records, vec![id]).await });
        }
    }

    /// Measures all that run: what is paused stays as it was measured when it was.
    pub(crate) async fn measure_memory(&self) {
        if !self.driver.kind().uses_host_resources() {
            return;
        }
        let mut running = Vec::new();
        self.records.for_each(|record, _| {
            if record.phase == Phase::Running {
                running.push(record.id.clone());
            }
        });
        if !running.is_empty() {
            measure(&self.isolation, &self.records, running).await;
        }
    }
}

async fn measure(isolation: &Isolation, records: &Records, instances: Vec<InstanceId>) {
    match isolation.memory_use(instances).await {
        Ok(found) => {
            for used in found {
                records.set_memory_used(&used.instance, used.bytes);
            }
        }
        Err(error) => {
            tracing::warn!(error = %chain(&error), "could not measure what instances cost in memory");
        }
    }
}
