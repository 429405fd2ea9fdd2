//! `mvm rollout`: how far a pool's revision is, its history, and going on, back or nowhere with it.

use std::time::SystemTime;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use mvm_client::{ApplyOptions, CallError, Name, Objects};
use mvm_proto::Timestamp;
use mvm_proto::object::{
    CAUSE_ANNOTATION, Object, PoolExplanation, PoolObjectStatus, PoolRevision, PoolSpec, RESUMED_ANNOTATION,
    RolloutDetail, RolloutPhase,
};
use serde_json::{Value, json};

use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::{ATTEMPTS, ObjectArgs, editable, failed, is_stale, tell, within};
use crate::output::{self, Table};

const EXAMPLES: &str = "\
Examples:
  mvm rollout status pool/acme/workers -w --timeout 10m
  mvm rollout history pool/acme/workers --revision 3
  mvm rollout undo pool/acme/workers
  mvm rollout pause pool/acme/workers";

/// A variable of the workload that is there to make another revision of it.
const RESTARTED_AT: &str = "MVM_RESTARTED_AT";

#[derive(Debug, Subcommand)]
#[command(after_help = EXAMPLES)]
pub(crate) enum RolloutCommand {
    /// How far the rollout of a pool's revision is, node by node
    #[command(after_help = "\
Exit code 1: the rollout failed or went back. With -w, 3: --timeout (30s unless said otherwise) was over first.")]
    Status(StatusArgs),
    /// The revisions of a pool that can be gone back to
    History(HistoryArgs),
    /// Go back to an earlier revision: the one before, unless another is named
    Undo(UndoArgs),
    /// Leave a rollout where it is
    Pause(PoolArgs),
    /// Go on with a rollout that was paused, or that paused itself because new instances failed
    Resume(PoolArgs),
    /// Replace all instances, as a new revision does
    Restart(PoolArgs),
}

#[derive(Debug, Args)]
pub(crate) struct PoolArgs {
    /// A pool: pool/TENANT/NAME, or pool TENANT/NAME
    #[arg(required = true, num_args = 1..=2, value_name = "POOL")]
    pool: Vec<String>,
    #[command(flatten)]
    object: ObjectArgs,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Tell of every change until the rollout is done, or has failed
    #[arg(short, long)]
    watch: bool,
    #[command(flatten)]
    pool: PoolArgs,
}

#[derive(Debug, Args)]
pub(crate) struct HistoryArgs {
    /// All of one revision
    #[arg(long, value_name = "N")]
    revision: Option<u64>,
    #[command(flatten)]
    pool: PoolArgs,
}

#[derive(Debug, Args)]
pub(crate) struct UndoArgs {
    /// The revision to go back to
    #[arg(long, value_name = "N")]
    to_revision: Option<u64>,
    #[command(flatten)]
    pool: PoolArgs,
}

impl PoolArgs {
    fn name(&self) -> Result<Name, Outcome> {
        match self.object.names(&self.pool)?.as_slice() {
            [name] if name.kind.name == "Pool" => Ok(name.clone()),
            _ => Err(Outcome::Usage(anyhow!("name one pool: pool/TENANT/NAME"))),
        }
    }
}

pub(crate) async fn run(global: &Global, command: RolloutCommand) -> Run {
    match command {
        RolloutCommand::Status(args) => status(global, args).await,
        RolloutCommand::History(args) => history(global, args).await,
        RolloutCommand::Undo(args) => undo(global, args).await,
        RolloutCommand::Pause(args) => set_paused(global, &args, true).await,
        RolloutCommand::Resume(args) => set_paused(global, &args, false).await,
        RolloutCommand::Restart(args) => restart(global, &args).await,
    }
}

async fn explained(global: &Global, objects: &mut Objects, name: &Name) -> Result<RolloutDetail, Outcome> {
    let PoolExplanation { rollout, .. } = within(global.timeout(), objects.explain(name)).await?;
    rollout.ok_or_else(|| Outcome::Failed(anyhow!("the coordinator tells of no rollout of {name}")))
}

