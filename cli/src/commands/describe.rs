//! `mvm describe`: one object for people, with what it is and how it fares.

use clap::Args;
use mvm_client::{Name, Objects, Query};
use mvm_proto::Timestamp;
use mvm_proto::object::{Object, ObjectEvent, PoolExplanation};
use serde_json::Value;

use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::names::{self, Targets};
use crate::objects::{ObjectArgs, table, within};
use crate::output::{self, Format, Table, when_exactly};

const EXAMPLES: &str = "\
Examples:
  mvm describe pool acme/workers
  mvm describe node/n1 tenant/acme";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DescribeArgs {
    /// KIND NAME... or KIND/NAME..., or KIND for all
    #[arg(required = true, value_name = "KIND[/NAME]")]
    objects: Vec<String>,
    #[command(flatten)]
    object: ObjectArgs,
}

pub(crate) async fn run(global: &Global, args: DescribeArgs) -> Run {
    let usage = |error: String| Outcome::Usage(anyhow::anyhow!(error));
    let Targets { kinds, mut names } = names::parse(&args.objects, args.object.tenant()).map_err(usage)?;
    let mut objects = args.object.open(global).await?;
    for kind in kinds {
        let query: Query = args.object.query(kind, false);
        let listed = within(global.timeout(), objects.list(&query)).await?.objects;
        names.extend(listed.iter().map(|object| crate::commands::apply::name_of(kind, object)));
    }
    for (index, name) in names.iter().enumerate() {
        let object = within(global.timeout(), objects.get(name)).await?;
        if index > 0 && matches!(global.output, Format::Table | Format::Wide) {
            output::print("\n\n")?;
        }
        let why = explanation(global, &mut objects, name).await;
        let events = events(global, &mut objects, name).await;
        output::show_all(global.output, &object, |wide| {
            let mut tables = tables(&object, why.as_ref());
            tables.push(happened(&events, wide));
            tables
        })?;
    }
    Ok(())
}

/// Of pools; none where the server has none to give.
async fn explanation(global: &Global, objects: &mut Objects, name: &Name) -> Option<PoolExplanation> {
    if name.kind.name != "Pool" || !matches!(global.output, Format::Table | Format::Wide) {
        return None;
    }
    within(global.timeout(), objects.explain(name)).await.ok()
}

/// What happened to it lately; nothing where the server is of a version that does not tell.
async fn events(global: &Global, objects: &mut Objects, name: &Name) -> Vec<ObjectEvent> {
    if !matches!(global.output, Format::Table | Format::Wide) {
        return Vec::new();
    }
    within(global.timeout(), objects.events(Some(name))).await.unwrap_or_default()
}

fn happened(events: &[ObjectEvent], wide: bool) -> Table {
    let mut table = output::table(["LAST SEEN", "TYPE", "EVENT", "COUNT", "MESSAGE"]);
    for ObjectEvent { r#type, reason, message, count, last_at, .. } in events {
        let at = output::when(&last_at.to_string(), wide);
        table.add_row([at, r#type.as_str().to_owned(), reason.clone(), count.to_string(), message.clone()]);
    }
    table
}

/// Names and labels; what it is; how it fares; its conditions; what is not done yet.
pub(crate) fn tables(object: &Object, why: Option<&PoolExplanation>) -> Vec<Table> {
    let metadata = &object.metadata;
    let mut rows = vec![("name", metadata.name.clone())];
    rows.extend(metadata.tenant.as_ref().map(|tenant| ("tenant", tenant.to_string())));
    rows.push(("kind", object.kind.clone()));
    rows.push(("status", table::status(object)));
    let pairs = |(key, value): (&String, &String)| format!("{key}={value}");
    rows.extend(metadata.labels.iter().map(|pair| ("label", pairs(pair))));
    rows.extend(metadata.annotations.iter().map(|pair| ("annotation", pairs(pair))));
    let time = |at: Timestamp| when_exactly(&at.to_string());
    rows.extend(metadata.created_at.map(|at| ("created", time(at))));
    let observed = object.status.get("observed_generation").and_then(Value::as_u64);
    let generation = match observed {
        Some(observed) if observed < metadata.generation => {
            format!("{} (the status is about {observed})", metadata.generation)
        }
        _ => metadata.generation.to_string(),
    };
    rows.push(("generation", generation));
    if let Some(since) = metadata.deleting_since {
        rows.push(("deleting", format!("since {}", time(since))));
        rows.extend(metadata.finalizers.iter().map(|what| ("waits for", what.clone())));
    }
    let mut tables = vec![output::properties(rows)];
    tables.push(values("SPEC", &object.spec, &[]));
    tables.push(values("STATUS", &object.status, &["conditions", "observed_generation"]));
    let mut conditions = output::table(["CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"]);
    for one in object.conditions() {
        let since = output::when(&one.since, false);
        conditions.add_row([one.r#type, one.status, one.reason, since, one.message]);
    }
    tables.push(conditions);
    let mut deferred = output::table(["NOT DONE YET"]);
    why.into_iter().flat_map(|why| &why.deferred).for_each(|text| deferred.add_row([text]));
    tables.push(deferred);
    tables
}

/// Every value with its path, a line each.
fn values(heading: &str, value: &Value, without: &[&str]) -> Table {
    let mut table = output::table([heading, "VALUE"]);
    let Value::Object(fields) = value else { return table };
    for (name, value) in fields.iter().filter(|(name, _)| !without.contains(&name.as_str())) {
        rows(name, value, &mut table);
    }
    table
}

fn rows(path: &str, value: &Value, table: &mut Table) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            fields.iter().for_each(|(name, value)| rows(&format!("{path}.{name}"), value, table));
        }
        Value::Array(items) if items.iter().any(|item| item.is_object() || item.is_array()) => {
            items.iter().enumerate().for_each(|(index, item)| rows(&format!("{path}[{index}]"), item, table));
        }
        Value::String(text) => table.add_row([path, text]),
        other => table.add_row([path, &other.to_string()]),
    }
}
