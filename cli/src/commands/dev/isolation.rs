//! What keeps instances of a development cluster apart: all that this machine can hold, and a word about the rest.

use mvm_agent::isolation::{Effort, NetworkMode, UnknownMode};
use mvm_agent::serve::doctor::{Check, Health};
use serde::{Deserialize, Serialize};

/// The modes that an agent is started with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub(super) struct Modes {
    pub(super) network: NetworkMode,
    pub(super) cgroups: Effort,
    pub(super) jail: Effort,
}

/// As flags have them.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Written {
    network: String,
    cgroups: String,
    jail: String,
}

impl From<Modes> for Written {
    fn from(modes: Modes) -> Self {
        let Modes { network, cgroups, jail } = modes;
        Self { network: network.to_string(), cgroups: cgroups.to_string(), jail: jail.to_string() }
    }
}

impl TryFrom<Written> for Modes {
    type Error = UnknownMode;

    fn try_from(written: Written) -> Result<Self, UnknownMode> {
        let Written { network, cgroups, jail } = written;
        Ok(Self { network: network.parse()?, cgroups: cgroups.parse()?, jail: jail.parse()? })
    }
}

impl Modes {
    pub(super) const NONE: Self =
        Self { network: NetworkMode::None, cgroups: Effort::None, jail: Effort::None };
    pub(super) const ALL: Self =
        Self { network: NetworkMode::Bridges, cgroups: Effort::Required, jail: Effort::Required };
}

/// What speaks for less than all.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found<'a> {
    pub(super) is_root: bool,
    /// What `mvm doctor` would say of each bound.
    pub(super) checks: &'a [Check],
    /// Why tenants' networks of this machine are not to be touched.
    pub(super) network_taken: Option<&'a str>,
    /// What the user asked for.
    pub(super) network: Option<NetworkMode>,
}

/// The strongest modes that work, and a line for each thing that is left out.
pub(super) fn choose(found: &Found<'_>) -> (Modes, Vec<String>) {
    if !found.is_root {
        let told =
            "without root, instances have no network card, no limits and no jail; for those: sudo mvm dev up";
        return (Modes::NONE, vec![told.to_owned()]);
    }
    let lacking = |name: &str| {
        let failed = |check: &&Check| check.name == name && check.health == Health::Failed;
        found.checks.iter().find(failed).map(|check| check.found.clone())
    };
    let (mut modes, mut told) = (Modes::ALL, Vec::new());
    let why_no_network = found.network_taken.map(str::to_owned).or_else(|| lacking("network"));
    if found.network == Some(NetworkMode::None) {
        modes.network = NetworkMode::None;
    } else if let Some(why) = why_no_network {
        modes.network = NetworkMode::None;
        told.push(format!("instances have no network card (--network none): {why}"));
    }
    if let Some(why) = lacking("cgroups") {
        modes.cgroups = Effort::BestEffort;
        told.push(format!("limits are set as far as possible (--cgroups best-effort): {why}"));
    }
    if let Some(why) = lacking("jail") {
        modes.jail = Effort::BestEffort;
        told.push(format!("VMMs are confined as far as possible (--jail best-effort): {why}"));
    }
    if !told.is_empty() {
        told.push("`mvm doctor` says how to get what is left out".to_owned());
    }
    (modes, told)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &'static str, health: Health) -> Check {
        Check { name, health, found: format!("no {name}"), fix: None }
    }

    fn found(checks: &[Check]) -> Found<'_> {
        Found { is_root: true, checks, network_taken: None, network: None }
    }

    #[test]
    fn root_gets_all_that_the_machine_can_hold_and_a_line_about_the_rest() {
        let fine = ["network", "cgroups", "jail"].map(|name| check(name, Health::Ok));
        assert_eq!(choose(&found(&fine)), (Modes::ALL, Vec::new()));
        // Staying root is no reason to leave anything out.
        let user = [check("user", Health::Warning)];
        assert_eq!(choose(&found(&user)), (Modes::ALL, Vec::new()));

        let (modes, told) = choose(&found(&[check("cgroups", Health::Failed)]));
        assert_eq!(modes, Modes { cgroups: Effort::BestEffort, ..Modes::ALL });
        assert!(
            told.len() == 2 && told[0].contains("no cgroups") && told[1].contains("mvm doctor"),
            "{told:?}"
        );
        let (modes, told) = choose(&found(&["network", "jail"].map(|name| check(name, Health::Failed))));
        assert_eq!(modes, Modes { network: NetworkMode::None, jail: Effort::BestEffort, ..Modes::ALL });
        assert_eq!(told.len(), 3, "{told:?}");
    }

    #[test]
    fn networks_that_another_cluster_has_and_networks_that_are_not_asked_for_are_left_alone() {
        let taken = Found { network_taken: Some("/other has them"), ..found(&[]) };
        let (modes, told) = choose(&taken);
        assert_eq!(modes.network, NetworkMode::None);
        assert!(told[0].contains("/other has them"), "{told:?}");
        let asked = Found { network: Some(NetworkMode::None), ..taken };
        assert_eq!(choose(&asked), (Modes { network: NetworkMode::None, ..Modes::ALL }, Vec::new()));
    }

    #[test]
    fn without_root_there_is_nothing_and_the_line_says_how_to_get_it() {
        let (modes, told) = choose(&Found { is_root: false, ..found(&[check("rights", Health::Failed)]) });
        assert_eq!(modes, Modes::NONE);
        assert!(told.len() == 1 && told[0].contains("sudo mvm dev up"), "{told:?}");
    }

    #[test]
    fn modes_are_written_as_flags_have_them() {
        let text = serde_json::to_string(&Modes::ALL).unwrap();
        assert_eq!(text, r#"{"network":"bridges","cgroups":"required","jail":"required"}"#);
        assert_eq!(serde_json::from_str::<Modes>(&text).unwrap(), Modes::ALL);
        assert!(serde_json::from_str::<Modes>(&text.replace("bridges", "wires")).is_err());
    }
}