async fn status(global: &Global, args: StatusArgs) -> Run {
    let name = args.pool.name()?;
    let mut objects = args.pool.object.open(global).await?;
    if args.watch {
        watch(global, &objects, &name).await?;
    }
    let detail = explained(global, &mut objects, &name).await?;
    output::show_all(global.output, &detail, |_| status_tables(&detail))?;
    concluded(&name, detail.status.phase, &detail.message)
}

/// What a rollout's end means for the command.
fn concluded(name: &Name, phase: RolloutPhase, message: &str) -> Run {
    match phase {
        RolloutPhase::Failed | RolloutPhase::RollingBack | RolloutPhase::RolledBack => {
            Err(Outcome::Failed(anyhow!("{name}: {message}")))
        }
        RolloutPhase::Done | RolloutPhase::Progressing | RolloutPhase::Paused => Ok(()),
    }
}

/// Until the rollout of what is declared now is over.
async fn watch(global: &Global, objects: &Objects, name: &Name) -> Run {
    let mut last = String::new();
    let waiting = objects.wait_for(name, |object| {
        let Some(object) = object else { return true };
        let (line, is_over) = line(object);
        if line != last {
            // A reader that went away ends the command when it shows what it found.
            let _ = tell(global.output, name, &line);
            last = line;
        }
        is_over
    });
    match tokio::time::timeout(global.timeout(), waiting).await {
        Ok(Ok(Some(_))) => Ok(()),
        Ok(Ok(None)) => Err(Outcome::Failed(anyhow!("there is no {name}"))),
        Ok(Err(error)) => Err(failed(error)),
        Err(_) => {
            let limit = humantime::format_duration(global.timeout());
            Err(Outcome::TimedOut(anyhow!("gave up on {name} after {limit}: {last}")))
        }
    }
}

/// What a pool's status says of its rollout, and whether that is over.
fn line(object: &Object) -> (String, bool) {
    let status: PoolObjectStatus = object.status().unwrap_or_default();
    let conditions = object.conditions();
    let told = conditions.iter().find(|condition| condition.r#type == "RolledOut");
    let (Some(rollout), Some(told)) = (status.rollout, told) else {
        return ("nothing is told of its rollout yet".to_owned(), false);
    };
    let is_newest = status.observed.observed_generation >= object.metadata.generation;
    let goes_on =
        matches!(rollout.phase, RolloutPhase::Progressing | RolloutPhase::RollingBack | RolloutPhase::Paused);
    (told.message.clone(), is_newest && !goes_on)
}

fn status_tables(detail: &RolloutDetail) -> Vec<Table> {
    let status = &detail.status;
    let rows = vec![
        ("phase", status.phase.as_str().to_owned()),
        ("revision", status.revision.to_string()),
        ("rolled out before", status.settled.to_string()),
        ("nodes done", format!("{}/{}", status.nodes_done, status.nodes)),
        ("updated", status.updated.to_string()),
        ("serving", status.serving.to_string()),
        ("told", output::or_dash(&detail.message)),
    ];
    let mut nodes = output::table(["NODE", "REVISION", "STATE", "WAITS FOR"]);
    for node in &detail.nodes {
        let revision = node.revision.map_or_else(|| "-".to_owned(), |number| number.to_string());
        nodes.add_row([node.node.to_string(), revision, node.state.clone(), output::or_dash(&node.reason)]);
    }
    vec![output::properties(rows), nodes]
}

async fn history(global: &Global, args: HistoryArgs) -> Run {
    let name = args.pool.name()?;
    let mut objects = args.pool.object.open(global).await?;
    let detail = explained(global, &mut objects, &name).await?;
    let Some(number) = args.revision else {
        return Ok(output::show_all(global.output, &detail.history, |_| {
            vec![history_table(&detail.history)]
        })?);
    };
    let revision = find(&name, &detail.history, number)?;
    Ok(output::show_all(global.output, revision, |_| vec![revision_table(revision)])?)
}

fn history_table(history: &[PoolRevision]) -> Table {
    let mut table = output::table(["REVISION", "DECLARED", "IMAGE", "SECRETS", "CAUSE"]);
    for one in history {
        let names: Vec<_> = one.template.secrets.iter().map(String::as_str).collect();
        let changed = if one.values_changed { " (other values)" } else { "" };
        table.add_row([
            one.number.to_string(),
            one.created_at.clone(),
            one.template.image.r#ref.clone(),
            output::or_dash(&format!("{}{changed}", names.join(", "))),
            output::or_dash(&one.cause),
        ]);
    }
    table
}

fn revision_table(revision: &PoolRevision) -> Table {
    let mut table = output::table(["FIELD", "VALUE"]);
    let template = serde_json::to_value(&revision.template).unwrap_or_default();
    for (field, value) in template.as_object().into_iter().flatten() {
        table.add_row([field.clone(), value.to_string()]);
    }
    table
}

fn find<'a>(name: &Name, history: &'a [PoolRevision], number: u64) -> Result<&'a PoolRevision, Outcome> {
    let known = || history.iter().map(|one| one.number.to_string()).collect::<Vec<_>>().join(", ");
    history.iter().find(|one| one.number == number).ok_or_else(|| {
        Outcome::Failed(anyhow!("{name} has no revision {number} to go back to; there are {}", known()))
    })
}

