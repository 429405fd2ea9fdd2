//! What commands on declared objects share: whom they call, as which tenant, names, tables, differences.

pub(crate) mod names;
pub(crate) mod table;
pub(crate) mod unified;

use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::anyhow;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use mvm_client::files::{self, Entry, Tenant};
use mvm_client::{ApplyOptions, CallError, Name, Objects, Query};
use mvm_proto::TenantId;
use mvm_proto::object::{Kind, Object};
use serde_json::{Value, json};

use crate::client::{Operator, refused};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output;

/// Whom a command calls, and the tenant of objects that name none.
#[derive(Debug, Clone)]
pub(crate) struct ObjectArgs {
    flags: ObjectFlags,
    /// The tenant was named on the command line, and not by a context or a setting.
    is_said: bool,
}

#[derive(Debug, Clone, Args)]
struct ObjectFlags {
    /// The tenant of objects that are named without one [default: the context's]
    #[arg(short, long, value_name = "TENANT", env = "MVM_TENANT")]
    tenant: Option<TenantId>,
    #[command(flatten)]
    operator: Operator,
}

impl Args for ObjectArgs {
    fn augment_args(command: Command) -> Command {
        ObjectFlags::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        ObjectFlags::augment_args_for_update(command)
    }
}

impl FromArgMatches for ObjectArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let is_said = matches.value_source("tenant") == Some(ValueSource::CommandLine);
        Ok(Self { flags: ObjectFlags::from_arg_matches(matches)?, is_said })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl ObjectArgs {
    pub(crate) fn tenant(&self) -> Option<&str> {
        self.flags.tenant.as_ref().map(TenantId::as_str)
    }

    /// Whether the user said on the command line that only this tenant is meant.
    pub(crate) fn only_tenant(&self) -> Option<&str> {
        self.tenant().filter(|_| self.is_said)
    }

    pub(crate) async fn open(&self, global: &Global) -> Result<Objects, Outcome> {
        Ok(Objects::new(self.flags.operator.channel(global).await?))
    }

    /// What the files declare; an error tells all that is wrong with them.
    pub(crate) fn read(&self, files: &[PathBuf]) -> Result<Vec<Entry>, Outcome> {
        let tenant = Tenant { name: self.tenant(), is_only: self.is_said };
        files::read(files, tenant).map_err(|faults| Outcome::Usage(anyhow::Error::new(faults)))
    }

    /// The objects that a command's words name.
    pub(crate) fn names(&self, words: &[String]) -> Result<Vec<Name>, Outcome> {
        let targets = names::parse(words, self.tenant()).map_err(|error| Outcome::Usage(anyhow!(error)))?;
        if !targets.kinds.is_empty() {
            let error = "name at least one object, as KIND/NAME or KIND NAME";
            return Err(Outcome::Usage(anyhow!(error)));
        }
        Ok(targets.names)
    }

    /// All objects of a kind, of the tenant where there is one.
    pub(crate) fn query(&self, kind: &'static Kind, all_tenants: bool) -> Query {
        let tenant = self.tenant().filter(|_| kind.is_tenant_scoped() && !all_tenants);
        Query { tenant: tenant.map(str::to_owned), ..Query::all(kind) }
    }
}

/// One call, bounded by the user's `--timeout`.
pub(crate) async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, CallError>>,
) -> Result<T, Outcome> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map_err(failed),
        Err(_) => Err(Outcome::TimedOut(anyhow!("no answer within {}", humantime::format_duration(limit)))),
    }
}

pub(crate) fn failed(error: CallError) -> Outcome {
    match error.status() {
        Some(status) => refused(status),
        None => Outcome::Failed(anyhow::Error::new(error)),
    }
}

/// What went wrong with some of several objects, while the others went on.
#[derive(Debug, Default)]
pub(crate) struct Failures(Vec<String>);

impl Failures {
    /// Notes a failure about one object; one that all others would meet too ends the command.
    pub(crate) fn note(&mut self, of: &Name, outcome: Outcome) -> Run {
        match outcome {
            Outcome::Failed(error) => {
                self.0.push(format!("{of}: {error:#}"));
                Ok(())
            }
            other => Err(other),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn conclude(self) -> Run {
        if self.0.is_empty() { Ok(()) } else { Err(Outcome::Failed(anyhow!(self.0.join("\n")))) }
    }
}

/// An object as its user would write it: without what the server owns. With `version`, a write of it is refused once
/// the object has changed.
pub(crate) fn editable(object: &Object, version: bool) -> Value {
    let metadata = &object.metadata;
    let mut kept = json!({ "name": metadata.name });
    if let Some(tenant) = &metadata.tenant {
        kept["tenant"] = json!(tenant);
    }
    if !metadata.labels.is_empty() {
        kept["labels"] = json!(metadata.labels);
    }
    if !metadata.annotations.is_empty() {
        kept["annotations"] = json!(metadata.annotations);
    }
    if version {
        kept["resource_version"] = json!(metadata.resource_version);
    }
    json!({ "api_version": object.api_version, "kind": object.kind, "metadata": kept, "spec": object.spec })
}

/// How often a write is tried that another one was faster than.
pub(crate) const ATTEMPTS: u32 = 5;
/// What the server answers to a write of an object that has changed since.
const STALE: &str = "stale";

pub(crate) fn is_stale(error: &CallError) -> bool {
    error.problem().is_some_and(|problem| problem.code == STALE)
}

/// Sets one field of an object's spec; says whether it had to be changed. What others write to the object meanwhile is kept.
pub(crate) async fn set_in_spec(
    objects: &mut Objects,
    name: &Name,
    field: &str,
    value: &Value,
) -> Result<bool, CallError> {
    let mut attempt = 1;
    loop {
        let object = objects.get(name).await?;
        if object.spec.get(field) == Some(value) {
            return Ok(false);
        }
        let mut next = editable(&object, true);
        next["spec"][field] = value.clone();
        match objects.apply(&next, ApplyOptions::default()).await {
            Ok(_) => return Ok(true),
            Err(error) if attempt < ATTEMPTS && is_stale(&error) => attempt += 1,
            Err(error) => return Err(error),
        }
    }
}

/// One line about an object: its name for `-o name`, what became of it for people.
pub(crate) fn tell(format: output::Format, name: &Name, became: &str) -> anyhow::Result<()> {
    match format {
        output::Format::Table | output::Format::Wide => {
            output::show_line(format, &(), [format!("{name} {became}")])
        }
        output::Format::Name => output::show_line(format, &(), [name.to_string()]),
        output::Format::Json | output::Format::Yaml => Ok(()),
    }
}

/// Whether results are lines as they come, or one value at the end.
pub(crate) fn is_lines(format: output::Format) -> bool {
    !matches!(format, output::Format::Json | output::Format::Yaml)
}
