//! `mvm get`: declared objects as tables, JSON or YAML, once or as they change.

use std::collections::BTreeMap;
use std::time::SystemTime;

use clap::Args;
use mvm_client::{Change, Name, Objects, Query};
use mvm_proto::Timestamp;
use mvm_proto::object::{FieldSelector, Kind, LabelSelector, Object, kind_named};
use tokio::sync::mpsc;

use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::names::{self, Targets};
use crate::objects::{ObjectArgs, failed, table, within};
use crate::output::{self, Format, Screen, Table};
use crate::progress::Progress;

const EXAMPLES: &str = "\
Examples:
  mvm get pools -A                          all pools of all tenants
  mvm get pools,tenants -t acme -o wide
  mvm get pool/acme/workers -o yaml         what to edit and apply again
  mvm get nodes -l gpu --field-selector spec.cordoned=false
  mvm get pools -t acme -w                  and how they change

Kinds: tenants (tn), nodes (no), secrets (sec), pools (pl), api-keys (ak).";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct GetArgs {
    /// KIND[,KIND], then names if any; or KIND/NAME... An object of a tenant is TENANT/NAME, or NAME with --tenant
    #[arg(required = true, value_name = "KIND[/NAME]")]
    objects: Vec<String>,
    /// Of all tenants
    #[arg(short = 'A', long)]
    all_tenants: bool,
    /// Only objects whose labels are so: team=search,env in (a,b),!old
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    selector: Option<String>,
    /// Only objects whose fields are so: spec.cordoned=true,metadata.name!=n1
    #[arg(long, value_name = "SELECTOR")]
    field_selector: Option<String>,
    /// Go on and show what changes: the table drawn anew on a terminal, else a line for each change
    #[arg(short, long)]
    watch: bool,
    #[command(flatten)]
    object: ObjectArgs,
}

pub(crate) async fn run(global: &Global, args: GetArgs) -> Run {
    let usage = |error: String| Outcome::Usage(anyhow::anyhow!(error));
    let (labels, fields) =
        (args.selector.clone().unwrap_or_default(), args.field_selector.clone().unwrap_or_default());
    labels.parse::<LabelSelector>().map_err(|error| usage(format!("--selector {error}")))?;
    fields.parse::<FieldSelector>().map_err(|error| usage(format!("--field-selector {error}")))?;
    let targets = names::parse(&args.objects, args.object.tenant()).map_err(usage)?;
    let is_selected = args.all_tenants || !labels.is_empty() || !fields.is_empty();
    if is_selected && !targets.names.is_empty() {
        return Err(usage("give names, or selectors and -A, not both".to_owned()));
    }
    let queries: Vec<Query> = targets
        .kinds
        .iter()
        .map(|kind| Query {
            labels: labels.clone(),
            fields: fields.clone(),
            ..args.object.query(kind, args.all_tenants)
        })
        .chain(targets.names.iter().filter(|_| args.watch).map(Query::one))
        .collect();
    let mut objects = args.object.open(global).await?;
    if args.watch {
        return watch(global, &objects, queries).await;
    }
    let is_one = targets.names.len() == 1;
    let found = find(global, &mut objects, &targets, &queries).await?;
    if found.is_empty() && output::is_for_people(global.output) {
        Progress::new(global.quiet).say(nothing(&targets, &args));
        return Ok(());
    }
    let refs: Vec<&Object> = found.iter().collect();
    match global.output {
        Format::Name => {
            found.iter().try_for_each(|object| output::show_line(Format::Name, &(), [object.reference()]))?;
        }
        format if is_one => output::show_all(format, &found[0], |wide| tables(&refs, !is_one, wide))?,
        format => output::show_all(format, &found, |wide| tables(&refs, true, wide))?,
    }
    Ok(())
}

async fn find(
    global: &Global,
    objects: &mut Objects,
    targets: &Targets,
    queries: &[Query],
) -> Result<Vec<Object>, Outcome> {
    let mut found = Vec::new();
    for name in &targets.names {
        found.push(within(global.timeout(), objects.get(name)).await?);
    }
    for query in queries {
        found.extend(within(global.timeout(), objects.list(query)).await?.objects);
    }
    Ok(found)
}

fn nothing(targets: &Targets, args: &GetArgs) -> String {
    let kinds: Vec<_> = targets.kinds.iter().map(|kind| kind.plural).collect();
    let of = match args.object.tenant().filter(|_| !args.all_tenants) {
        Some(tenant) if targets.kinds.iter().any(|kind| kind.is_tenant_scoped()) => {
            format!(" of tenant {tenant}; -A looks at all")
        }
        _ => String::new(),
    };
    format!("no {} found{of}", kinds.join(", "))
}

/// A table for each kind.
fn tables(objects: &[&Object], with_tenant: bool, wide: bool) -> Vec<Table> {
    let now = Timestamp::from(SystemTime::now());
    let mut kinds: Vec<&'static Kind> = Vec::new();
    for object in objects {
        if let Ok(kind) = kind_named(&object.kind)
            && !kinds.iter().any(|known| known.name == kind.name)
        {
            kinds.push(kind);
        }
    }
    let of = |kind: &Kind| {
        objects.iter().copied().filter(|object| object.kind == kind.name).collect::<Vec<&Object>>()
    };
    kinds.iter().map(|kind| table::table(kind, &of(kind), with_tenant, wide, now)).collect()
}

