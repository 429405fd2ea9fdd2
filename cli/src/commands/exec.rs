//! `mvm exec` and `mvm instance exec`: one command inside an instance, with its output and exit code as if it had run here.
//!
//! Through a coordinator ([`relayed`]) it goes to whichever node has the instance, wakes it, and survives a restart of the
//! coordinator or the agent. An agent that is named itself is asked directly ([`direct`]), as a stream both ways where that is
//! needed ([`streamed`]).

mod direct;
mod relayed;
mod streamed;

use std::str::FromStr;

use anyhow::anyhow;
use clap::Args;
use mvm_proto::{InstanceId, PoolId, TenantId};
use tokio::sync::oneshot;

use crate::endpoint::{EndpointArgs, Route};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::instances::InstanceName;
use crate::user::Gives;

/// What shells add to the number of the signal that ended a command.
const SIGNALLED: i64 = 128;

#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// tenant/pool for any instance of it, i-0123abcd, or tenant/pool/i-0123abcd
    target: ExecTarget,
    /// The program and its arguments; no shell reads them
    #[arg(required_unless_present = "attach", last = true, value_name = "COMMAND")]
    command: Vec<String>,
    /// NAME=VALUE for the command's environment (repeatable)
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = parse_variable)]
    env: Vec<(String, String)>,
    /// Folder in the guest to run in [default: /]
    #[arg(short = 'w', long, value_name = "DIR")]
    workdir: Option<String>,
    /// Kill the command after this long [default: never]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    kill_after: Option<std::time::Duration>,
    /// Give it this process's standard input; 2 MiB at most where its agent is called over the network
    #[arg(short = 'i', long, visible_alias = "interactive")]
    stdin: bool,
    /// Give it a terminal, of the size that this process's has; with -i what is typed here is typed there
    #[arg(short = 't', long)]
    tty: bool,
    /// User of the guest to run as, by name or number [default: root]
    #[arg(short = 'u', long, value_name = "USER")]
    user: Option<String>,
    /// Go on with a command that runs already, by the id that was told when its connection was lost; with -i and -t as it was begun
    #[arg(long, value_name = "ID", conflicts_with_all = ["command", "env", "workdir", "kill_after", "user"])]
    attach: Option<String>,
    /// With --attach: leave out the output before this byte
    #[arg(long, value_name = "BYTES", default_value_t = 0, requires = "attach")]
    output_from: u64,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

impl ExecArgs {
    fn gives(&self) -> Gives {
        Gives { input: self.stdin, terminal: self.tty }
    }

    /// What the node's agent does for its own socket alone.
    fn needs_stream(&self) -> bool {
        self.tty || self.user.is_some()
    }
}

/// Where a command runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ExecTarget {
    Instance(InstanceName),
    Pool(TenantId, PoolId),
}

impl FromStr for ExecTarget {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split('/').collect::<Vec<_>>()[..] {
            [tenant, pool] => {
                let tenant = tenant.parse().map_err(|error| format!("a tenant's id {error}"))?;
                let pool = pool.parse().map_err(|error| format!("a pool's id {error}"))?;
                Ok(Self::Pool(tenant, pool))
            }
            _ => text.parse().map(Self::Instance).map_err(|error: String| format!("{error}; or tenant/pool")),
        }
    }
}

impl ExecTarget {
    /// Tenant, pool and instance, as far as they are named.
    fn parts(&self) -> (Option<&TenantId>, Option<&PoolId>, Option<&InstanceId>) {
        match self {
            Self::Pool(tenant, pool) => (Some(tenant), Some(pool), None),
            Self::Instance(InstanceName { pool: Some((tenant, pool)), id }) => {
                (Some(tenant), Some(pool), Some(id))
            }
            Self::Instance(InstanceName { pool: None, id }) => (None, None, Some(id)),
        }
    }
}

fn parse_variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("must be NAME=VALUE".to_owned()),
    }
}

/// `interrupted` tells of the first SIGINT or SIGTERM with the exit code for it.
pub(crate) async fn run(global: &Global, args: ExecArgs, interrupted: oneshot::Receiver<u8>) -> Run {
    match args.endpoint.route() {
        Route::Coordinator(operator) => {
            let channel = operator.channel(global).await?;
            relayed::run(global, args, channel, interrupted).await
        }
        Route::Agent => {
            let ExecTarget::Instance(name) = &args.target else {
                return Err(Outcome::Usage(anyhow!(
                    "an agent that is asked directly needs an instance's id\nsee which there are with: mvm instance list"
                )));
            };
            if args.attach.is_some() {
                return Err(Outcome::Usage(anyhow!(
                    "--attach goes through a coordinator\nname it with --coordinator"
                )));
            }
            let name = name.clone();
            tokio::select! {
                done = direct::run(global, args, &name) => done,
                Ok(code) = interrupted => Err(Outcome::Interrupted(code)),
            }
        }
    }
}

/// What a command's end means for this process.
fn ended(code: i64, signal: i64, timed_out: bool) -> Run {
    match (code, signal) {
        _ if timed_out => Err(Outcome::TimedOut(anyhow!("the command was killed, for its time was up"))),
        (0, 0) => Ok(()),
        (code, 0) => Err(Outcome::Command(u8::try_from(code).unwrap_or(1))),
        (_, signal) => Err(Outcome::Command(u8::try_from(SIGNALLED + signal).unwrap_or(u8::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_runs_in_an_instance_or_in_any_of_a_pool() {
        let target = |text: &str| text.parse::<ExecTarget>();
        assert!(matches!(target("acme/web"), Ok(ExecTarget::Pool(..))));
        let full = target("acme/web/i-0123abcd").unwrap();
        assert!(matches!(full.parts(), (Some(_), Some(_), Some(_))));
        assert!(matches!(target("i-0123abcd").unwrap().parts(), (None, None, Some(_))));
        for wrong in ["web", "acme/", "a/b/c/d", "acme/web/x"] {
            assert!(target(wrong).is_err(), "{wrong}");
        }
    }
}
