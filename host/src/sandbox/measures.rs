//! Which measures are taken on a machine that can do this much, and what is then missing. A decision, nothing else.

use super::{Capabilities, Demand, Namespace, Weaker};

/// From which version Landlock forbids what, beyond opening files.
const LANDLOCK_SINCE: [(u32, &str); 5] = [
    (2, "moving files between directories"),
    (3, "cutting files"),
    (4, "TCP"),
    (5, "commands to devices"),
    (6, "signals and abstract sockets"),
];

impl Capabilities {
    /// What any VMM that is started here goes without.
    #[must_use]
    pub fn weaker(&self) -> Vec<Weaker> {
        Measures::decide(self, Demand::BestEffort).map(|measures| measures.weaker).unwrap_or_default()
    }
}

/// What is done to a VMM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Measures {
    /// A user of its own, without capabilities.
    pub(crate) own_user: bool,
    pub(crate) namespaces: Vec<Namespace>,
    pub(crate) landlock: Option<u32>,
    pub(crate) filter: bool,
    pub(crate) weaker: Vec<Weaker>,
}

impl Measures {
    pub(crate) fn clone_flags(&self) -> u64 {
        self.namespaces.iter().fold(0, |flags, namespace| flags | namespace.flag())
    }

    pub(crate) fn has(&self, namespace: Namespace) -> bool {
        self.namespaces.contains(&namespace)
    }

    /// All that the machine can do; an error names all that it can't, if the demand is for all.
    pub(crate) fn decide(machine: &Capabilities, demand: Demand) -> Result<Self, String> {
        let own_user = machine.missing.is_empty();
        let mut weaker = Vec::new();
        if own_user {
            let lacking =
                Namespace::ALL.into_iter().filter(|namespace| !machine.namespaces.contains(namespace));
            weaker.extend(lacking.map(Weaker::Namespace));
        } else {
            weaker.push(Weaker::Unprivileged { missing: machine.missing.join(", ") });
        }
        match machine.landlock {
            None => weaker.push(Weaker::NoLandlock),
            Some(abi) => {
                let later = LANDLOCK_SINCE.iter().filter(|(since, _)| *since > abi);
                let without: Vec<_> = later.map(|(_, what)| *what).collect();
                if !without.is_empty() {
                    weaker.push(Weaker::OldLandlock { abi, without: without.join(", ") });
                }
            }
        }
        if !machine.seccomp {
            weaker.push(Weaker::NoFilter);
        }
        let major: Vec<_> =
            weaker.iter().filter(|weaker| !weaker.is_minor()).map(ToString::to_string).collect();
        if demand == Demand::All && !major.is_empty() {
            return Err(format!(
                "a VMM can't be confined here as demanded: {}. Give the agent these rights, or ask for best effort",
                major.join("; ")
            ));
        }
        let namespaces = if own_user { machine.namespaces.clone() } else { Vec::new() };
        Ok(Self { own_user, namespaces, landlock: machine.landlock, filter: machine.seccomp, weaker })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn able() -> Capabilities {
        let namespaces = Namespace::ALL.to_vec();
        Capabilities { missing: Vec::new(), namespaces, landlock: Some(7), seccomp: true }
    }

    #[test]
    fn a_machine_that_can_do_all_leaves_nothing_out() {
        let measures = Measures::decide(&able(), Demand::All).unwrap();
        assert_eq!((able().weaker(), measures.namespaces.len()), (Vec::new(), 6));
        assert_eq!(measures.clone_flags().count_ones(), 6);
    }

    #[test]
    fn what_is_missing_is_refused_or_told_and_never_silent() {
        let unprivileged =
            Capabilities { missing: vec!["CAP_SETUID".to_owned()], namespaces: Vec::new(), ..able() };
        let no_landlock = Capabilities { landlock: None, ..able() };
        let no_filter = Capabilities { seccomp: false, ..able() };
        let no_network = Capabilities { namespaces: Namespace::ALL[..4].to_vec(), ..able() };
        for machine in [unprivileged, no_landlock, no_filter, no_network] {
            let refused = Measures::decide(&machine, Demand::All).unwrap_err();
            let measures = Measures::decide(&machine, Demand::BestEffort).unwrap();
            assert!(!measures.weaker.is_empty());
            assert!(measures.weaker.iter().all(|weaker| refused.contains(&weaker.to_string())), "{refused}");
        }
    }

    #[test]
    fn without_privileges_no_namespace_is_asked_for() {
        let machine = Capabilities { missing: vec!["CAP_SETUID".to_owned()], ..able() };
        assert_eq!(Measures::decide(&machine, Demand::BestEffort).unwrap().clone_flags(), 0);
    }

    #[test]
    fn an_older_landlock_is_told_and_no_reason_to_refuse() {
        let machine = Capabilities { landlock: Some(4), ..able() };
        let measures = Measures::decide(&machine, Demand::All).unwrap();
        let without = "commands to devices, signals and abstract sockets".to_owned();
        assert_eq!(measures.weaker, [Weaker::OldLandlock { abi: 4, without }]);
    }
}
