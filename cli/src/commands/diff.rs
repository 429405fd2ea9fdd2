//! `mvm diff`: what applying files would change in the objects, as a unified diff of their YAML.

use std::path::PathBuf;

use clap::Args;
use mvm_client::ApplyOptions;
use mvm_client::files::Entry;
use mvm_client::{Name, Objects};
use mvm_proto::object::{API_VERSION, Declared, Object};
use serde_json::Value;

use crate::commands::apply::is_of;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::unified::unified;
use crate::objects::{ObjectArgs, editable, within};
use crate::output;

const EXAMPLES: &str = "\
Examples:
  mvm diff -f acme.yaml

Exit codes, as of kubectl diff: 0 nothing differs, 1 something does, above that it failed.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DiffArgs {
    /// YAML or JSON file, folder of such files, or - for standard input
    #[arg(short, long = "file", visible_alias = "filename", required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    object: ObjectArgs,
}

pub(crate) async fn run(global: &Global, args: DiffArgs) -> Run {
    // 1 says that something differs, and nothing else.
    compare(global, args).await.map_err(|outcome| match outcome {
        Outcome::Failed(error) => Outcome::Usage(error),
        other => other,
    })
}

async fn compare(global: &Global, args: DiffArgs) -> Run {
    let entries = args.object.read(&args.files)?;
    let mut objects = args.object.open(global).await?;
    let mut differs = false;
    // Tenants that are not there yet: the server can't look at what belongs to them.
    let mut would_be: Vec<Name> = Vec::new();
    for entry in &entries {
        let name = entry.name();
        let is_new = would_be.iter().any(|tenant| is_of(entry, tenant));
        let (old, new) = if is_new {
            (String::new(), declared(entry)?)
        } else {
            both(global, &mut objects, entry).await?
        };
        if old.is_empty() && name.kind.name == "Tenant" {
            would_be.push(name.clone());
        }
        let text = unified(&format!("live/{name}"), &old, &format!("declared/{name}"), &new);
        differs |= !text.is_empty();
        output::print(&text)?;
    }
    if differs { Err(Outcome::Found(1)) } else { Ok(()) }
}

/// The object as it would be made, with its defaults.
fn declared(entry: &Entry) -> anyhow::Result<String> {
    let Declared { kind, metadata, spec, .. } = entry.declared.clone();
    let (api_version, kind) = (API_VERSION.to_owned(), kind.name.to_owned());
    output::yaml(&editable(&Object { api_version, kind, metadata, spec, status: Value::Null }, false))
}

/// The object as it is, empty where there is none, and as it would be.
async fn both(global: &Global, objects: &mut Objects, entry: &Entry) -> Result<(String, String), Outcome> {
    let live = within(global.timeout(), objects.find(&entry.name())).await?;
    let dry = ApplyOptions { dry_run: true, ..ApplyOptions::default() };
    let next = within(global.timeout(), objects.apply(&entry.json, dry)).await?.object;
    let old = live.map(|live| output::yaml(&editable(&live, false))).transpose()?.unwrap_or_default();
    Ok((old, output::yaml(&editable(&next, false))?))
}
