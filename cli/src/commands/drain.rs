//! `mvm drain`: all that a node has goes to other nodes, and what becomes of each instance is told.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use mvm_client::{Name, Objects};
use mvm_proto::object::{DrainStatus, DrainedInstance, NodeObjectStatus, NodeSpec, Object, kind_named};
use serde_json::json;

use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::names::of_kind;
use crate::objects::{ObjectArgs, failed, set_in_spec, tell, within};
use crate::output::{self, Table, or_dash};

const EXAMPLES: &str = "\
Examples:
  mvm drain n1                     begin, or show how far it is
  mvm drain n1 -w --timeout 10m    tell of every instance until the node is empty
  mvm explain node/n1              what is left, and why
  mvm uncordon n1                  end it; what has gone stays where it is

Exit code 1: something stays that can't be moved. With -w, 3: --timeout (30s unless said otherwise) was over first; the
drain goes on.";

/// How long what stays has to stay until `-w` ends: several looks of the coordinator at the node.
const BLOCKED_FOR: Duration = Duration::from_secs(3);

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DrainArgs {
    /// A node by its name
    #[arg(value_name = "NODE")]
    node: String,
    /// Tell of every instance until nothing is left, or only what can't be moved
    #[arg(short, long)]
    watch: bool,
    #[command(flatten)]
    object: ObjectArgs,
}

pub(crate) async fn run(global: &Global, args: DrainArgs) -> Run {
    let usage = |error: String| Outcome::Usage(anyhow!(error));
    let kind = kind_named("nodes").map_err(usage)?;
    let name = of_kind(kind, args.node.strip_prefix("node/").unwrap_or(&args.node), None).map_err(usage)?;
    let mut objects = args.object.open(global).await?;
    let setting = async { Ok(set_in_spec(&mut objects, &name, "drain", &json!(true)).await) };
    let begun = within(global.timeout(), setting).await?.map_err(failed)?;
    if begun {
        tell(global.output, &name, "drains")?;
    }
    if args.watch {
        watch(global, &mut objects, &name).await?;
    }
    let object = within(global.timeout(), objects.get(&name)).await?;
    let status = status_of(&object).unwrap_or_default();
    output::show_all(global.output, &status, |_| tables(&object))?;
    match Progress::of(&object) {
        Progress::Blocked(message) => Err(Outcome::Failed(anyhow!("{name}: {message}"))),
        Progress::Empty | Progress::Under => Ok(()),
    }
}

/// How a drain stands, by the node's condition.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    Under,
    Empty,
    Blocked(String),
}

