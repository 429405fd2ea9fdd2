//! Resolves what an earlier agent began and did not finish, before the first pass.
//!
//! The VM and the snapshot are the evidence, the intent says how to read it. Nothing is started here and nothing
//! that runs is ended. What a guest is needed for - a boot or a wake whose guest may not know who it is yet, a
//! guest that was asked to end - keeps its intent and is named in [`Recovered::unfinished`]: it is finished by
//! [`Executor::finish`](super::Executor::finish) while everything else goes on.

use std::sync::Arc;

use mvm_planner::Action;
use mvm_proto::text::chain;
use mvm_proto::{InstanceId, Phase, Timestamp};
use mvm_vmm::{AnyDriver, Driver, VmState};

use super::StepError;
use crate::crash;
use crate::instance::record::Record;
use crate::instance::records::Records;
use crate::instance::template::TemplateState;

/// What was found at start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovered {
    /// How many records were brought in line with what is.
    pub resolved: usize,
    /// Whose intent is still open.
    pub unfinished: Vec<InstanceId>,
    /// Those that could not be looked at: their VMM does not answer, or their record could not be written.
    pub unresolved: Vec<InstanceId>,
}

/// What to do about one record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// It is in this phase.
    Is(Phase),
    /// It is in this phase, and a snapshot that it has is older than its memory.
    IsWithoutSnapshot(Phase),
    /// Its memory is in its snapshot: the VM that was written to it goes.
    SleepsBeside,
    /// Its end was begun: finish it.
    Ends,
    /// What was begun is finished once its guest can be spoken to.
    Unfinished,
    Nothing,
}

/// Whether recovery may act on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    Act,
    /// Only the records are updated: for a command that must change nothing.
    ReadOnly,
}

/// What came of one record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resolved {
    /// There was nothing to do.
    Nothing,
    /// It was brought in line with what is.
    Done,
    /// Its guest is needed for what was begun.
    Unfinished,
}

/// Adopts what lives and resolves every open intent that needs no guest. One instance that can't be looked at stops no
/// other: it is named, and looked at again.
pub async fn recover(
    driver: &AnyDriver,
    records: &Arc<Records>,
    mode: Recovery,
    now: Timestamp,
) -> Recovered {
    let mut recovered = Recovered::default();
    if mode == Recovery::Act {
        end_begun_templates(driver, records).await;
    }
    for record in records.all() {
        let id = record.id.clone();
        match recover_one(driver, records, mode, now, record).await {
            Ok(Resolved::Nothing) => {}
            Ok(Resolved::Done) => recovered.resolved += 1,
            Ok(Resolved::Unfinished) => recovered.unfinished.push(id),
            Err(error) => {
                tracing::warn!(%id, error = %chain(&error), "could not inspect an instance");
                recovered.unresolved.push(id);
            }
        }
    }
    recovered
}

/// A template that an earlier agent was making has a VM in the bounds of an instance: it is made anew when one is
/// needed. One that can't be ended now is ended then.
async fn end_begun_templates(driver: &AnyDriver, records: &Arc<Records>) {
    for template in records.templates() {
        if template.state != TemplateState::Begun {
            continue;
        }
        let ended = async {
            driver.remove(&template.id).await?;
            crash::point("template.dropped");
            Ok::<_, StepError>(records.delete_template(&template.tenant, &template.pool).await?)
        };
        if let Err(error) = ended.await {
            tracing::warn!(id = %template.id, error = %chain(&error), "could not end a template");
        }
    }
}

/// The same for one record.
pub(crate) async fn recover_one(
    driver: &AnyDriver,
    records: &Arc<Records>,
    mode: Recovery,
    now: Timestamp,
    mut record: Record,
) -> Result<Resolved, StepError> {
    let vm = driver.adopt(&record.id).await?;
    let same_revision = vm.as_ref().is_none_or(|vm| vm.revision == record.revision);
    let verdict = judge(&record, vm.as_ref().map(|vm| vm.state), same_revision);
    let reason = match record.intent {
        Some(intent) => format!("recovered after the agent ended during {}", intent.action),
        None => "adopted".to_owned(),
    };
    match verdict {
        Verdict::Nothing => {
            // One that was given up, by an agent that ended before it could discard it.
            if record.snapshot.is_none() && mode == Recovery::Act {
                driver.discard_snapshot(&record.id).await?;
            }
            return Ok(Resolved::Nothing);
        }
        Verdict::Unfinished => return Ok(Resolved::Unfinished),
        Verdict::Ends => {
            if mode == Recovery::Act {
                driver.remove(&record.id).await?;
                crash::point("recover.removed");
            }
            records.delete(&record.id).await?;
            return Ok(Resolved::Done);
        }
        Verdict::Is(phase) => record.correct(phase, now, &reason),
        Verdict::IsWithoutSnapshot(phase) => {
            record.snapshot = None;
            record.correct(phase, now, &reason);
        }
        Verdict::SleepsBeside => record.correct(Phase::Sleeping, now, &reason),
    }
    if let Some(vm) = &vm {
        record.revision = vm.revision;
    }
    record.intent = None;
    // Durable before the effect: a snapshot given up here is never restored after another crash.
    records.save(&record).await?;
    crash::point("recover.saved");
    match verdict {
        _ if mode == Recovery::ReadOnly => {}
        Verdict::SleepsBeside => driver.kill(&record.id).await?,
        Verdict::IsWithoutSnapshot(_) => driver.discard_snapshot(&record.id).await?,
        _ => {}
    }
    crash::point("recover.done");
    Ok(Resolved::Done)
}

fn judge(record: &Record, vm: Option<VmState>, same_revision: bool) -> Verdict {
    let alive = vm.map(|state| if state == VmState::Running { Phase::Running } else { Phase::Warm });
    let action = record.intent.map(|intent| intent.action);
    match (alive, action) {
        (_, Some(Action::Destroy)) => Verdict::Ends,
        // A boot or a wake that was cut off: its guest may not know yet who it is. An end: it may be on its way.
        (Some(_), Some(Action::Create | Action::Start | Action::Replace | Action::Wake | Action::Stop)) => {
            Verdict::Unfinished
        }
        // Written whole and not run since: only the end of the VM was missing, or it was being woken and has not run yet.
        (Some(_), None) if record.is_asleep() => Verdict::SleepsBeside,
        // A sleep that was cut off before its snapshot was recorded: it is as warm as before.
        (Some(phase), Some(_)) => Verdict::IsWithoutSnapshot(phase),
        (Some(phase), None) if record.phase != phase || !same_revision => Verdict::IsWithoutSnapshot(phase),
        (Some(_), None) => Verdict::Nothing,
        (None, Some(_)) if record.snapshot.is_some() && record.phase == Phase::Sleeping => {
            Verdict::Is(Phase::Sleeping)
        }
        (None, Some(Action::Create)) => Verdict::Is(Phase::Created),
        // It is what it was before the start, which nothing came of.
        (None, Some(Action::Start)) if record.phase != Phase::Sleeping => Verdict::Is(record.phase),
        (None, Some(_)) => Verdict::IsWithoutSnapshot(Phase::Stopped),
        // A VM that ended while no agent looked is a failure, which the first look says.
        (None, None) => Verdict::Nothing,
    }
}
