//! `mvm context`: the clusters that this user works with.

use std::path::PathBuf;

use anyhow::{Context as _, anyhow};
use clap::{Args, Subcommand};
use mvm_proto::TenantId;
use mvm_transport::Target;
use serde::Serialize;

use crate::client::parse_target;
use crate::contexts::{self, Context, Contexts};
use crate::endpoint::Endpoint;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output::{self, or_dash};
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum ContextCommand {
    /// All contexts, a line each
    #[command(visible_alias = "ls", after_help = "Example:\n  mvm context list")]
    List,
    /// Make a context the current one
    #[command(after_help = "Example:\n  mvm context use prod")]
    Use(NameArgs),
    /// Make a context or change it; what is not given stays as it is
    #[command(after_help = "\
Example:
  mvm context set prod --coordinator https://c1.example:4433 --operator-dir ~/.config/mvm/prod --tenant acme

The first context becomes the current one.")]
    Set(SetArgs),
    /// The name of the current context
    #[command(after_help = "Example:\n  mvm context current")]
    Current,
    /// Forget a context
    #[command(visible_alias = "rm", after_help = "Example:\n  mvm context delete prod")]
    Delete(NameArgs),
}

#[derive(Debug, Args)]
pub(crate) struct NameArgs {
    /// The context's name
    #[arg(value_name = "CONTEXT")]
    name: String,
}

#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    /// The context's name
    #[arg(value_name = "CONTEXT")]
    name: String,
    /// The coordinator to talk to
    #[arg(long, value_name = "URL", value_parser = parse_target)]
    coordinator: Option<Target>,
    /// Folder with operator.pem and ca.crt
    #[arg(long, value_name = "DIR")]
    operator_dir: Option<PathBuf>,
    /// The tenant of objects that are named without one
    #[arg(short, long, value_name = "TENANT")]
    tenant: Option<TenantId>,
    /// The agent of a cluster with one node, for what does not go through a coordinator: unix:PATH or agent:URL
    #[arg(long, value_name = "ENDPOINT", value_parser = agent_endpoint)]
    node_endpoint: Option<String>,
}

fn agent_endpoint(text: &str) -> Result<String, String> {
    match text.parse::<Endpoint>()? {
        Endpoint::Coordinator(_) => Err("must be an agent's: unix:PATH or agent:URL".to_owned()),
        Endpoint::Socket(_) | Endpoint::Agent(_) => Ok(text.to_owned()),
    }
}

/// A context as lists show it.
#[derive(Debug, Serialize)]
struct Line<'a> {
    name: &'a str,
    current: bool,
    #[serde(flatten)]
    context: &'a Context,
}

pub(crate) fn run(global: &Global, command: &ContextCommand) -> Run {
    let file = contexts::file().ok_or_else(|| {
        Outcome::Usage(anyhow!("no folder for contexts: set HOME, XDG_CONFIG_HOME or MVM_CONTEXTS"))
    })?;
    let contexts = Contexts::load(&file).map_err(Outcome::Usage)?;
    let progress = Progress::new(global.quiet);
    match command {
        ContextCommand::List => return list(global, &contexts),
        ContextCommand::Current => {
            let current = contexts.current.as_ref();
            let current =
                current.context("there is no current context\nchoose one with: mvm context use NAME")?;
            return Ok(output::show_line(output::Format::Table, &(), [current])?);
        }
        ContextCommand::Use(args) => {
            Contexts::change(&file, |contexts| {
                contexts.named(&args.name)?;
                contexts.current = Some(args.name.clone());
                Ok(())
            })?;
            progress.say(format!("the current context is {}", args.name));
        }
        ContextCommand::Set(args) => {
            if args.name.is_empty() || args.name.starts_with('-') {
                return Err(Outcome::Usage(anyhow!("a context needs a name")));
            }
            Contexts::change(&file, |contexts| {
                set(contexts.contexts.entry(args.name.clone()).or_default(), args)?;
                contexts.current.get_or_insert_with(|| args.name.clone());
                Ok(())
            })?;
            progress.say(format!("context {} is in {}", args.name, file.display()));
        }
        ContextCommand::Delete(args) => {
            Contexts::change(&file, |contexts| {
                contexts.named(&args.name)?;
                contexts.contexts.remove(&args.name);
                contexts.current = contexts.current.take().filter(|current| *current != args.name);
                Ok(())
            })?;
            progress.say(format!("context {} is forgotten", args.name));
        }
    }
    Ok(())
}

fn set(context: &mut Context, args: &SetArgs) -> anyhow::Result<()> {
    if let Some(coordinator) = &args.coordinator {
        context.coordinator = Some(coordinator.to_string());
    }
    if let Some(folder) = &args.operator_dir {
        // Commands run in other folders than this one.
        let whole = std::path::absolute(folder);
        context.operator_dir = Some(whole.with_context(|| format!("could not use {}", folder.display()))?);
    }
    if let Some(tenant) = &args.tenant {
        context.tenant = Some(tenant.clone());
    }
    if args.node_endpoint.is_some() {
        context.node_endpoint.clone_from(&args.node_endpoint);
    }
    Ok(())
}

fn list(global: &Global, contexts: &Contexts) -> Run {
    let lines: Vec<_> = contexts
        .contexts
        .iter()
        .map(|(name, context)| Line { name, current: contexts.current.as_ref() == Some(name), context })
        .collect();
    Ok(output::show(global.output, &lines, |_| {
        let mut table = output::table(["CURRENT", "NAME", "COORDINATOR", "OPERATOR DIR", "TENANT"]);
        for Line { name, current, context } in &lines {
            let folder = context.operator_dir.as_ref().map(|folder| folder.display().to_string());
            let tenant = context.tenant.as_ref().map(ToString::to_string);
            table.add_row([
                if *current { "*" } else { "" }.to_owned(),
                (*name).to_owned(),
                or_dash(context.coordinator.as_deref().unwrap_or_default()),
                or_dash(folder.as_deref().unwrap_or_default()),
                or_dash(tenant.as_deref().unwrap_or_default()),
            ]);
        }
        table
    })?)
}
