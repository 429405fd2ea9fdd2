//! Who may call what: one table of endpoint x role, from which both the router and the documentation are made.
//!
//! There is no second place: [`crate::api`] builds its routes by walking [`TABLE`], so an endpoint without a row
//! does not exist, and each route asks its own row before its handler runs. What a row does not allow is denied.

use std::fmt::Write as _;

use http::Method;
use mvm_pki::identity::{Identity, Role};

/// Everything the agent's API can be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Endpoint {
    Reconcile,
    Trust,
    NodeInfo,
    NodeStats,
    NodeWatch,
    Tenants,
    Instances,
    Wake,
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
    /// Nobody in particular. Never allowed anything.
    Unknown,
}

const COORDINATOR: &[Role] = &[Role::Coordinator];
const COORDINATOR_AND_OPERATOR: &[Role] = &[Role::Coordinator, Role::Operator];

/// The whole authorisation policy of the agent's API. Node certificates may call nothing: a node speaks for itself
/// to the coordinator, and has no business with another node.
pub const TABLE: &[Rule] = &[
    Rule {
        endpoint: Endpoint::Reconcile,
        method: Method::POST,
        path: "/v1/reconcile",
        does: "hands over a signed desired-state document",
        allows: COORDINATOR,
    },
    Rule {
        endpoint: Endpoint::Trust,
        method: Method::POST,
        path: "/v1/trust",
        does: "hands over the next root versions and image statements",
        allows: COORDINATOR,
    },
    Rule {
        endpoint: Endpoint::NodeInfo,
        method: Method::GET,
        path: "/v1/node/info",
        does: "tells what this node is",
        allows: COORDINATOR_AND_OPERATOR,
    },
    Rule {
        endpoint: Endpoint::NodeStats,
        method: Method::GET,
        path: "/v1/node/stats",
        does: "tells how this node fares now",
        allows: COORDINATOR_AND_OPERATOR,
    },
    Rule {
        endpoint: Endpoint::NodeWatch,
        method: Method::GET,
        path: "/v1/node/watch",
        does: "streams the node's status as it changes",
        allows: COORDINATOR_AND_OPERATOR,
    },
    Rule {
        endpoint: Endpoint::Tenants,
        method: Method::GET,
        path: "/v1/tenants",
        does: "lists tenants with their pools",
        allows: COORDINATOR_AND_OPERATOR,
    },
    Rule {
        endpoint: Endpoint::Instances,
        method: Method::GET,
        path: "/v1/tenants/{tenant}/instances",
        does: "lists a tenant's instances",
        allows: COORDINATOR_AND_OPERATOR,
    },
    Rule {
        endpoint: Endpoint::Wake,
        method: Method::POST,
        path: "/v1/tenants/{tenant}/pools/{pool}/instances/{instance}/wake",
        does: "wakes a warm or sleeping instance",
        allows: COORDINATOR_AND_OPERATOR,
    },
];

impl Rule {
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

const PAGE_HEAD: &str = "\
# Who may call what on an agent

Generated from the table in `agent/src/authz.rs`; a test fails when the two differ.

The role is read from the verified certificate (`spiffe://<cluster>/<role>/<name>`). What is not `yes` is answered
with 403 and code `forbidden`. A peer without a certificate of this cluster never gets as far as a request. `local`
is the unix socket, which only root and the agent's own user can open.

| call | does | coordinator | operator | node | local |
|---|---|---|---|---|---|
";

/// The table as the documentation shows it.
#[must_use]
pub fn table_markdown() -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(role: Role) -> Caller {
        Caller::Certified(Identity::new("demo".parse().unwrap(), role, "somebody").unwrap())
    }

    #[test]
    fn every_route_allows_exactly_the_roles_that_its_row_names() {
        use Endpoint::{Instances, NodeInfo, NodeStats, NodeWatch, Reconcile, Tenants, Trust, Wake};
        for rule in TABLE {
            let expected = match rule.endpoint {
                Reconcile | Trust => [true, false, false],
                NodeInfo | NodeStats | NodeWatch | Tenants | Instances | Wake => [true, true, false],
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
}