async fn undo(global: &Global, args: UndoArgs) -> Run {
    let name = args.pool.name()?;
    let mut objects = args.pool.object.open(global).await?;
    let detail = explained(global, &mut objects, &name).await?;
    let number = args.to_revision.or_else(|| one_before(&detail));
    let number = number
        .ok_or_else(|| Outcome::Failed(anyhow!("{name} has no revision before this one to go back to")))?;
    let revision = find(&name, &detail.history, number)?;
    if number != detail.status.revision && differs_in_values_alone(&detail, revision) {
        return Err(Outcome::Failed(anyhow!(
            "revision {number} of {name} differs from the newest in the values of its Secrets alone, and values of before are not \
             kept: set them with `mvm secret set`"
        )));
    }
    let change = |object: &mut Value| {
        let spec: PoolSpec = serde_json::from_value(object["spec"].clone()).ok()?;
        object["spec"] = serde_json::to_value(revision.template.put_into(&spec)).ok()?;
        object["metadata"]["annotations"][CAUSE_ANNOTATION] = json!(format!("undo to revision {number}"));
        Some(())
    };
    changed(global, &mut objects, &name, change, &format!("goes back to revision {number}")).await
}

/// Of what failed or is being rolled out, the one that was everywhere before; else the one before the newest. One that differs in
/// values alone is no way back.
fn one_before(detail: &RolloutDetail) -> Option<u64> {
    let RolloutDetail { status, history, .. } = detail;
    let others = history.iter().filter(|one| !differs_in_values_alone(detail, one));
    let others: Vec<u64> = others.map(|one| one.number).filter(|number| *number != status.revision).collect();
    let settled = others.contains(&status.settled).then_some(status.settled);
    settled.or(others.into_iter().max())
}

fn differs_in_values_alone(detail: &RolloutDetail, revision: &PoolRevision) -> bool {
    let newest = detail.history.iter().find(|one| one.number == detail.status.revision);
    newest.is_some_and(|newest| newest.number != revision.number && newest.template == revision.template)
}

async fn set_paused(global: &Global, args: &PoolArgs, paused: bool) -> Run {
    let name = args.name()?;
    let mut objects = args.object.open(global).await?;
    let now = Timestamp::from(SystemTime::now()).to_string();
    let change = |object: &mut Value| {
        object["spec"]["update"]["paused"] = json!(paused);
        if !paused {
            object["metadata"]["annotations"][RESUMED_ANNOTATION] = json!(now);
        }
        Some(())
    };
    changed(global, &mut objects, &name, change, if paused { "paused" } else { "resumed" }).await
}

async fn restart(global: &Global, args: &PoolArgs) -> Run {
    let name = args.name()?;
    let mut objects = args.object.open(global).await?;
    let now = Timestamp::from(SystemTime::now()).to_string();
    let change = |object: &mut Value| {
        object["spec"]["workload"]["env"][RESTARTED_AT] = json!(now);
        object["metadata"]["annotations"][CAUSE_ANNOTATION] = json!("restart");
        Some(())
    };
    changed(global, &mut objects, &name, change, "restarts").await
}

