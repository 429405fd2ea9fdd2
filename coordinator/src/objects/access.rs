//! Who may do what: one table of roles, verbs and kinds.

use mvm_proto::object::{ApiKeySpec, KeyRole, Kind, Scope};
use mvm_proto::{Problem, TenantId, Timestamp};

use crate::refuse;

/// Who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caller {
    /// `operator/admin`, `api-key/ci`
    pub(crate) name: String,
    pub(crate) role: KeyRole,
    /// The only tenant that it reaches; none: all.
    pub(crate) tenant: Option<TenantId>,
    /// Where it called from, for the audit log.
    pub(crate) address: String,
    /// When what it showed ends; none: no time was set.
    pub(crate) until: Option<Timestamp>,
}

/// How the names of callers with API keys begin.
const KEY: &str = "api-key/";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Read,
    Write,
}

/// What a role may do with objects that it reaches.
const TABLE: [(KeyRole, &[&str], &[&str]); 5] = [
    (KeyRole::Admin, &["*"], &["*"]),
    (KeyRole::Operator, &["*"], &["tenants", "nodes", "pools", "secrets"]),
    (KeyRole::TenantAdmin, &["tenants", "pools", "secrets"], &["pools", "secrets"]),
    (KeyRole::TenantUser, &["tenants", "pools"], &[]),
    (KeyRole::Viewer, &["tenants", "nodes", "pools"], &[]),
];

/// Whether `caller` may do this. What it may not even see is told as what does not exist.
pub(crate) fn allowed(
    caller: &Caller,
    verb: Verb,
    kind: &Kind,
    tenant: Option<&TenantId>,
    name: &str,
) -> Result<(), Problem> {
    if !sees(caller, kind, tenant, name) {
        return Err(refuse::no_object(kind, tenant, name));
    }
    if verb == Verb::Write && !row(caller.role).2.iter().any(|plural| covers(plural, kind)) {
        let detail = format!(
            "{} has the role {}, which may not change {}",
            caller.name,
            caller.role.as_str(),
            kind.plural
        );
        return Err(Problem::new(
            403,
            "forbidden",
            detail,
            "Ask someone with a role that may, or use another key.",
        ));
    }
    Ok(())
}

/// The roles that may tell of the load of a pool that they see: it moves a count within bounds that others declared.
const TELLS_LOAD: [KeyRole; 4] =
    [KeyRole::Admin, KeyRole::Operator, KeyRole::TenantAdmin, KeyRole::TenantUser];

/// Whether `caller` may tell of the load of this pool.
pub(crate) fn may_tell_load(
    caller: &Caller,
    kind: &Kind,
    tenant: &TenantId,
    name: &str,
) -> Result<(), Problem> {
    allowed(caller, Verb::Read, kind, Some(tenant), name)?;
    if TELLS_LOAD.contains(&caller.role) {
        return Ok(());
    }
    let role = caller.role.as_str();
    let detail = format!("{} has the role {role}, which may not tell of a pool's load", caller.name);
    Err(Problem::new(403, "forbidden", detail, "Ask someone with a role that may, or use another key."))
}

/// What a stream to a guest is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Programs run in it, with all that it may do.
    Exec,
    /// What it wrote to its console.
    Logs,
    /// All of its memory, to take it elsewhere.
    Move,
}

/// The roles that may reach into guests, and for what.
const REACHES: [(KeyRole, &[Reach]); 5] = [
    (KeyRole::Admin, &[Reach::Exec, Reach::Logs, Reach::Move]),
    (KeyRole::Operator, &[Reach::Exec, Reach::Logs, Reach::Move]),
    (KeyRole::TenantAdmin, &[Reach::Exec, Reach::Logs]),
    (KeyRole::TenantUser, &[Reach::Exec, Reach::Logs]),
    (KeyRole::Viewer, &[Reach::Logs]),
];

/// Whether `caller` may open such a stream to an instance of this tenant; none: of whichever has it. The tenant that its
/// instance must be of: the caller's own, where it has one.
pub(crate) fn enter(
    caller: &Caller,
    reach: Reach,
    tenant: Option<TenantId>,
) -> Result<Option<TenantId>, Problem> {
    let may = REACHES.iter().any(|(role, reaches)| *role == caller.role && reaches.contains(&reach));
    if !may {
        let what = match reach {
            Reach::Exec => "run programs in instances",
            Reach::Logs => "read what instances log",
            Reach::Move => "export or import instances",
        };
        let detail = format!("{} has the role {}, which may not {what}", caller.name, caller.role.as_str());
        let advice = "Ask someone with a role that may, or use another key.";
        return Err(Problem::new(403, "forbidden", detail, advice));
    }
    match (&caller.tenant, tenant) {
        (None, tenant) => Ok(tenant),
        (Some(own), None) => Ok(Some(own.clone())),
        (Some(own), Some(tenant)) if *own == tenant => Ok(Some(tenant)),
        // As of a tenant that does not exist.
        (Some(_), Some(tenant)) => {
            let detail = format!("there is no such instance of tenant {tenant}");
            Err(Problem::new(404, "unknown_instance", detail, "List what there is: `mvm instance list`."))
        }
    }
}

