//! Whether an agent with these settings can be a node here, and what to do where it can't: `mvm doctor`.
//!
//! Every check tries the thing itself (a guest is run on KVM, a device is opened, a port is bound) and says what it
//! found. [`Check`]s are judged by pure functions beside the looking; nothing here changes the machine but for the
//! answer of the KVM probe, which an agent of the same data directory uses too. What is judged is what
//! [`Agent::start`](super::Agent::start) refuses: the settings are the same type.

mod bounds;
mod node;
mod vmm;

use mvm_proto::Timestamp;
use mvm_vmm::choice;
use serde::Serialize;

use super::settings::AgentSettings;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    Ok,
    /// It works, but less well than it could, or something that is optional is missing.
    Warning,
    /// The agent would not start with these settings, or could run no guest.
    Failed,
}

impl Health {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub health: Health,
    /// What was seen, for a person.
    pub found: String,
    /// What to do about it; absent when all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Check {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, health: Health::Ok, found: found.into(), fix: None }
    }

    fn warning(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, health: Health::Warning, found: found.into(), fix: Some(fix.into()) }
    }

    fn failed(name: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, health: Health::Failed, found: found.into(), fix: Some(fix.into()) }
    }
}

/// Looks at everything that an agent of these settings, which goes on as `user`, needs. `said` hears the name of each
/// check as it begins.
pub async fn examine(
    settings: &AgentSettings,
    user: Option<&str>,
    now: Timestamp,
    mut said: impl FnMut(&str),
) -> Vec<Check> {
    let (vmm, data_dir) = (&settings.vmm, &settings.data_dir);
    let mut checks = Vec::new();
    said("VMMs and KVM (a guest is run)");
    checks.extend(vmm::examine(settings.driver, vmm, data_dir).await);
    said("what keeps tenants apart");
    checks.extend(bounds::examine(settings, choice::look_with(settings.driver, vmm, data_dir), user));
    said("the node's files, clock, ports and certificates");
    checks.push(node::disk(data_dir));
    checks.push(node::tools(vmm));
    checks.push(node::clock(now).await);
    checks.extend(node::ports(settings));
    checks.push(node::certificates(settings, now));
    checks
}

/// Looks only at what keeps tenants apart: the checks `user`, `rights`, `network`, `cgroups` and `jail`. Without the right to
/// the last three they are left out.
#[must_use]
pub fn examine_isolation(settings: &AgentSettings, user: Option<&str>) -> Vec<Check> {
    let (vmm, data_dir) = (&settings.vmm, &settings.data_dir);
    bounds::examine(settings, choice::look_with(settings.driver, vmm, data_dir), user)
}

/// The worst of them.
#[must_use]
pub fn worst(checks: &[Check]) -> Health {
    checks.iter().map(|check| check.health).max().unwrap_or(Health::Ok)
}