/// Changes an object; what others write to it meanwhile is kept.
async fn changed(
    global: &Global,
    objects: &mut Objects,
    name: &Name,
    change: impl Fn(&mut Value) -> Option<()>,
    became: &str,
) -> Run {
    let changing = async {
        let mut attempt = 1;
        loop {
            let mut next = editable(&objects.get(name).await?, true);
            if change(&mut next).is_none() {
                return Ok(None);
            }
            match objects.apply(&next, ApplyOptions::default()).await {
                Ok(applied) => return Ok(Some(applied)),
                Err(error) if attempt < ATTEMPTS && is_stale(&error) => attempt += 1,
                Err(error) => return Err::<_, CallError>(error),
            }
        }
    };
    let applied = within(global.timeout(), changing).await?;
    let unreadable = || Outcome::Failed(anyhow!("this version can't read the spec of {name}"));
    let is_unchanged = applied.ok_or_else(unreadable)?.outcome.as_str() == "unchanged";
    Ok(tell(global.output, name, if is_unchanged { "is so already" } else { became })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detail(revision: u64, settled: u64, numbers: &[u64]) -> RolloutDetail {
        let template = json!({ "image": { "ref": "builtin:busybox" }, "profile": "default", "resources": { "vcpus": 1, "mem_mib": 64 } });
        let history = numbers.iter().map(|number| PoolRevision {
            number: *number,
            created_at: String::new(),
            cause: String::new(),
            values_changed: false,
            template: {
                let mut template = template.clone();
                template["image"]["ref"] = json!(format!("builtin:{number}"));
                serde_json::from_value(template).unwrap()
            },
        });
        let status = mvm_proto::object::RolloutStatus { revision, settled, ..Default::default() };
        RolloutDetail { status, message: String::new(), history: history.collect(), nodes: Vec::new() }
    }

    #[test]
    fn undo_goes_to_what_was_everywhere_before_or_to_the_revision_before_the_newest() {
        assert_eq!(one_before(&detail(4, 2, &[2, 3, 4])), Some(2));
        assert_eq!(one_before(&detail(4, 4, &[2, 3, 4])), Some(3));
        assert_eq!(one_before(&detail(1, 1, &[1])), None);
    }

    #[test]
    fn undo_goes_to_no_revision_that_had_other_values_alone() {
        let rotated = |revision: u64, settled: u64| {
            let mut detail = detail(revision, settled, &[1, 2, 3, 4]);
            let template = detail.history[1].template.clone();
            for one in &mut detail.history[2..] {
                (one.template, one.values_changed) = (template.clone(), true);
            }
            detail
        };
        assert_eq!(one_before(&rotated(4, 4)), Some(1));
        assert_eq!(one_before(&rotated(4, 3)), Some(1));
        assert!(differs_in_values_alone(&rotated(4, 4), &rotated(4, 4).history[1]));
        assert!(!differs_in_values_alone(&rotated(4, 4), &rotated(4, 4).history[0]));
    }

    #[test]
    fn a_status_of_an_older_spec_is_no_end() {
        let object = |observed: u64, phase: &str| -> Object {
            let condition = json!({ "type": "RolledOut", "status": "True", "reason": "Done", "message": "m", "since": "" });
            let status = json!({ "observed_generation": observed, "rollout": { "phase": phase }, "conditions": [condition] });
            serde_json::from_value(
                json!({ "api_version": "mvm/v1", "kind": "Pool", "status": status, "spec": {},
                "metadata": { "name": "a", "tenant": "t", "generation": 2 } }),
            )
            .unwrap()
        };
        assert_eq!(line(&object(2, "done")), ("m".to_owned(), true));
        assert!(!line(&object(1, "done")).1);
        assert!(!line(&object(2, "progressing")).1);
        assert!(line(&object(2, "failed")).1);
    }
}
