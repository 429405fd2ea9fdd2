//! `mvm apply`: makes declared objects as their files say.

use std::path::PathBuf;

use clap::Args;
use mvm_client::files::{self, Entry};
use mvm_client::{Applied, ApplyOptions, DeleteOptions, Name, Objects, Query};
use mvm_proto::object::{KINDS, Kind, LabelSelector, Object, Outcome as Became};
use serde::Serialize;

use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::{Failures, ObjectArgs, is_lines, tell, within};
use crate::output;
use crate::progress::Progress;

const EXAMPLES: &str = "\
Examples:
  mvm apply -f acme.yaml
  mvm apply -f tenants/ -f - --dry-run
  mvm apply -f acme/ --prune -l team=search     delete what has the label and is in no file

Everything is read and checked before anything is sent. Tenants are made before their pools.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ApplyArgs {
    /// YAML or JSON file with any number of objects, folder of such files, or - for standard input
    #[arg(short, long = "file", visible_alias = "filename", required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Do everything but the writing
    #[arg(long)]
    dry_run: bool,
    /// Then delete what --selector selects and no file declares; nodes are left alone
    #[arg(long, requires = "selector")]
    prune: bool,
    /// The labels of what --prune may delete
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    selector: Option<String>,
    #[command(flatten)]
    object: ObjectArgs,
}

/// What was done to one object, for programs.
#[derive(Debug, Serialize)]
struct Done {
    outcome: Became,
    /// Of a new key: its text, which is shown this once.
    #[serde(skip_serializing_if = "Option::is_none")]
    secret: Option<String>,
    object: Object,
}

pub(crate) async fn run(global: &Global, args: ApplyArgs) -> Run {
    let selector = args.selector.clone().filter(|_| args.prune);
    if let Some(selector) = &selector {
        check_selector(selector)?;
    }
    let entries = args.object.read(&args.files)?;
    let mut objects = args.object.open(global).await?;
    let options = ApplyOptions { dry_run: args.dry_run, create_only: false };
    let (mut done, mut failures) = (Vec::new(), Failures::default());
    // Tenants that a dry run would have made: the server can't look at what belongs to them.
    let mut would_be: Vec<Name> = Vec::new();
    for entry in &entries {
        let name = entry.name();
        if args.dry_run && would_be.iter().any(|tenant| is_of(entry, tenant)) {
            tell(global.output, &name, &became(Became::Created, true))?;
            continue;
        }
        match within(global.timeout(), objects.apply(&entry.json, options)).await {
            Ok(Applied { outcome, object, secret }) => {
                tell(global.output, &name, &became(outcome, args.dry_run))?;
                if let (Some(secret), true) = (&secret, is_lines(global.output)) {
                    Progress::new(global.quiet).say("the key's text is shown this once:");
                    output::print(&format!("{secret}\n"))?;
                }
                done.push(Done { outcome, secret, object });
                if args.dry_run && outcome == Became::Created && name.kind.name == "Tenant" {
                    would_be.push(name);
                }
            }
            Err(outcome) => failures.note(&name, outcome)?,
        }
    }
    if let (Some(selector), true) = (selector, failures.is_empty()) {
        for name in surplus(global, &args, &mut objects, &selector, &entries).await? {
            let options = DeleteOptions { dry_run: args.dry_run, ..DeleteOptions::default() };
            match within(global.timeout(), objects.delete(&name, &options)).await {
                Ok(deleted) => {
                    let text = if deleted.gone { "deleted" } else { "deleting" };
                    tell(global.output, &name, &marked(text, args.dry_run))?;
                    done.push(Done { outcome: Became::Deleted, secret: None, object: deleted.object });
                }
                Err(outcome) => failures.note(&name, outcome)?,
            }
        }
    }
    if !is_lines(global.output) {
        output::show(global.output, &done, |_| output::plain())?;
    }
    failures.conclude()
}

/// Whether an object belongs to this tenant, or is a key that reaches it alone: neither is there before the tenant is.
pub(crate) fn is_of(entry: &Entry, tenant: &Name) -> bool {
    let is_key = entry.declared.kind.name == "ApiKey";
    let reached = entry.declared.spec.get("tenant").and_then(|of| of.as_str()).filter(|_| is_key);
    let of = entry.declared.metadata.tenant.as_ref().map(|of| of.as_str()).or(reached);
    of == Some(tenant.name.as_str())
}

fn became(outcome: Became, dry_run: bool) -> String {
    marked(outcome.as_str(), dry_run)
}

/// As kubectl says it.
pub(crate) fn marked(text: &str, dry_run: bool) -> String {
    if dry_run { format!("{text} (dry run)") } else { text.to_owned() }
}

fn check_selector(selector: &str) -> Run {
    let told = match selector.parse::<LabelSelector>() {
        Ok(all) if all == LabelSelector::default() => "--selector must select by a label".to_owned(),
        Ok(_) => return Ok(()),
        Err(error) => format!("--selector {error}"),
    };
    Err(Outcome::Usage(anyhow::anyhow!(told)))
}

/// What may be pruned, in the order in which it is deleted. A node is made by its enrolment, not by a file.
fn pruned() -> impl Iterator<Item = &'static Kind> {
    KINDS.iter().rev().filter(|kind| kind.name != "Node")
}

/// What the selector selects and no file declares. With a tenant on the command line, only what belongs to that.
async fn surplus(
    global: &Global,
    args: &ApplyArgs,
    objects: &mut Objects,
    selector: &str,
    entries: &[Entry],
) -> Result<Vec<Name>, Outcome> {
    let mut names = Vec::new();
    for kind in pruned() {
        let only = args.object.only_tenant();
        if only.is_some() && !kind.is_tenant_scoped() {
            continue;
        }
        let query =
            Query { tenant: only.map(str::to_owned), labels: selector.to_owned(), ..Query::all(kind) };
        let found = within(global.timeout(), objects.list(&query)).await?.objects;
        let not_deleting = found.iter().filter(|object| object.metadata.deleting_since.is_none());
        names.extend(not_deleting.map(|object| name_of(kind, object)));
    }
    names.retain(|name| entries.iter().all(|entry| entry.name() != *name));
    names.sort_by_key(|name| std::cmp::Reverse(files::order(name)));
    Ok(names)
}

pub(crate) fn name_of(kind: &'static Kind, object: &Object) -> Name {
    let tenant = object.metadata.tenant.as_ref().map(ToString::to_string);
    Name::of(kind, tenant.as_deref(), &object.metadata.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pruned_goes_in_reverse_order_and_nodes_stay() {
        let kinds: Vec<_> = pruned().map(|kind| kind.name).collect();
        assert_eq!(kinds, ["ApiKey", "Pool", "Secret", "Tenant"]);
    }

    #[test]
    fn pruning_needs_a_label_to_select_by() {
        assert!(
            check_selector("").is_err() && check_selector(" , ").is_err() && check_selector("a b").is_err()
        );
        assert!(check_selector("team=search").is_ok());
    }
}
