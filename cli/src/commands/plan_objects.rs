//! `mvm plan -f`: what declaring objects would change in the cluster, node by node.

use std::path::PathBuf;

use anyhow::anyhow;
use clap::Args;
use mvm_proto::object::{FleetChange, Outcome as Became};
use serde_json::Value;

use crate::commands::explain::counts;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::{ObjectArgs, within};
use crate::output::{self, Table};
use crate::progress::Progress;

#[derive(Debug, Args)]
pub(crate) struct PlanObjectsArgs {
    /// Plan what declaring these would do: YAML or JSON file, folder of such files, or - for standard input
    #[arg(short, long = "file", visible_alias = "filename", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Plan as if this object were deleted, too
    #[arg(long, value_name = "KIND/NAME")]
    delete: Vec<String>,
    #[command(flatten)]
    object: ObjectArgs,
}

pub(crate) async fn run(global: &Global, args: PlanObjectsArgs) -> Run {
    if args.files.is_empty() && args.delete.is_empty() {
        let text = "give files with -f, or objects with --delete; or `mvm plan node` for one node's document";
        return Err(Outcome::Usage(anyhow!(text)));
    }
    let entries = if args.files.is_empty() { Vec::new() } else { args.object.read(&args.files)? };
    let deleted = if args.delete.is_empty() { Vec::new() } else { args.object.names(&args.delete)? };
    let mut objects = args.object.open(global).await?;
    let declared: Vec<Value> = entries.into_iter().map(|entry| entry.json).collect();
    let change = within(global.timeout(), objects.plan(&declared, &deleted)).await?;
    output::show_all(global.output, &change, |wide| tables(&change, wide))?;
    if change.is_empty() {
        Progress::new(global.quiet).say("nothing would change");
        return Ok(());
    }
    Err(Outcome::Found(2))
}

/// Objects with the fields that change; then each node's steps with their reasons; then what no node would take.
pub(crate) fn tables(change: &FleetChange, wide: bool) -> Vec<Table> {
    let mut objects = output::table(["OBJECT", "OUTCOME", "FIELD", "FROM", "TO"]);
    for one in &change.objects {
        let row = |field: &str, from: &str, to: &str| {
            [
                one.object.clone(),
                one.outcome.as_str().to_owned(),
                field.to_owned(),
                from.to_owned(),
                to.to_owned(),
            ]
        };
        // All fields of a new object are new.
        let is_listed = wide || one.outcome == Became::Configured;
        if one.fields.is_empty() || !is_listed {
            objects.add_row(row("-", "-", "-"));
            continue;
        }
        for field in &one.fields {
            objects.add_row(row(&field.path, &shown(field.from.as_ref()), &shown(field.to.as_ref())));
        }
    }
    let mut nodes = output::table(["NODE", "STEP", "POOL", "COUNT", "REASON"]);
    for node in &change.nodes {
        for step in &node.steps {
            let action = match &step.other {
                Some(other) if step.action == "move_in" => format!("move_in from {other}"),
                Some(other) => format!("{} to {other}", step.action),
                None => step.action.clone(),
            };
            let count = format!("{} {}", step.count, step.phase);
            nodes.add_row([node.node.to_string(), action, step.pool.clone(), count, step.reason.clone()]);
        }
    }
    let mut unplaced = output::table(["UNPLACED", "COUNT", "REASON"]);
    for one in &change.unplaced {
        unplaced.add_row([one.pool.clone(), counts(&one.unplaced.counts), one.unplaced.reason.clone()]);
    }
    let mut rollouts = output::table(["ROLLOUT", "NODES", "RUNNING", "MAX UNAVAILABLE", "MAX SURGE"]);
    for one in &change.rollouts {
        let numbers = [one.nodes, one.running, one.max_unavailable, one.max_surge].map(|it| it.to_string());
        let [nodes, running, max_unavailable, max_surge] = numbers;
        rollouts.add_row([one.pool.clone(), nodes, running, max_unavailable, max_surge]);
    }
    vec![objects, nodes, unplaced, rollouts]
}

fn shown(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "-".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_plan_tells_fields_steps_with_their_reasons_and_what_has_no_place() {
        let step = |action: &str, other: Option<&str>| {
            json!({ "pool": "acme/workers", "action": action, "phase": "running", "count": 2, "other": other,
                "reason": "n2 is drained" })
        };
        let change: FleetChange = serde_json::from_value(json!({
            "objects": [
                { "object": "pool/acme/workers", "outcome": "configured",
                  "fields": [{ "path": "spec.counts.running", "from": 1, "to": 4 }] },
                { "object": "tenant/acme", "outcome": "created", "fields": [{ "path": "spec", "to": {} }] },
            ],
            "nodes": [{ "node": "n1", "steps": [step("move_in", Some("n2")), step("start", None)] },
                { "node": "n2", "steps": [step("move_out", Some("n1"))] }],
            "unplaced": [{ "pool": "acme/workers", "counts": { "running": 1 }, "reason": "no node has 64 GiB" }],
            "rollouts": [{ "pool": "acme/workers", "nodes": 2, "running": 4, "max_unavailable": 1, "max_surge": 0 }],
        }))
        .unwrap();
        let shown: Vec<_> = tables(&change, false).iter().map(Table::render).collect();
        let expected = "\
OBJECT             OUTCOME     FIELD                FROM  TO
pool/acme/workers  configured  spec.counts.running  1     4
tenant/acme        created     -                    -     -

NODE  STEP             POOL          COUNT      REASON
n1    move_in from n2  acme/workers  2 running  n2 is drained
n1    start            acme/workers  2 running  n2 is drained
n2    move_out to n1   acme/workers  2 running  n2 is drained

UNPLACED      COUNT      REASON
acme/workers  running 1  no node has 64 GiB

ROLLOUT       NODES  RUNNING  MAX UNAVAILABLE  MAX SURGE
acme/workers  2      4        1                0
";
        assert_eq!(shown.join("\n"), expected);
    }
}
