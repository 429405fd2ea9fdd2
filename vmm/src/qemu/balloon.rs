//! The balloon: a guest gives memory back before a pause, and has it again when it runs.
//!
//! The guest's kernel takes pages that it has no use for and names them; QEMU lets them go. Whatever the guest then reads
//! there is not what it wrote: it is zero, or what its template had in that place.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mvm_host::Host;
use mvm_proto::InstanceId;
use mvm_proto::text::chain;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::QemuDriver;
use super::live::{Live, Short};
use super::qmp::{Qmp, QmpError};
use crate::{Balloon, DriverError};

const ACTION: &str = "take memory back from";

/// How often it is asked how far the guest is, and after how long without progress it is not waited for.
const ASK_EVERY: Duration = Duration::from_millis(5);
const STALLED: Duration = Duration::from_millis(250);

const MIB: u64 = 1 << 20;

impl<H: Host> Balloon for QemuDriver<H> {
    fn reclaim<'a>(
        &'a self,
        instance: &'a InstanceId,
        keep_mib: u64,
        within: Duration,
    ) -> BoxFuture<'a, Result<Option<u64>, DriverError>> {
        Box::pin(self.inflate(instance, keep_mib, within))
    }
}

impl<H: Host> QemuDriver<H> {
    async fn inflate(
        &self,
        instance: &InstanceId,
        keep_mib: u64,
        within: Duration,
    ) -> Result<Option<u64>, DriverError> {
        let live = self.living(instance, ACTION).await?;
        if !live.has_balloon() {
            return Ok(None);
        }
        live.set_short(Short::Yes);
        let shrunk = async {
            let qmp = live.qmp(self.answer_within()).await?;
            shrink(&qmp, keep_mib * MIB, within, self.answer_within()).await
        };
        match shrunk.await {
            Ok(left) => Ok(Some(left / MIB)),
            Err(cause) => Err(live.explain(ACTION, cause).await),
        }
    }

    /// Lets a guest that runs have all of its memory again, if it may be short of some. Does not wait for it.
    pub(super) fn give_back(&self, live: &Arc<Live>) {
        if !live.has_balloon() || live.set_short(Short::No) == Short::No {
            return;
        }
        let (live, within) = (Arc::clone(live), self.answer_within());
        tokio::spawn(async move {
            let all = live.record.as_ref().map_or(0, |record| record.spec.resources.mem_mib * MIB);
            let given = async {
                let qmp = live.qmp(within).await?;
                qmp.command("balloon", json!({ "value": all }), within).await
            };
            if let Err(error) = given.await
                && !live.has_ended()
            {
                // The next look tries again.
                live.set_short(Short::Unknown);
                tracing::warn!(id = %live.instance(), error = %chain(&error), "could not give a guest its memory back");
            }
        });
    }
}

/// What is left to the guest, in bytes, once it has given back all that was asked for, or stopped doing so.
async fn shrink(qmp: &Qmp, keep: u64, within: Duration, answer_within: Duration) -> Result<u64, QmpError> {
    let deadline = Instant::now() + within;
    qmp.command("balloon", json!({ "value": keep }), answer_within).await?;
    let (mut left, mut progress) = (u64::MAX, Instant::now());
    loop {
        let answer = qmp.command("query-balloon", Value::Null, answer_within).await?;
        let has = answer["actual"].as_u64().unwrap_or(left);
        let now = Instant::now();
        if has < left {
            (left, progress) = (has, now);
        }
        if left <= keep || now >= deadline || now - progress >= STALLED {
            return Ok(left);
        }
        tokio::time::sleep(ASK_EVERY).await;
    }
}
