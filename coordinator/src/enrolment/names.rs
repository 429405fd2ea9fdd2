//! Which names a node's certificate carries besides the node's id.
//!
//! Clients of mvm check the identity, but others look at host names alone: a node must not be able to pass for the
//! coordinator or for another node. The id of every node is a DNS name of its certificate, and ids are single labels;
//! so a node gets no single label but its own id and `localhost`, whether or not a node of that name exists yet. A
//! bare host name is therefore left out; a full one is fine. What is not allowed is dropped and not refused, because
//! an agent asks for all that its machine is called.
//!
//! Of the rest a node gets what another source confirms as its own: the names in its join token, which an operator wrote,
//! the address that it enrols from, and what means "this machine" everywhere. Its word alone is not enough for any
//! other name or address: it could be another machine's. The names are fixed by the enrolment; a renewal may ask for
//! fewer, never for more.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use mvm_pki::CsrNames;
use mvm_proto::{NodeId, Problem};

use crate::init::is_dns_name;
use crate::records::FixedNames;

/// More DNS names and addresses than any honest node has.
const MAX_NAMES: usize = 16;

/// What belongs to the coordinator.
#[derive(Debug, Default)]
pub(super) struct Reserved {
    pub(super) dns: Vec<String>,
    pub(super) ips: Vec<IpAddr>,
}

/// Of the names asked for, those that any enrolment of `node_id` may have.
pub(super) fn allowed(asked: CsrNames, node_id: &NodeId, reserved: &Reserved) -> Result<FixedNames, Problem> {
    if asked.dns.len() + asked.ips.len() > MAX_NAMES {
        let detail = format!("the request asks for more than {MAX_NAMES} names");
        return Err(Problem::new(400, "too_many_names", detail, "Ask for fewer DNS names and addresses."));
    }
    if let Some(name) = asked.dns.iter().find(|name| name.contains('*')) {
        let detail = format!("the request asks for the wildcard {name:?}");
        return Err(Problem::new(400, "wildcard_name", detail, "Ask for whole names."));
    }
    let mut names = FixedNames::default();
    for name in asked.dns.iter().map(|name| plain(name)) {
        let own_id = name == node_id.as_str();
        if may_have_dns(&name, reserved) && !own_id && !names.dns.contains(&name) {
            names.dns.push(name);
        } else if !own_id {
            tracing::debug!(node = %node_id, %name, "left a name out of a certificate");
        }
    }
    names.ips = asked.ips;
    names.ips.retain(|ip| ip.is_loopback() || !reserved.ips.contains(ip));
    Ok(names)
}

/// Names for a join token, as an operator writes them: full DNS names and addresses, none of the coordinator's.
pub(super) fn for_token(names: &[String], reserved: &Reserved) -> Result<FixedNames, Problem> {
    let refused = |detail: String| {
        let advice = "Give full DNS names and addresses of the node.";
        Problem::new(422, "name_refused", detail, advice)
    };
    if names.len() > MAX_NAMES {
        return Err(refused(format!("a token may name at most {MAX_NAMES} DNS names and addresses")));
    }
    let mut granted = FixedNames::default();
    for name in names {
        let shown: String = name.chars().take(64).collect();
        match name.parse::<IpAddr>() {
            Ok(ip) if reserved.ips.contains(&ip) => {
                return Err(refused(format!("{ip} is an address of the coordinator")));
            }
            Ok(ip) => granted.ips.push(ip),
            Err(_) if is_dns_name(name) && may_have_dns(&plain(name), reserved) => {
                granted.dns.push(plain(name));
            }
            Err(_) => {
                return Err(refused(format!(
                    "{shown:?} is not a full DNS name or an address, or it is the coordinator's"
                )));
            }
        }
    }
    Ok(granted)
}

/// What a node may have of what it asks for: the token's names, the address that it came from, and this machine.
pub(super) fn granted(token: &FixedNames, address: IpAddr) -> FixedNames {
    let here = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into(), address.to_canonical()];
    FixedNames {
        dns: token.dns.iter().cloned().chain(["localhost".to_owned()]).collect(),
        ips: token.ips.iter().copied().chain(here).collect(),
    }
}

/// Of `asked`, what was fixed before.
pub(super) fn within(asked: FixedNames, fixed: &FixedNames) -> FixedNames {
    FixedNames {
        dns: asked.dns.into_iter().filter(|name| fixed.dns.contains(name)).collect(),
        ips: asked.ips.into_iter().filter(|ip| fixed.ips.contains(ip)).collect(),
    }
}

fn may_have_dns(name: &str, reserved: &Reserved) -> bool {
    // Some clients take an address that is written as a DNS name for the address.
    let full = name.contains('.') && name.parse::<IpAddr>().is_err();
    name == "localhost" || full && !reserved.dns.iter().any(|own| plain(own) == name)
}

/// As DNS compares names: without regard to case and to the root's dot.
fn plain(name: &str) -> String {
    name.trim_end_matches('.').to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(dns: &[&str], ips: &[&str]) -> CsrNames {
        let names = fixed(dns, ips);
        CsrNames { dns: names.dns, ips: names.ips }
    }

    fn fixed(dns: &[&str], ips: &[&str]) -> FixedNames {
        FixedNames {
            dns: dns.iter().map(|name| (*name).to_owned()).collect(),
            ips: ips.iter().map(|ip| ip.parse().unwrap()).collect(),
        }
    }

    fn given(names: CsrNames) -> Result<FixedNames, Problem> {
        let reserved = Reserved { dns: vec!["c.example".into()], ips: vec!["192.0.2.1".parse().unwrap()] };
        allowed(names, &"n1".parse().unwrap(), &reserved)
    }

    #[test]
    fn a_node_gets_its_own_names_but_never_the_coordinators() {
        let names = asked(
            &["N.example", "C.example", "c.example.", "localhost", "192.0.2.1"],
            &["192.0.2.1", "192.0.2.7", "127.0.0.1"],
        );
        assert_eq!(given(names).unwrap(), fixed(&["n.example", "localhost"], &["192.0.2.7", "127.0.0.1"]));
    }

    #[test]
    fn a_name_that_is_or_could_become_another_nodes_id_is_left_out() {
        let names = asked(&["n2", "N2", "n2.", "n1", "n1.example", "n1.example."], &[]);
        assert_eq!(given(names).unwrap(), fixed(&["n1.example"], &[]), "n1 is added to every certificate");
    }

    #[test]
    fn a_renewal_narrows_names_and_never_widens_them() {
        let before = fixed(&["n1.example", "localhost"], &["192.0.2.7"]);
        let more = fixed(&["n1.example", "bank.example"], &["192.0.2.7", "192.0.2.8"]);
        assert_eq!(within(more, &before), fixed(&["n1.example"], &["192.0.2.7"]));
    }

    #[test]
    fn wildcards_and_floods_of_names_are_refused() {
        assert_eq!(given(asked(&["*.example"], &[])).unwrap_err().code, "wildcard_name");
        assert_eq!(given(asked(&["n"; 17], &[])).unwrap_err().code, "too_many_names");
    }
}
