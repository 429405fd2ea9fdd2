//! Who may call what: one table of endpoint x role, from which both the router and the documentation are made.
//!
//! There is no second place: [`crate::intake::api`] builds its routes by walking [`TABLE`], so an endpoint without a row
//! does not exist, and each route asks its own row before its handler runs. What a row does not allow is denied.

use Endpoint as E;
use http::Method;
use mvm_pki::identity::{Identity, Role};
use mvm_proto::ManualAction;
use mvm_proto::ManualAction::{Destroy, Sleep, Start, Stop, Wake, Warm};

/// Everything the agent's API can be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Endpoint {
    Reconcile,
    Trust,
    NodeInfo,
    NodeStats,
    NodeWatch,
    NodeEvents,
    NodeObservation,
    NodeDesired,
    NetworkVerify,
    Tenants,
    Tenant,
    Pool,
    Instances,
    AllInstances,
    Instance,
    Logs,
    Act(ManualAction),
    Sessions,
    DeleteSessions,
    Exec,
    Export,
    Release,
    Import,
}

/// One row of the table.
#[derive(Debug)]
pub struct Rule {
    pub endpoint: Endpoint,
    pub method: Method,
    pub path: &'static str,
    /// What the call does, for the documentation.
    pub does: &'static str,
    /// The roles whose certificates may call this. The local operator on the unix socket may call everything:
    /// who can open that socket owns the node.
    pub allows: &'static [Role],
}

/// Who is calling.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Caller {
    /// The owner of this machine, on the unix socket.
    Local,
    /// A peer whose certificate was verified.
    Certified(Identity),
    /// A caller without an identity. Never allowed anything.
    Unknown,
}

/// The path of one instance, and what comes after it.
macro_rules! instance {
    ($rest:literal) => {
        concat!("/v1/tenants/{tenant}/pools/{pool}/instances/{instance}", $rest)
    };
}

/// Guests' whole memory, and the end of an instance: only for the owner of the node.
const LOCAL_ONLY: &[Role] = &[];
const COORDINATOR: &[Role] = &[Role::Coordinator];
const COORDINATOR_AND_OPERATOR: &[Role] = &[Role::Coordinator, Role::Operator];

pub(crate) const IMPORT_PATH: &str = "/v1/instances/import";
const DELETE_SESSIONS_PATH: &str = "/v1/sessions/delete";

/// The whole authorisation policy of the agent's API. Node certificates may call nothing: a node speaks for itself
/// to the coordinator, and has no business with another node.
pub const TABLE: &[Rule] = &[
    post(E::Reconcile, "/v1/reconcile", "hands over a signed desired-state document", COORDINATOR),
    post(E::Trust, "/v1/trust", "hands over the next root versions and image statements", COORDINATOR),
    get(E::NodeInfo, "/v1/node/info", "describes this node"),
    get(E::NodeStats, "/v1/node/stats", "returns the node's status"),
    get(E::NodeWatch, "/v1/node/watch", "streams the node's status as it changes"),
    get(E::NodeEvents, "/v1/node/events", "returns past events, and follows new ones"),
    get(E::NodeObservation, "/v1/node/observation", "returns the planner's input"),
    get(E::NodeDesired, "/v1/node/desired", "exports a document that describes what runs"),
    post(
        E::NetworkVerify,
        "/v1/node/network/verify",
        "checks every tenant's network, repairs it and reports the result",
        COORDINATOR_AND_OPERATOR,
    ),
    get(E::Tenants, "/v1/tenants", "lists tenants with their pools"),
    get(E::Tenant, "/v1/tenants/{tenant}", "tells of one tenant"),
    get(E::Instances, "/v1/tenants/{tenant}/instances", "lists a tenant's instances"),
    get(E::Pool, "/v1/tenants/{tenant}/pools/{pool}", "tells of one pool"),
    get(E::AllInstances, "/v1/instances", "lists all instances"),
    get(E::Instance, instance!(""), "tells of one instance"),
    get(E::Logs, instance!("/logs"), "returns the end of an instance's console"),
    post(E::Act(Start), instance!("/start"), "boots a stopped or failed instance", COORDINATOR_AND_OPERATOR),
    post(E::Act(Stop), instance!("/stop"), "shuts an instance down", COORDINATOR_AND_OPERATOR),
    post(E::Act(Warm), instance!("/warm"), "pauses a running instance", COORDINATOR_AND_OPERATOR),
    post(
        E::Act(Sleep),
        instance!("/sleep"),
        "snapshots a running or warm instance",
        COORDINATOR_AND_OPERATOR,
    ),
    post(E::Act(Wake), instance!("/wake"), "wakes a warm or sleeping instance", COORDINATOR_AND_OPERATOR),
    post(
        E::Act(Destroy),
        instance!("/destroy"),
        "removes a stopped instance with its disk",
        COORDINATOR_AND_OPERATOR,
    ),
    get(E::Sessions, "/v1/sessions", "lists the guest sessions in the stores that this node knows"),
    post(
        E::DeleteSessions,
        DELETE_SESSIONS_PATH,
        "deletes guest sessions that are not in use",
        COORDINATOR_AND_OPERATOR,
    ),
    post(E::Exec, instance!("/exec"), "runs a command inside an instance", COORDINATOR_AND_OPERATOR),
    post(E::Export, instance!("/export"), "exports a sleeping instance as an archive", LOCAL_ONLY),
    post(
        E::Release,
        instance!("/release"),
        "removes a sleeping instance that was exported and has not changed since",
        LOCAL_ONLY,
    ),
    post(E::Import, IMPORT_PATH, "imports an instance from an archive", LOCAL_ONLY),
];