impl Progress {
    /// What was said of an older spec does not count.
    fn of(object: &Object) -> Self {
        let observed = object.status.get("observed_generation").and_then(serde_json::Value::as_u64);
        let is_old = observed.is_some_and(|observed| observed < object.metadata.generation);
        let conditions = object.conditions();
        let drained = conditions.iter().find(|condition| condition.r#type == "Drained");
        match drained {
            Some(one) if one.status == "True" && !is_old => Self::Empty,
            Some(one) if one.reason == "Blocked" && !is_old => {
                Self::Blocked(format!("{}; see with: mvm explain node/{}", one.message, object.metadata.name))
            }
            _ => Self::Under,
        }
    }
}

fn status_of(object: &Object) -> Option<DrainStatus> {
    object.status::<NodeObjectStatus>().ok()?.drain
}

/// Until it is over. What stays has to stay for a moment: what was said of it may be old, or be about a node that has just come.
async fn watch(global: &Global, objects: &mut Objects, name: &Name) -> Run {
    let limit = tokio::time::Instant::now() + global.timeout();
    loop {
        follow(global, objects, name, limit).await?;
        let is_blocked = |object: &Object| matches!(Progress::of(object), Progress::Blocked(_));
        if !is_blocked(&within(global.timeout(), objects.get(name)).await?) {
            return Ok(());
        }
        tokio::time::sleep(BLOCKED_FOR).await;
        if is_blocked(&within(global.timeout(), objects.get(name)).await?) {
            return Ok(());
        }
    }
}

async fn follow(global: &Global, objects: &Objects, name: &Name, limit: tokio::time::Instant) -> Run {
    let mut told: BTreeMap<String, String> = BTreeMap::new();
    let waiting = objects.wait_for(name, |object| {
        let Some(object) = object else { return true };
        for one in status_of(object).into_iter().flat_map(|status| status.instances) {
            let line = line(&one);
            if told.get(&one.name) != Some(&line) {
                // A reader that went away ends the command when it shows what it found.
                let _ = output::show_line(global.output, &(), [line.clone()]);
                told.insert(one.name, line);
            }
        }
        // Somebody ended it.
        let is_over = !object.spec::<NodeSpec>().is_ok_and(|spec| spec.drain);
        is_over || Progress::of(object) != Progress::Under
    });
    match tokio::time::timeout_at(limit, waiting).await {
        Ok(Ok(Some(object))) if object.spec::<NodeSpec>().is_ok_and(|spec| spec.drain) => Ok(()),
        Ok(Ok(Some(_))) => Err(Outcome::Failed(anyhow!("{name} is not drained any more"))),
        Ok(Ok(None)) => Err(Outcome::Failed(anyhow!("there is no {name}"))),
        Ok(Err(error)) => Err(failed(error)),
        Err(_) => {
            let limit = humantime::format_duration(global.timeout());
            Err(Outcome::TimedOut(anyhow!("{name} is not empty after {limit}; its drain goes on")))
        }
    }
}

/// `acme/web/i-0123abcd moving to n2: it waits for ...`
fn line(one: &DrainedInstance) -> String {
    let count = if one.count > 1 { format!(" ({})", one.count) } else { String::new() };
    let to = if one.to.is_empty() { String::new() } else { format!(" to {}", one.to) };
    let reason = if one.reason.is_empty() { String::new() } else { format!(": {}", one.reason) };
    format!("{}{count} {}{to}{reason}", one.name, one.state)
}

/// How far a node's drain is; of a node that is not drained, that it is not.
pub(crate) fn tables(object: &Object) -> Vec<Table> {
    let spec: NodeSpec = object.spec().unwrap_or_default();
    let mut rows = vec![("node", object.metadata.name.clone())];
    let placed = if spec.drain {
        "it is being drained: nothing new comes, and all that it has goes"
    } else if spec.cordoned {
        "it is cordoned: nothing new comes"
    } else {
        "it takes new instances"
    };
    rows.push(("placement", placed.to_owned()));
    let status = status_of(object);
    if let Some(status) = &status {
        rows.extend([("gone", status.gone.to_string()), ("left", status.left.to_string())]);
    }
    let mut instances = output::table(["INSTANCE", "COUNT", "STATE", "TO", "REASON"]);
    for one in status.into_iter().flat_map(|status| status.instances) {
        instances.add_row([
            one.name.clone(),
            one.count.to_string(),
            one.state.clone(),
            or_dash(&one.to),
            or_dash(&one.reason),
        ]);
    }
    vec![output::properties(rows), instances]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(reason: &str, status: &str, observed: u64) -> Object {
        let condition =
            json!({ "type": "Drained", "status": status, "reason": reason, "message": "m", "since": "" });
        serde_json::from_value(json!({ "api_version": "mvm/v1", "kind": "Node",
            "metadata": { "name": "n1", "generation": 2 }, "spec": { "drain": true },
            "status": { "observed_generation": observed, "conditions": [condition] } }))
        .unwrap()
    }

    #[test]
    fn a_drain_is_over_when_the_node_is_empty_or_only_what_can_not_go_is_left() {
        assert_eq!(Progress::of(&node("Empty", "True", 2)), Progress::Empty);
        assert_eq!(Progress::of(&node("Empty", "True", 1)), Progress::Under, "of an older spec");
        assert_eq!(Progress::of(&node("Draining", "False", 2)), Progress::Under);
        assert!(matches!(Progress::of(&node("Blocked", "False", 2)), Progress::Blocked(_)));
    }

    #[test]
    fn a_line_says_what_where_to_and_why() {
        let one = DrainedInstance {
            name: "acme/web/i-00000001".to_owned(),
            count: 1,
            state: "moving".to_owned(),
            to: "n2".to_owned(),
            reason: "its image is not there yet".to_owned(),
        };
        assert_eq!(line(&one), "acme/web/i-00000001 moving to n2: its image is not there yet");
        let several =
            DrainedInstance { name: "acme/web".to_owned(), count: 3, state: "waits".to_owned(), ..one };
        assert_eq!(line(&several), "acme/web (3) waits to n2: its image is not there yet");
    }
}
