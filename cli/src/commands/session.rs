//! `mvm session`: guest sessions in the stores that nodes use.

use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use mvm_proto::status::GuestSession;
use mvm_proto::wire::control::v1::{
    DeleteGuestSessionsRequest, KeptGuestSession, ListGuestSessionsRequest, NodeGuestSession,
};
use mvm_proto::{PoolId, TenantId};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::client::within;
use crate::endpoint::{EndpointArgs, Session};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output::{self, or_dash, when};
use crate::progress::Progress;

const EXAMPLES: &str = "\
Examples:
  mvm session delete acme/workers/3                     one session that no instance has
  mvm session delete --older-than 30d -t acme           all of a tenant that were not used for 30 days";

#[derive(Debug, Subcommand)]
pub(crate) enum SessionCommand {
    /// Sessions, a line each: which instance has it, and when it was last used
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Delete sessions that are not in use
    #[command(visible_alias = "rm", after_help = EXAMPLES)]
    Delete(DeleteArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Only this tenant's
    #[arg(short = 't', long, value_name = "TENANT", env = "MVM_TENANT")]
    tenant: Option<TenantId>,
    /// Only this pool's
    #[arg(long, value_name = "POOL")]
    pool: Option<PoolId>,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DeleteArgs {
    /// Sessions as `mvm session list` shows them
    #[arg(value_name = "TENANT/POOL/NUMBER", required_unless_present = "older_than")]
    sessions: Vec<SessionName>,
    /// All sessions of --tenant that were not used for so long
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, requires = "tenant", conflicts_with = "sessions")]
    older_than: Option<Duration>,
    /// The tenant of --older-than
    #[arg(short = 't', long, value_name = "TENANT", env = "MVM_TENANT")]
    tenant: Option<TenantId>,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

/// `tenant/pool/number`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SessionName {
    tenant: TenantId,
    pool: PoolId,
    slot: u32,
}

impl FromStr for SessionName {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let [tenant, pool, slot] = text.split('/').collect::<Vec<_>>()[..] else {
            return Err("must be tenant/pool/number, as `mvm session list` shows it".to_owned());
        };
        Ok(Self {
            tenant: tenant.parse().map_err(|error| format!("a tenant's id {error}"))?,
            pool: pool.parse().map_err(|error| format!("a pool's id {error}"))?,
            slot: slot.parse().map_err(|_| "a session's id must be a number".to_owned())?,
        })
    }
}

/// A session, and the node that told of it; empty when an agent was asked directly.
#[derive(Debug, Clone, Default, Serialize)]
struct Found {
    #[serde(skip_serializing_if = "String::is_empty")]
    node_id: String,
    #[serde(flatten)]
    session: GuestSession,
}

impl From<NodeGuestSession> for Found {
    fn from(NodeGuestSession { node_id, session }: NodeGuestSession) -> Self {
        Self { node_id, session: session.unwrap_or_default() }
    }
}

/// What an agent lists.
#[derive(Deserialize)]
struct Listed {
    sessions: Vec<GuestSession>,
    unreadable: Vec<String>,
}

/// What came of a deletion.
#[derive(Debug, Default)]
struct Deleted {
    deleted: Vec<Found>,
    kept: Vec<KeptGuestSession>,
    missing: Vec<String>,
}

/// The same as an agent says it.
#[derive(Deserialize)]
struct AgentDeleted {
    deleted: Vec<GuestSession>,
    kept: Vec<AgentKept>,
    unreadable: Vec<String>,
}

#[derive(Deserialize)]
struct AgentKept {
    session: String,
    store: String,
    reason: String,
}

pub(crate) async fn run(global: &Global, command: SessionCommand) -> Run {
    match command {
        SessionCommand::List(args) => list(global, args).await,
        SessionCommand::Delete(args) => delete(global, args).await,
    }
}

async fn list(global: &Global, args: ListArgs) -> Run {
    let ListArgs { tenant, pool, endpoint } = args;
    let (found, missing): (Vec<Found>, Vec<String>) = match endpoint.open(global).await? {
        Session::Agent(agent) => {
            let mut query = Vec::new();
            query.extend(tenant.map(|tenant| format!("tenant={tenant}")));
            query.extend(pool.map(|pool| format!("pool={pool}")));
            let listed: Listed = agent.get(&format!("/v1/sessions?{}", query.join("&"))).await?;
            let found = listed.sessions.into_iter();
            (found.map(|session| Found { session, ..Found::default() }).collect(), listed.unreadable)
        }
        Session::Coordinator(mut client) => {
            let request = ListGuestSessionsRequest {
                node_id: text(endpoint.node()),
                tenant_id: text(tenant.as_ref()),
                pool_id: text(pool.as_ref()),
            };
            let listed = within(global.timeout(), client.list_guest_sessions(request)).await?;
            (listed.sessions.into_iter().map(Found::from).collect(), listed.missing)
        }
    };
    warn(global, &missing);
    Ok(output::show(global.output, &found, |wide| table(&found, wide))?)
}

