//! Starts the program of a guest again.

use std::time::Duration;

use mvm_planner::{Action, RESTARTS_IN_PLACE, Workload};
use mvm_proto::{Phase, WorkloadState};
use tokio::time::Instant;

use super::guest::health_of;
use super::{Executor, StepError};
use crate::crash;
use crate::guest::LinkError;
use crate::instance::record::Record;
use crate::instance::records::Lease;

impl Executor {
    /// How long its program may take to be found healthy, beyond the time to boot.
    pub(super) fn health_within(record: &Record) -> Duration {
        record.health.as_ref().map_or(Duration::ZERO, |health| health.decided_within())
    }

    /// Counted before it is asked for: a program that ends its whole guest, or this agent, counts too.
    pub(super) async fn restart(
        &self,
        mut record: Record,
        grace: Duration,
        reason: &str,
    ) -> Result<(), StepError> {
        if record.phase != Phase::Running {
            return Err(Self::wrong_phase(&record, Action::Restart));
        }
        let now = self.clock.now();
        let down = Workload { state: WorkloadState::Failed, since: now, restarts: 0 };
        let before = record.workload.as_deref().copied().unwrap_or(down);
        record.workload = Some(Box::new(before.restarted(now)));
        record.retry_not_before = None;
        record.advance(Phase::Running, now, reason)?;
        self.records.save(&record).await?;
        crash::point("restart.counted");
        let deadline = Instant::now() + grace + self.boot_deadline + Self::health_within(&record);
        let asked = self.links.restart_workload(&record.id, grace, deadline).await;
        crash::point("restart.restarted");
        // The next pass sees whether it works; its uptime counts from here.
        let restarts = before.restarts.saturating_add(1);
        let since = self.clock.now();
        let workload = match &asked {
            Ok(_) => Workload { state: WorkloadState::Running, since, restarts },
            // It needs a new guest, which is what comes after the last restart in place.
            Err(LinkError::Lacks(_)) => {
                Workload { since, restarts: restarts.max(RESTARTS_IN_PLACE), ..before }
            }
            Err(_) => Workload { state: WorkloadState::Failed, since, restarts },
        };
        record.workload = Some(Box::new(workload));
        self.records.save(&record).await?;
        if let Err(error @ LinkError::Lacks(_)) = &asked {
            self.events.publish("GuestOutdated", record.full_name(), error.to_string());
        }
        asked.map(drop).map_err(Into::into)
    }

    /// Has a guest that runs check its program as its pool says by now.
    pub(crate) async fn follow_health(&self, lease: &Lease, record: Record) {
        let told = self.links.set_health(lease.id(), health_of(&record)).await;
        match told {
            Ok(()) => {}
            Err(error @ LinkError::Lacks(_)) if record.health.is_some() => {
                self.events.publish("GuestOutdated", record.full_name(), error.to_string());
            }
            Err(LinkError::Lacks(_)) => {}
            // It is told at the next look.
            Err(error) => return tracing::debug!(id = %lease.id(), %error, "could not set a health check"),
        }
        self.write_up(&record).await;
        self.links.look_again();
    }
}
