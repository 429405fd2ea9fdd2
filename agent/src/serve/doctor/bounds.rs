//! What keeps tenants apart here, judged by the modes that the agent would run with.

use mvm_host::can_be_handed_over;
use mvm_host::privileges::Account;
use mvm_proto::text::chain;
use mvm_vmm::DriverKind;
use nix::unistd::geteuid;

use super::Check;
use crate::isolation::machine::{look_at_groups, try_network};
use crate::isolation::{Effort, IsolationSettings, Machine, NetworkMode, Unavailable};
use crate::node::assemble::NodeError;
use crate::serve::privileges::{DEFAULT_USER, ROOT};
use crate::serve::settings::AgentSettings;

/// What to do about a bound that was switched off.
const SWITCH_ON: &str = "for tenants that do not trust each other, start the agent as root without this flag";

pub(super) fn examine(settings: &AgentSettings, driver: DriverKind, user: Option<&str>) -> Vec<Check> {
    let isolation = settings.isolation.with(driver);
    let mut checks = vec![privileges(settings, user), rights(&isolation, geteuid().is_root())];
    if checks.iter().any(|check| check.health == super::Health::Failed) {
        // Without the right to them no bound can be looked at.
        return checks;
    }
    let machine = Machine::look();
    let networks = match isolation.network {
        NetworkMode::None => Ok(()),
        NetworkMode::Bridges => machine.check_network().and_then(|()| try_network()),
    };
    checks.push(network(isolation.network, networks));
    checks.push(groups(isolation.cgroups, look_at_groups(&settings.isolation.groups())));
    checks.push(jail(isolation.jail, driver, machine.check_jail()));
    checks
}

/// Who the agent goes on as.
fn privileges(settings: &AgentSettings, user: Option<&str>) -> Check {
    const NAME: &str = "user";
    let own = || nix::unistd::User::from_uid(geteuid()).ok().flatten();
    let own = own().map_or_else(|| geteuid().to_string(), |user| user.name);
    match (geteuid().is_root(), user) {
        (false, None) => Check::ok(NAME, format!("the agent runs as {own}")),
        (false, Some(user)) => Check::failed(
            NAME,
            format!("only root can go on as {user}, and this is {own}"),
            "leave --user out, or run this and the agent as root",
        ),
        (true, Some(ROOT)) => Check::warning(
            NAME,
            "the process that speaks to the network stays root (--user root)",
            format!("useradd --system {DEFAULT_USER}, and leave --user out"),
        ),
        (true, named) => {
            let name = named.unwrap_or(DEFAULT_USER);
            match (Account::find(name), named) {
                (Err(error), _) => Check::failed(NAME, chain(&error), "fix what the text names"),
                (Ok(Some(account)), _) => match can_be_handed_over(&settings.data_dir, &account) {
                    Ok(()) => {
                        Check::ok(NAME, format!("goes on as {name}, with a helper for what needs root"))
                    }
                    Err(error) => Check::failed(
                        NAME,
                        chain(&error),
                        "do what the text says, or choose another --data-dir",
                    ),
                },
                (Ok(None), Some(name)) => Check::failed(
                    NAME,
                    format!("there is no user {name}"),
                    format!("make one (useradd --system {name}), or name another by --user"),
                ),
                (Ok(None), None) => Check::warning(
                    NAME,
                    format!("there is no user {name}: the process that speaks to the network stays root"),
                    format!("useradd --system {name}"),
                ),
            }
        }
    }
}

fn rights(isolation: &IsolationSettings, is_root: bool) -> Check {
    const NAME: &str = "rights";
    match isolation.needs_root().filter(|_| !is_root) {
        None => Check::ok(NAME, "enough for the modes below"),
        Some(needs) => Check::failed(
            NAME,
            NodeError::NeedsRoot { needs }.to_string(),
            "sudo mvm doctor, or: mvm doctor --network none --cgroups none --jail none",
        ),
    }
}