async fn watch(global: &Global, objects: &Objects, queries: Vec<Query>) -> Run {
    let (tell, mut told) = mpsc::channel(64);
    for (index, query) in queries.into_iter().enumerate() {
        let (mut watch, tell) = (objects.watch(query), tell.clone());
        tokio::spawn(async move {
            loop {
                let change = watch.next().await;
                let is_over = change.is_err();
                if tell.send((index, change)).await.is_err() || is_over {
                    return;
                }
            }
        });
    }
    drop(tell);
    let mut screen = Screen::of_terminal().filter(|_| output::is_for_people(global.output));
    let mut seen: BTreeMap<(usize, String), Object> = BTreeMap::new();
    while let Some((index, change)) = told.recv().await {
        let lines = apply_change(&mut seen, index, change.map_err(failed)?);
        match &mut screen {
            Some(screen) => {
                let refs: Vec<&Object> = seen.values().collect();
                screen.draw(&tables(&refs, true, global.output == Format::Wide))?;
            }
            None => lines.iter().try_for_each(|(what, object)| line(global.output, what, object))?,
        }
    }
    Ok(())
}

/// Brings what was seen up to date; gives what is new in it, each with what happened.
fn apply_change(
    seen: &mut BTreeMap<(usize, String), Object>,
    index: usize,
    change: Change,
) -> Vec<(&'static str, Object)> {
    let key = |object: &Object| (index, object.reference());
    match change {
        Change::Listed(objects) => {
            let keys: Vec<_> = objects.iter().map(key).collect();
            let is_gone = |at: &(usize, String)| at.0 == index && !keys.contains(at);
            let gone: Vec<_> = seen.keys().filter(|at| is_gone(at)).cloned().collect();
            let gone: Vec<_> = gone.iter().filter_map(|at| seen.remove(at)).collect();
            let mut lines: Vec<_> = gone.into_iter().map(|object| ("deleted", object)).collect();
            for object in objects {
                let before = seen.insert(key(&object), object.clone());
                match before {
                    None => lines.push(("", object)),
                    Some(before) if before != object => lines.push(("modified", object)),
                    Some(_) => {}
                }
            }
            lines
        }
        Change::Added(object) => {
            seen.insert(key(&object), object.clone());
            vec![("added", object)]
        }
        Change::Modified(object) => {
            seen.insert(key(&object), object.clone());
            vec![("modified", object)]
        }
        Change::Deleted(object) => {
            seen.remove(&key(&object));
            vec![("deleted", object)]
        }
    }
}

/// The row of one object with its name in full, and what happened to it.
fn line(format: Format, what: &str, object: &Object) -> anyhow::Result<()> {
    if format == Format::Name {
        return output::show_line(format, &(), [object.reference()]);
    }
    if format == Format::Yaml {
        return output::print(&format!("---\n{}", output::yaml(object)?));
    }
    let tables = tables(&[object], false, format == Format::Wide);
    let cells = tables.iter().flat_map(|table| table.rows()).flat_map(|row| row.iter().skip(1));
    let reference = object.reference();
    let parts = [reference.as_str()]
        .into_iter()
        .chain(cells.map(String::as_str))
        .chain([what].into_iter().filter(|what| !what.is_empty()));
    output::show_line(format, object, parts)
}

/// Names that were given, for messages.
pub(crate) fn listed(names: &[Name]) -> String {
    names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tenant(name: &str, version: &str) -> Object {
        serde_json::from_value(json!({ "api_version": "mvm/v1", "kind": "Tenant",
            "metadata": { "name": name, "resource_version": version }, "spec": {} }))
        .unwrap()
    }

    #[test]
    fn the_help_names_every_kind() {
        for kind in &mvm_proto::object::KINDS {
            assert!(EXAMPLES.contains(&format!("{} ({})", kind.plural, kind.short)), "{}", kind.name);
        }
    }

    #[test]
    fn a_list_after_a_gap_tells_what_came_went_and_changed_meanwhile() {
        let mut seen = BTreeMap::new();
        let told = |lines: &[(&str, Object)]| {
            lines.iter().map(|(what, object)| format!("{what} {}", object.metadata.name)).collect::<Vec<_>>()
        };
        let first = vec![tenant("a", "1"), tenant("b", "2"), tenant("c", "3")];
        assert_eq!(told(&apply_change(&mut seen, 0, Change::Listed(first))), [" a", " b", " c"]);
        let again = vec![tenant("b", "2"), tenant("c", "5"), tenant("d", "6")];
        let lines = apply_change(&mut seen, 0, Change::Listed(again));
        assert_eq!(told(&lines), ["deleted a", "modified c", " d"]);
        // What another watch lists is none of this one's.
        apply_change(&mut seen, 1, Change::Listed(vec![tenant("x", "1")]));
        apply_change(&mut seen, 0, Change::Deleted(tenant("b", "7")));
        let left: Vec<_> = seen.keys().map(|(index, name)| format!("{index} {name}")).collect();
        assert_eq!(left, ["0 tenant/c", "0 tenant/d", "1 tenant/x"]);
    }
}