/// Whether `caller` may know of such an object; an empty name stands for all of the collection.
fn sees(caller: &Caller, kind: &Kind, tenant: Option<&TenantId>, name: &str) -> bool {
    let reaches = match (&caller.tenant, kind.scope) {
        (None, _) => true,
        (Some(own), Scope::Tenant) => tenant == Some(own),
        // Of the cluster's objects a tenant sees its own tenant alone.
        (Some(own), Scope::Cluster) => kind.plural == "tenants" && (name.is_empty() || name == own.as_str()),
    };
    reaches && row(caller.role).1.iter().any(|plural| covers(plural, kind))
}

fn row(role: KeyRole) -> &'static (KeyRole, &'static [&'static str], &'static [&'static str]) {
    TABLE.iter().find(|(of, ..)| *of == role).unwrap_or(&TABLE[TABLE.len() - 1])
}

fn covers(plural: &str, kind: &Kind) -> bool {
    plural == "*" || plural == kind.plural
}

impl Caller {
    /// Whether it may know of this object of a list.
    pub(crate) fn may_see(&self, kind: &Kind, tenant: Option<&TenantId>, name: &str) -> bool {
        sees(self, kind, tenant, name)
    }

    /// Who shows an API key.
    pub(super) fn of_key(name: &str, spec: ApiKeySpec, address: String) -> Self {
        let ApiKeySpec { role, tenant, expires_at } = spec;
        Self { name: format!("{KEY}{name}"), role, tenant, address, until: expires_at }
    }

    /// Whether it showed an API key, and no certificate.
    pub(crate) fn is_key(&self) -> bool {
        self.name.starts_with(KEY)
    }

    /// The coordinator itself.
    pub(super) fn coordinator() -> Self {
        let name = "coordinator".to_owned();
        Self { name, role: KeyRole::Admin, tenant: None, address: String::new(), until: None }
    }

    #[cfg(test)]
    pub(crate) fn admin() -> Self {
        Self { name: "test".to_owned(), ..Self::coordinator() }
    }
}

#[cfg(test)]
mod tests {
    use mvm_proto::object::{KINDS, kind_named};

    use super::*;

    #[test]
    fn every_role_has_its_row_and_names_kinds_that_exist() {
        for (_, role) in KeyRole::ALL {
            assert_eq!(row(role).0, role);
        }
        let known = |plural: &&str| *plural == "*" || KINDS.iter().any(|kind| kind.plural == *plural);
        assert!(TABLE.iter().all(|(_, reads, writes)| reads.iter().chain(*writes).all(known)));
    }

    #[test]
    fn every_role_says_what_it_reaches_and_a_keys_tenant_is_its_own() {
        for (_, role) in KeyRole::ALL {
            assert!(REACHES.iter().any(|(of, _)| *of == role));
        }
        let (own, other): (TenantId, TenantId) = ("acme".parse().unwrap(), "zeta".parse().unwrap());
        let key = |role| Caller { role, tenant: Some(own.clone()), ..Caller::admin() };
        let user = key(KeyRole::TenantUser);
        assert_eq!(enter(&user, Reach::Exec, None), Ok(Some(own.clone())));
        assert_eq!(enter(&user, Reach::Exec, Some(own.clone())), Ok(Some(own.clone())));
        assert_eq!(enter(&user, Reach::Exec, Some(other.clone())).unwrap_err().code, "unknown_instance");
        let viewer = key(KeyRole::Viewer);
        assert_eq!(enter(&viewer, Reach::Exec, None).unwrap_err().code, "forbidden");
        assert_eq!(enter(&viewer, Reach::Logs, None), Ok(Some(own)));
        assert_eq!(enter(&Caller::admin(), Reach::Exec, Some(other.clone())), Ok(Some(other)));
    }

    #[test]
    fn what_a_key_does_not_reach_looks_like_what_is_not_there() {
        let pool = kind_named("pool").unwrap();
        let (own, other): (TenantId, TenantId) = ("acme".parse().unwrap(), "zeta".parse().unwrap());
        let caller = Caller { role: KeyRole::TenantAdmin, tenant: Some(own.clone()), ..Caller::admin() };
        assert!(allowed(&caller, Verb::Write, pool, Some(&own), "a").is_ok());
        let code = |verb, kind, tenant, name| allowed(&caller, verb, kind, tenant, name).unwrap_err().code;
        assert_eq!(code(Verb::Write, pool, Some(&other), "a"), "not_found");
        assert_eq!(code(Verb::Read, pool, None, ""), "not_found");
        let tenant = kind_named("tenant").unwrap();
        assert!(allowed(&caller, Verb::Read, tenant, None, "acme").is_ok());
        assert_eq!(code(Verb::Read, tenant, None, "zeta"), "not_found");
        assert_eq!(code(Verb::Write, tenant, None, "acme"), "forbidden");
        assert_eq!(code(Verb::Read, kind_named("ak").unwrap(), None, "x"), "not_found");
        let viewer = Caller { role: KeyRole::Viewer, ..Caller::admin() };
        assert_eq!(allowed(&viewer, Verb::Write, pool, Some(&own), "a").unwrap_err().code, "forbidden");
    }
}
