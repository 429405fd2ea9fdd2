//! Starts an instance's VM as a fork of its pool's template; the first start of a revision makes the template.
//!
//! A template boots within the limits of the instance that is about to start, which has no VM yet, so it needs no room of its
//! own; it ends before the instance starts. If a template can't be made, the instance boots instead, and an event says why.

use std::time::Duration;

use mvm_image::BootImage;
use mvm_proto::text::chain;
use mvm_proto::{PoolId, TenantId};
use mvm_vmm::{Bounds, Driver, DriverError, Purpose, SnapshotOptions, SnapshotRef, VmSpec};
use tokio::time::Instant;

use super::guest::workload_of;
use super::{Executor, StepError};
use crate::crash;
use crate::instance::record::Record;
use crate::instance::template::{Template, TemplateState};

/// How long a revision that nothing could be forked from is booted before another try.
const TRY_AGAIN: Duration = Duration::from_secs(600);

impl Executor {
    /// A VM for the instance: the one that it has, a fork, or one that boots. Paused or running. Whether it is a fork.
    pub(super) async fn begin_vm(
        &self,
        record: &Record,
        image: BootImage,
        bounds: Bounds,
    ) -> Result<bool, StepError> {
        let spec = record.spec(image, bounds);
        if let Ok(forks) = self.driver.forks()
            && self.driver.adopt(&record.id).await?.is_none()
            && let Some(template) = self.template_for(record, &spec).await?
        {
            match forks.fork(&spec, &template).await {
                Err(error @ (DriverError::Unusable { .. } | DriverError::NoSnapshot { .. })) => {
                    let message = format!("the pool's template is rebuilt: {}", chain(&error));
                    self.events.publish("TemplateUnusable", record.full_name(), message);
                    self.drop_template(&record.tenant, &record.pool).await?;
                }
                forked => return Ok(forked.map(|()| true)?),
            }
        }
        self.driver.boot(&spec).await?;
        Ok(false)
    }

    /// The template that the instance is to be forked from, made if there is none yet. None: it boots.
    async fn template_for(&self, record: &Record, spec: &VmSpec) -> Result<Option<SnapshotRef>, StepError> {
        let (tenant, pool) = (&record.tenant, &record.pool);
        let _turn = self.records.template_turn(tenant, pool).await;
        if let Some(found) = self.records.template(tenant, pool) {
            match &found.state {
                TemplateState::Ready { snapshot } if found.fits(record) => {
                    return Ok(Some(snapshot.clone()));
                }
                TemplateState::Unsuitable { until, .. }
                    if found.fits(record) && *until > self.clock.now() =>
                {
                    return Ok(None);
                }
                _ => self.drop_template_files(&found).await?,
            }
        }
        let mut template = Template {
            tenant: tenant.clone(),
            pool: pool.clone(),
            id: self.records.template_id()?,
            revision: record.revision,
            image: record.image,
            resources: record.resources,
            connected: record.net.is_some(),
            state: TemplateState::Begun,
        };
        self.records.save_template(&template).await?;
        crash::point("template.intended");
        let made = self.make_template(record, &template, spec).await;
        self.links.forget(&template.id);
        match made {
            Ok(snapshot) => {
                template.state = TemplateState::Ready { snapshot: snapshot.clone() };
                self.records.save_template(&template).await?;
                crash::point("template.recorded");
                Ok(Some(snapshot))
            }
            Err(error) => {
                let reason = chain(&error);
                self.events.publish(
                    "TemplateFailed",
                    record.full_name(),
                    format!("the pool's instances boot without a template: {reason}"),
                );
                self.driver.remove(&template.id).await?;
                let until = self.clock.now() + TRY_AGAIN;
                template.state = TemplateState::Unsuitable { reason, until };
                self.records.save_template(&template).await?;
                Ok(None)
            }
        }
    }

    /// Boots a guest, tells it nothing but what its pool runs in place of its image's workload, runs the pool's warm-up in it if there is one, saves it and ends it.
    async fn make_template(
        &self,
        record: &Record,
        template: &Template,
        spec: &VmSpec,
    ) -> Result<SnapshotRef, StepError> {
        let id = &template.id;
        let spec = VmSpec { instance: id.clone(), purpose: Purpose::Template, ..spec.clone() };
        let mut exits = self.driver.exits();
        self.driver.boot(&spec).await?;
        crash::point("template.booted");
        self.links.open(id);
        let deadline = Instant::now() + self.boot_deadline;
        let view = tokio::select! {
            greeted = self.links.greeted(id, deadline) => greeted?,
            detail = self.ended(&mut exits, id) => return Err(StepError::Died(detail)),
        };
        if view.version < 2 {
            return Err(StepError::NoRebirth);
        }
        // What is run in it gets the variables of the pool, as it does in every fork.
        if let Some(workload) = &record.workload_override {
            self.links.set_workload(id, workload_of(workload)).await?;
        }
        if let Some(warmup) = &record.warmup {
            tokio::select! {
                warmed = self.warm_up(id, warmup) => warmed?,
                detail = self.ended(&mut exits, id) => return Err(StepError::Died(detail)),
            }
        }
        tokio::select! {
            () = self.settle(id) => {}
            detail = self.ended(&mut exits, id) => return Err(StepError::Died(detail)),
        }
        crash::point("template.greeted");
        self.driver.pause(id).await?;
        // Only now: a guest that has seen its agent go begins anew with the next one, which takes a fork longer.
        self.links.forget(id);
        // It is no one's yet, and every fork maps it: as it is.
        let snapshot = self.driver.snapshot(id, &SnapshotOptions::plain()).await?;
        crash::point("template.saved");
        self.driver.kill(id).await?;
        crash::point("template.ended");
        let took = "the pool's instances are forked from now on";
        self.events.publish("TemplateMade", record.full_name(), took);
        Ok(snapshot)
    }

    /// Forgets a pool's template and removes what there is of it. Its forks go on.
    pub(crate) async fn drop_template(&self, tenant: &TenantId, pool: &PoolId) -> Result<(), StepError> {
        let _turn = self.records.template_turn(tenant, pool).await;
        match self.records.template(tenant, pool) {
            Some(template) => self.drop_template_files(&template).await,
            None => Ok(()),
        }
    }

    /// For the holder of the pool's turn.
    async fn drop_template_files(&self, template: &Template) -> Result<(), StepError> {
        self.driver.remove(&template.id).await?;
        crash::point("template.dropped");
        Ok(self.records.delete_template(&template.tenant, &template.pool).await?)
    }
}