fn network(mode: NetworkMode, held: Result<(), Unavailable>) -> Check {
    const NAME: &str = "network";
    match (mode, held) {
        (NetworkMode::None, _) => {
            Check::warning(NAME, "--network none: instances have no network card", SWITCH_ON)
        }
        (NetworkMode::Bridges, Ok(())) => {
            Check::ok(NAME, "/dev/net/tun opens, and the kernel makes bridges and rules")
        }
        (NetworkMode::Bridges, Err(lack)) => Check::failed(NAME, lack.found, lack.remedy),
    }
}

fn groups(effort: Effort, held: Result<String, Unavailable>) -> Check {
    const NAME: &str = "cgroups";
    match (effort, held) {
        (Effort::None, _) => {
            Check::warning(NAME, "--cgroups none: nothing limits what instances take", SWITCH_ON)
        }
        (_, Ok(found)) => Check::ok(NAME, found),
        (effort, Err(lack)) => lacking(NAME, effort, lack),
    }
}

fn jail(effort: Effort, driver: DriverKind, held: Result<(), Unavailable>) -> Check {
    const NAME: &str = "jail";
    match (effort, held) {
        (Effort::None, _) => {
            Check::warning(NAME, "--jail none: who takes over a VMM has the agent's rights", SWITCH_ON)
        }
        (_, _) if driver == DriverKind::Firecracker => Check::ok(NAME, "Firecracker's jailer confines VMMs"),
        (_, Ok(())) => Check::ok(NAME, "a user, namespaces, a root and filters of its own for each VMM"),
        (effort, Err(lack)) => lacking(NAME, effort, lack),
    }
}

fn lacking(name: &'static str, effort: Effort, lack: Unavailable) -> Check {
    match effort {
        Effort::Required => Check::failed(name, lack.found, lack.remedy),
        Effort::BestEffort | Effort::None => Check::warning(name, lack.found, lack.remedy),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Health;
    use super::*;

    fn lack() -> Unavailable {
        Unavailable { setting: "--x required", found: "is missing".to_owned(), remedy: "load it".to_owned() }
    }

    #[test]
    fn what_is_missing_fails_where_it_is_required_and_is_a_warning_where_it_is_not() {
        for (effort, health) in [
            (Effort::Required, Health::Failed),
            (Effort::BestEffort, Health::Warning),
            (Effort::None, Health::Warning),
        ] {
            assert_eq!(groups(effort, Err(lack())).health, health);
            assert_eq!(jail(effort, DriverKind::Qemu, Err(lack())).health, health);
        }
        assert_eq!(network(NetworkMode::Bridges, Err(lack())).health, Health::Failed);
        assert_eq!(network(NetworkMode::None, Err(lack())).health, Health::Warning);
        assert_eq!(jail(Effort::Required, DriverKind::Firecracker, Err(lack())).health, Health::Ok);
    }

    #[test]
    fn what_is_there_is_fine_and_what_is_switched_off_is_a_warning_all_the_same() {
        assert_eq!(groups(Effort::Required, Ok("all".to_owned())).health, Health::Ok);
        assert_eq!(groups(Effort::None, Ok("all".to_owned())).health, Health::Warning);
        assert_eq!(network(NetworkMode::Bridges, Ok(())).health, Health::Ok);
        assert_eq!(network(NetworkMode::None, Ok(())).health, Health::Warning);
        assert_eq!(jail(Effort::None, DriverKind::Qemu, Ok(())).health, Health::Warning);
    }

    #[test]
    fn an_ordinary_user_fails_only_with_modes_that_need_root() {
        assert_eq!(rights(&IsolationSettings::ALL, false).health, Health::Failed);
        assert_eq!(rights(&IsolationSettings::ALL, true).health, Health::Ok);
        assert_eq!(rights(&IsolationSettings::NONE, false).health, Health::Ok);
    }
}
