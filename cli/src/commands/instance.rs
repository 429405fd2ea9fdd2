//! `mvm instance`: the microVMs of a node or of a cluster, one by one.

use anyhow::anyhow;
use clap::{Args, Subcommand};
use mvm_proto::ManualAction;
use mvm_proto::status::{InstanceStatus, WakeTiming};
use mvm_proto::{Phase, PoolId, TenantId, WorkloadState};

use crate::commands::exec::ExecArgs;
use crate::commands::instance_move::{self, ExportArgs, ImportArgs};
use crate::commands::logs::{self, LogsArgs};
use crate::endpoint::EndpointArgs;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::instances::InstanceName;
use crate::instances::{Filter, Found, Instances};
use crate::output::{self, or_dash, when, when_exactly};
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum InstanceCommand {
    /// All instances, a line each
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// One instance in full
    #[command(aliases = ["info", "show", "inspect"])]
    Get(OneArgs),
    /// The end of an instance's console, or all of it as it comes
    Logs(LogsArgs),
    /// Boot a stopped or failed instance
    Start(ActArgs),
    /// Shut an instance down; it keeps its disk, and a snapshot of it is dropped
    Stop(ActArgs),
    /// Pause a running instance; it keeps its memory and resumes in milliseconds
    Warm(ActArgs),
    /// Put a running or warm instance to sleep: snapshot it to disk and free its memory
    Sleep(ActArgs),
    /// Bring a warm or sleeping instance back to running
    Wake(ActArgs),
    /// Remove a stopped or failed instance with its disk
    #[command(visible_alias = "rm")]
    Destroy(ActArgs),
    /// Run a command inside an instance
    Exec(Box<ExecArgs>),
    /// Write a sleeping instance, with its memory and its disk, to a file for another node
    Export(ExportArgs),
    /// Take in an instance that another node exported; it sleeps here until it is woken
    Import(ImportArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Only this tenant's
    #[arg(long, value_name = "TENANT")]
    tenant: Option<TenantId>,
    /// Only this pool's
    #[arg(long, value_name = "POOL")]
    pool: Option<PoolId>,
    /// Only those in this phase
    #[arg(long, value_name = "PHASE", value_parser = parse_phase)]
    phase: Option<Phase>,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

fn parse_phase(text: &str) -> Result<Phase, String> {
    text.parse().map_err(|_| format!("must be one of {}", Phase::ALL.map(Phase::as_str).join(", ")))
}

#[derive(Debug, Args)]
pub(crate) struct OneArgs {
    /// i-0123abcd, or tenant/pool/i-0123abcd
    instance: InstanceName,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ActArgs {
    #[command(flatten)]
    one: OneArgs,
    /// How long reconcile keeps its hands off afterwards; 0s: not at all
    #[arg(long = "override", value_name = "TIME", default_value = "10m", value_parser = humantime::parse_duration)]
    window: std::time::Duration,
}

pub(crate) async fn run(global: &Global, command: InstanceCommand) -> Run {
    match command {
        InstanceCommand::List(args) => list(global, args).await,
        InstanceCommand::Get(args) => {
            let mut instances = Instances::open(global, &args.endpoint).await?;
            let found = instances.find(&args.instance).await?;
            Ok(output::show(global.output, &found, |_| details(&found))?)
        }
        InstanceCommand::Logs(args) => logs::run(global, args).await,
        InstanceCommand::Start(args) => act(global, args, ManualAction::Start).await,
        InstanceCommand::Stop(args) => act(global, args, ManualAction::Stop).await,
        InstanceCommand::Warm(args) => act(global, args, ManualAction::Warm).await,
        InstanceCommand::Sleep(args) => act(global, args, ManualAction::Sleep).await,
        InstanceCommand::Wake(args) => act(global, args, ManualAction::Wake).await,
        InstanceCommand::Destroy(args) => act(global, args, ManualAction::Destroy).await,
        // It has something left to do when it is interrupted, and is run apart.
        InstanceCommand::Exec(_) => Ok(()),
        InstanceCommand::Export(args) => instance_move::export(global, args).await,
        InstanceCommand::Import(args) => instance_move::import(global, args).await,
    }
}

async fn list(global: &Global, args: ListArgs) -> Run {
    let mut instances = Instances::open(global, &args.endpoint).await?;
    let filter = Filter { tenant: args.tenant, pool: args.pool, phase: args.phase, id: None };
    let (found, silent) = instances.list(&filter).await?;
    for node in silent {
        Progress::new(global.quiet).say(format!("warning: {node}"));
    }
    Ok(output::show(global.output, &found, |wide| table(&found, wide))?)
}

async fn act(global: &Global, args: ActArgs, action: ManualAction) -> Run {
    let mut instances = Instances::open(global, &args.one.endpoint).await?;
    let found = instances.find(&args.one.instance).await?;
    let progress = Progress::new(global.quiet);
    let after = instances.act(&found, action, args.window.as_secs(), progress).await?;
    let name = found.name();
    let Some(after) = after else {
        progress.say(format!("{name} is gone"));
        return Ok(());
    };
    let window = match after.instance.override_until.as_str() {
        "" => String::new(),
        until => format!("; reconcile keeps its hands off until {until}"),
    };
    progress.say(format!("{name} is {}{window}", after.instance.phase));
    if let Some(wake) = &after.wake {
        progress.say(time_line(wake));
    }
    if global.output != output::Format::Table && global.output != output::Format::Wide {
        output::show(global.output, &after, |_| details(&after))?;
    }
    if after.instance.phase == action.leads_to().as_str() {
        return Ok(());
    }
    Err(Outcome::Failed(anyhow!("{name} is {}: {}", after.instance.phase, after.instance.reason)))
}

/// Where the time of a wake went, without the parts that took none.
fn time_line(wake: &WakeTiming) -> String {
    let stages = [
        ("queued", wake.queued_ms),
        ("prepared", wake.prepared_ms),
        ("restored", wake.restored_ms),
        ("greeted", wake.greeted_ms),
        ("reborn", wake.reborn_ms),
        ("opened", wake.opened_ms),
        ("ready", wake.ready_ms),
        ("recorded", wake.recorded_ms),
    ];
    let shown: Vec<_> =
        stages.iter().filter(|(_, ms)| *ms >= 0.05).map(|(name, ms)| format!("{name} {ms:.1}")).collect();
    let parts = if shown.is_empty() { String::new() } else { format!(": {}", shown.join(", ")) };
    let waited = match wake.joined {
        true => format!("; another request's wake, waited {:.1} ms for", wake.waited_ms),
        false => String::new(),
    };
    format!("{} in {:.1} ms{parts}{waited}", wake.kind, wake.total_ms)
}

pub(crate) fn table(found: &[Found], wide: bool) -> output::Table {
    let with_node = found.iter().any(|one| !one.node_id.is_empty());
    let mut headings = vec!["INSTANCE", "TENANT", "POOL", "PHASE", "SINCE", "ADDRESS", "REASON"];
    if with_node {
        headings.insert(0, "NODE");
    }
    if wide {
        headings.extend(["REVISION", "LAST USED", "OVERRIDE UNTIL", "CLAIMED"]);
    }
    let mut table = output::plain();
    table.set_header(headings);
    for Found { node_id, instance, .. } in found {
        let mut row = vec![
            instance.instance_id.clone(),
            instance.tenant_id.clone(),
            instance.pool_id.clone(),
            phase_of(instance),
            when(&instance.since, wide),
            or_dash(&instance.address),
            if wide { or_dash(&instance.reason) } else { or_dash(trouble(instance)) },
        ];
        if with_node {
            row.insert(0, node_id.clone());
        }
        if wide {
            row.extend([
                or_dash(&instance.revision),
                or_dash(&instance.last_used_at),
                or_dash(&instance.override_until),
                if instance.claimed { "yes" } else { "no" }.to_owned(),
            ]);
        }
        table.add_row(row);
    }
    table.drop_empty(if wide { &[] } else { &["REASON"] });
    table
}

/// Why an instance is not as it should be; empty when it is: then the reason is only why it was started or stopped.
fn trouble(instance: &InstanceStatus) -> &str {
    let failed = instance.phase == Phase::Failed.as_str();
    let down = matches!(instance.workload.parse(), Ok(WorkloadState::Failed | WorkloadState::Unhealthy));
    match (failed || down, instance.persist_error.as_str()) {
        (true, _) => &instance.reason,
        (false, error) => error,
    }
}

/// The phase, and how the program fares where that is not told by it.
fn phase_of(instance: &InstanceStatus) -> String {
    match instance.workload.as_str() {
        workload if workload.is_empty() || workload == WorkloadState::Running.as_str() => {
            instance.phase.clone()
        }
        workload => format!("{} ({workload})", instance.phase),
    }
}

fn in_memory(bytes: u64) -> String {
    match bytes {
        0 => "-".to_owned(),
        bytes => output::bytes(bytes),
    }
}

pub(crate) fn details(found: &Found) -> output::Table {
    let InstanceStatus {
        instance_id,
        tenant_id,
        pool_id,
        phase,
        since,
        reason,
        address,
        revision,
        last_used_at,
        override_until,
        claimed,
        disk_used_bytes,
        memory_used_bytes,
        session,
        persisted_at,
        loss_window_seconds,
        persist_error,
        workload,
        restarts,
        moving,
        data_disk_mib: _,
    } = &found.instance;
    let mut rows = vec![("instance", instance_id.clone())];
    if !found.node_id.is_empty() {
        rows.push(("node", found.node_id.clone()));
    }
    rows.extend([
        ("tenant", tenant_id.clone()),
        ("pool", pool_id.clone()),
        ("phase", phase.clone()),
        ("since", when_exactly(since)),
        (
            "program",
            if workload.is_empty() {
                "-".to_owned()
            } else {
                format!("{workload}, restarted {restarts} times in a row")
            },
        ),
        ("reason", or_dash(reason)),
        ("address", or_dash(address)),
        ("revision", or_dash(revision)),
        ("last used", when_exactly(last_used_at)),
        ("override until", when_exactly(override_until)),
        ("moving", or_dash(moving)),
        ("claimed", if *claimed { "yes" } else { "no" }.to_owned()),
        ("on disk", output::bytes(*disk_used_bytes)),
        ("in memory", in_memory(*memory_used_bytes)),
    ]);
    if !session.is_empty() || !persist_error.is_empty() {
        rows.extend([
            ("session", or_dash(session)),
            ("persisted at", when_exactly(persisted_at)),
            ("loss window", format!("{loss_window_seconds}s")),
        ]);
        if !persist_error.is_empty() {
            rows.push(("not copied", persist_error.clone()));
        }
    }
    output::properties(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_is_told_in_a_line_with_the_parts_that_took_time() {
        let wake = WakeTiming {
            kind: "woken".to_owned(),
            total_ms: 61.25,
            restored_ms: 48.0,
            greeted_ms: 13.21,
            queued_ms: 0.04,
            ..WakeTiming::default()
        };
        assert_eq!(time_line(&wake), "woken in 61.2 ms: restored 48.0, greeted 13.2");
        let joined = WakeTiming { joined: true, waited_ms: 2.0, restored_ms: 0.0, greeted_ms: 0.0, ..wake };
        assert_eq!(time_line(&joined), "woken in 61.2 ms; another request's wake, waited 2.0 ms for");
    }

    #[test]
    fn an_instance_is_named_by_its_id_or_by_its_whole_path() {
        let short: InstanceName = "i-0123abcd".parse().unwrap();
        assert_eq!((short.pool, short.id.as_str()), (None, "i-0123abcd"));
        let long: InstanceName = "acme/web/i-0123abcd".parse().unwrap();
        assert_eq!(long.pool.unwrap().0.as_str(), "acme");
        for bad in ["", "acme", "acme/i-0123abcd", "a/b/c/d", "A/web/i-0123abcd", "i-XYZ"] {
            assert!(bad.parse::<InstanceName>().is_err(), "{bad}");
        }
    }
}