const fn get(endpoint: Endpoint, path: &'static str, does: &'static str) -> Rule {
    Rule { endpoint, method: Method::GET, path, does, allows: COORDINATOR_AND_OPERATOR }
}

const fn post(endpoint: Endpoint, path: &'static str, does: &'static str, allows: &'static [Role]) -> Rule {
    Rule { endpoint, method: Method::POST, path, does, allows }
}

impl Rule {
    /// Whether the answer may take as long as the disk and the peer need.
    #[must_use]
    pub fn is_long(path: &str) -> bool {
        path == IMPORT_PATH || path == DELETE_SESSIONS_PATH || path.ends_with("/export")
    }

    /// Whether `caller` may make this call.
    #[must_use]
    pub fn permits(&self, caller: &Caller) -> bool {
        match caller {
            Caller::Local => true,
            Caller::Certified(identity) => self.allows.contains(&identity.role()),
            Caller::Unknown => false,
        }
    }
}

impl Caller {
    /// The caller in a log line or an error.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Caller::Local => "the local operator".to_owned(),
            Caller::Certified(identity) => identity.to_string(),
            Caller::Unknown => "an unknown caller".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    fn caller(role: Role) -> Caller {
        Caller::Certified(Identity::new("demo".parse().unwrap(), role, "somebody").unwrap())
    }

    #[test]
    fn every_route_allows_exactly_the_roles_that_its_row_names() {
        for rule in TABLE {
            let expected = match rule.endpoint {
                E::Reconcile | E::Trust => [true, false, false],
                E::Export | E::Release | E::Import => [false, false, false],
                _ => [true, true, false],
            };
            let found =
                [Role::Coordinator, Role::Operator, Role::Node].map(|role| rule.permits(&caller(role)));
            assert_eq!(found, expected, "{} {}", rule.method, rule.path);
            assert!(rule.permits(&Caller::Local));
            assert!(!rule.permits(&Caller::Unknown), "deny is the default");
        }
    }

    #[test]
    fn the_documentation_page_is_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/authorisation.md");
        assert_eq!(std::fs::read_to_string(path).unwrap(), table_markdown());
    }

    const PAGE_HEAD: &str = "\
# Who may call what on an agent

Generated from the table in `agent/src/intake/authz.rs`; a test fails when the two differ.

The role is read from the verified certificate (`spiffe://<cluster>/<role>/<name>`). What is not `yes` is answered
with 403 and code `forbidden`. A peer without a certificate of this cluster never gets as far as a request. `local`
is the unix socket, which only root, the agent's own user and members of the group `mvm` can open.

An operator that was removed (`mvm coordinator operator remove`) is answered with 403 and code `operator_removed`, and what streams to
it ends. The coordinator tells its agents over the session; they keep the list, also across restarts and while the coordinator is away.

| call | does | coordinator | operator | node | local |
|---|---|---|---|---|---|
";

    /// The table as the documentation shows it.
    fn table_markdown() -> String {
        let mut page = PAGE_HEAD.to_owned();
        for rule in TABLE {
            let mark = |role: Role| if rule.allows.contains(&role) { "yes" } else { "no" };
            // Writing to a string can't fail.
            let _ = writeln!(
                page,
                "| `{} {}` | {} | {} | {} | {} | yes |",
                rule.method,
                rule.path,
                rule.does,
                mark(Role::Coordinator),
                mark(Role::Operator),
                mark(Role::Node)
            );
        }
        page
    }
}
