//! The balloon: a guest gives memory back before a pause, and has it again when it runs.
//!
//! What the guest names is unmapped by Firecracker in this VM alone: its template's file is mapped privately and stays as it is.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mvm_host::Host;
use mvm_proto::InstanceId;
use serde::Deserialize;
use tokio::time::Instant;

use super::http::{ApiClient, ApiError};
use super::request::{Balloon, Request};
use super::vmm::{Vmms, api_error, bad_request};
use crate::{DriverError, FirecrackerDriver};

const ACTION: &str = "take memory back from";

/// How often it is asked how far the guest is, and after how long without progress it is not waited for.
const ASK_EVERY: Duration = Duration::from_millis(10);
const STALLED: Duration = Duration::from_millis(500);

#[derive(Deserialize)]
struct Statistics {
    actual_mib: u64,
}

impl<H: Host> crate::Balloon for FirecrackerDriver<H> {
    fn reclaim<'a>(
        &'a self,
        instance: &'a InstanceId,
        keep_mib: u64,
        within: Duration,
    ) -> BoxFuture<'a, Result<Option<u64>, DriverError>> {
        Box::pin(self.vmms.inflate(instance, keep_mib, within))
    }
}

impl<H: Host> Vmms<H> {
    /// Has a running guest give memory back until it has `keep_mib`. Absent: it has no balloon, or no driver for it yet.
    async fn inflate(
        self: &Arc<Self>,
        instance: &InstanceId,
        keep_mib: u64,
        within: Duration,
    ) -> Result<Option<u64>, DriverError> {
        let (live, mut client, ..) = self.running(instance, ACTION).await?;
        let (all, limit) = (live.file.resources.mem_mib, self.settings.limits.call);
        let wanted = all.saturating_sub(keep_mib);
        if !self.resize(&mut client, instance, wanted).await? {
            return Ok(None);
        }
        let deadline = Instant::now() + within;
        let (mut given, mut progress) = (0, Instant::now());
        loop {
            let body = client.send(&Request::balloon_statistics(), limit).await;
            let body = body.map_err(|error| api_error(instance, ACTION, error))?;
            let found = serde_json::from_slice::<Statistics>(&body).map_or(given, |found| found.actual_mib);
            let now = Instant::now();
            if found > given {
                (given, progress) = (found, now);
            }
            if given >= wanted || now >= deadline || now - progress >= STALLED {
                return Ok(Some(all.saturating_sub(given)));
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
    }

    /// Lets a guest that runs have all of its memory again. Nothing is known of what an earlier agent asked it for.
    pub(super) async fn deflate(&self, client: &mut ApiClient, instance: &InstanceId) {
        if let Err(error) = self.resize(client, instance, 0).await {
            tracing::warn!(%instance, error = %mvm_proto::text::chain(&error), "could not give a guest its memory back");
        }
    }

    /// Whether it has a balloon that heard it: one that was started or saved without has none, and one whose guest has not
    /// come up yet holds nothing.
    async fn resize(
        &self,
        client: &mut ApiClient,
        instance: &InstanceId,
        amount_mib: u64,
    ) -> Result<bool, DriverError> {
        let call = Balloon::resize(amount_mib).map_err(|error| bad_request(instance, &error))?;
        match client.send(&call, self.settings.limits.call).await {
            Ok(_) => Ok(true),
            Err(ApiError::Refused { .. }) => Ok(false),
            Err(error) => Err(api_error(instance, ACTION, error)),
        }
    }
}