fn table(found: &[Found], wide: bool) -> output::Table {
    let with_node = found.iter().any(|one| !one.node_id.is_empty());
    let mut headings = vec!["SESSION", "STATE", "HOLDER", "LAST USED", "SIZE", "STORE"];
    if with_node {
        headings.push("NODE");
    }
    if wide {
        headings.push("COPIED");
    }
    let mut table = output::plain();
    table.set_header(headings);
    for Found { node_id, session } in found {
        let mut row = vec![
            session.session.clone(),
            session.state.replace('_', " "),
            or_dash(&session.holder),
            when(&session.used_at, wide),
            output::bytes(session.bytes),
            session.store.clone(),
        ];
        if with_node {
            row.push(or_dash(node_id));
        }
        if wide {
            row.push(when(&session.taken_at, wide));
        }
        table.add_row(row);
    }
    table
}

async fn delete(global: &Global, args: DeleteArgs) -> Run {
    let DeleteArgs { sessions, older_than, tenant, endpoint } = args;
    let mut session = endpoint.open(global).await?;
    let node = text(endpoint.node());
    let progress = Progress::new(global.quiet);
    let mut refused = Vec::new();
    if let (Some(older_than), Some(tenant)) = (older_than, &tenant) {
        let done = ask(global, &mut session, &node, tenant, None, older_than).await?;
        warn(global, &done.missing);
        tell(global, &done, &mut refused)?;
        if done.deleted.is_empty() && refused.is_empty() {
            let age = humantime::format_duration(older_than);
            progress.say(format!("{tenant} has no session that was not used for {age}"));
        }
    }
    for SessionName { tenant, pool, slot } in &sessions {
        let done = ask(global, &mut session, &node, tenant, Some((pool, *slot)), Duration::ZERO).await?;
        warn(global, &done.missing);
        let before = refused.len();
        tell(global, &done, &mut refused)?;
        if done.deleted.is_empty() && refused.len() == before {
            refused.push(format!(
                "there is no session {tenant}/{pool}/{slot}\nsee which there are with: mvm session list -t {tenant}"
            ));
        }
    }
    match refused.is_empty() {
        true => Ok(()),
        false => Err(Outcome::Failed(anyhow!("{}", refused.join("\n")))),
    }
}

async fn ask(
    global: &Global,
    session: &mut Session,
    node: &str,
    tenant: &TenantId,
    one: Option<(&PoolId, u32)>,
    unused_for: Duration,
) -> Result<Deleted, Outcome> {
    match session {
        Session::Agent(agent) => {
            let mut body = json!({ "tenant": tenant, "unused_seconds": unused_for.as_secs() });
            if let Some((pool, slot)) = one {
                body["pool"] = json!(pool);
                body["session"] = json!(slot);
            }
            let (_, answer) = agent.post("/v1/sessions/delete", &body).await?;
            let read: AgentDeleted =
                serde_json::from_slice(&answer).context("could not read the agent's answer")?;
            let deleted = read.deleted.into_iter().map(|session| Found { session, ..Found::default() });
            let kept = read.kept.into_iter().map(|AgentKept { session, store, reason }| KeptGuestSession {
                node_id: String::new(),
                session,
                store,
                reason,
            });
            Ok(Deleted { deleted: deleted.collect(), kept: kept.collect(), missing: read.unreadable })
        }
        Session::Coordinator(client) => {
            let request = DeleteGuestSessionsRequest {
                node_id: node.to_owned(),
                tenant_id: tenant.to_string(),
                pool_id: one.map(|(pool, _)| pool.to_string()).unwrap_or_default(),
                session: one.map(|(_, slot)| slot),
                unused_seconds: unused_for.as_secs(),
            };
            let told = within(global.timeout(), client.delete_guest_sessions(request)).await?;
            let deleted = told.deleted.into_iter().map(Found::from).collect();
            Ok(Deleted { deleted, kept: told.kept, missing: told.missing })
        }
    }
}

/// Shows what was deleted; what was not is added to `refused`.
fn tell(global: &Global, done: &Deleted, refused: &mut Vec<String>) -> Run {
    if output::is_for_people(global.output) {
        for Found { session, .. } in &done.deleted {
            output::print(&format!("{} deleted from {}\n", session.session, session.store))?;
        }
    } else {
        output::show(global.output, &done.deleted, |wide| table(&done.deleted, wide))?;
    }
    let kept = done.kept.iter();
    refused.extend(kept.map(|it| format!("{} in {} was not deleted: {}", it.session, it.store, it.reason)));
    Ok(())
}

fn warn(global: &Global, missing: &[String]) {
    for missing in missing {
        Progress::new(global.quiet).say(format!("warning: {missing}"));
    }
}

fn text<T: ToString>(value: Option<&T>) -> String {
    value.map(ToString::to_string).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_named_by_tenant_pool_and_number() {
        let name: SessionName = "acme/workers/3".parse().unwrap();
        assert_eq!((name.tenant.as_str(), name.pool.as_str(), name.slot), ("acme", "workers", 3));
        for bad in
            ["acme/workers", "acme/workers/x", "acme/workers/-1", "A/workers/1", "acme/workers/1/2", ""]
        {
            assert!(bad.parse::<SessionName>().is_err(), "{bad}");
        }
    }
}
