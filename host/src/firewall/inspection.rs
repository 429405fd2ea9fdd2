//! Whether the rules are ours, whole and unchanged, and what they counted.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use mvm_proto::{InstanceId, TenantId};
use serde::{Deserialize, Serialize};

use super::dump::Found;
use super::elements;
use super::packet::Reason;
use super::ruleset::{Element, Family, Key, Placed, Table};
use super::{bridge, inet};
use crate::network::{AddressRange, Port, TenantNet};

/// What a counter says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    pub packets: u64,
    pub bytes: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
    }
}

/// What passed, seen from the tenant or the instance. Counters begin again when a set had to be made anew.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    pub sent: Tally,
    pub received: Tally,
}

/// The firewall as it was found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inspection {
    /// How it differs from what it should be; empty when it does not.
    pub faults: Vec<Fault>,
    /// What was dropped, for every reason there is.
    pub dropped: BTreeMap<Reason, Tally>,
    /// What the host routed to and from each tenant's network, and what it exchanged with it itself.
    pub tenants: BTreeMap<TenantId, Traffic>,
    /// Every frame that each instance sent and was sent.
    pub instances: BTreeMap<InstanceId, Traffic>,
}

impl Inspection {
    #[must_use]
    pub fn intact(&self) -> bool {
        self.faults.is_empty()
    }
}

/// One way in which the firewall is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault(pub String);

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// More faults than this are not listed one by one: a flushed set of a thousand tenants is one piece of news.
const LISTED_FAULTS: usize = 32;

/// What was found of all tables.
pub(super) type FoundTables = BTreeMap<Family, Option<Found>>;

pub(super) fn inspect<'a>(
    found: &FoundTables,
    nets: impl Iterator<Item = &'a TenantNet> + Clone,
    ports: impl Iterator<Item = &'a Port> + Clone,
    denied: &[AddressRange],
) -> Inspection {
    let wanted = elements::all(nets.clone(), ports.clone(), denied);
    let mut inspection = Inspection::default();
    for table in elements::tables() {
        match found.get(&table.family).and_then(Option::as_ref) {
            Some(found) => compare(&table, found, &wanted, &mut inspection.faults),
            None => inspection.faults.push(Fault(format!("{} is missing", title(table.family)))),
        }
    }
    let more = inspection.faults.len().saturating_sub(LISTED_FAULTS);
    inspection.faults.truncate(LISTED_FAULTS);
    if more > 0 {
        inspection.faults.push(Fault(format!("and {more} more")));
    }
    inspection.dropped = Reason::ALL.into_iter().map(|reason| (reason, dropped(found, reason))).collect();
    let tally = |family, set, element: &Element| {
        let found = found.get(&family)?.as_ref()?.sets.iter().find(|found| found.set.name == set)?;
        found.elements.get(element).copied()
    };
    for net in nets {
        let bridge = Key::default().interface(&net.bridge()).element();
        let traffic = inspection.tenants.entry(net.tenant.clone()).or_default();
        traffic.sent += tally(Family::Inet, inet::SENT, &bridge).unwrap_or_default();
        traffic.received += tally(Family::Inet, inet::RECEIVED, &bridge).unwrap_or_default();
    }
    for port in ports {
        let traffic = inspection.instances.entry(port.instance.clone()).or_default();
        for placed in elements::of_port(port) {
            let counted = tally(placed.family, placed.set, &placed.element).unwrap_or_default();
            match placed.set {
                bridge::PORTS => traffic.sent += counted,
                bridge::DELIVERED => traffic.received += counted,
                _ => {}
            }
        }
    }
    inspection
}

fn dropped(found: &FoundTables, reason: Reason) -> Tally {
    let mut sum = Tally::default();
    for found in found.values().flatten() {
        for ((_, name), tally) in &found.objects {
            if name == reason.name() {
                sum += *tally;
            }
        }
    }
    sum
}

fn title(family: Family) -> String {
    match family {
        Family::Inet => "table inet mvm".to_owned(),
        Family::Bridge => "table bridge mvm".to_owned(),
        Family::Arp => "table arp mvm".to_owned(),
    }
}

fn compare(table: &Table, found: &Found, wanted: &BTreeSet<Placed>, faults: &mut Vec<Fault>) {
    let title = title(table.family);
    let mut fault = |text: String| faults.push(Fault(format!("{title}: {text}")));
    if found.flags != 0 {
        fault(format!("has flags {:#x}, which may disable it", found.flags));
    }
    for chain in &table.chains {
        match found.chains.iter().find(|found| found.name == chain.name) {
            None => fault(format!("chain {} is missing", chain.name)),
            Some(other) if other.base != chain.base => {
                fault(format!("chain {} has another hook", chain.name));
            }
            Some(other) if other.rules != chain.rules => {
                let at =
                    chain.rules.iter().zip(&other.rules).take_while(|(ours, found)| ours == found).count();
                let (ours, theirs) = (chain.rules.len(), other.rules.len());
                let text = format!(
                    "chain {} differs from rule {} on ({theirs} rules, not {ours})",
                    chain.name,
                    at + 1
                );
                fault(text);
            }
            Some(_) => {}
        }
    }
    for other in &found.chains {
        if table.chains.iter().all(|chain| chain.name != other.name) {
            fault(format!("chain {} is not ours", other.name));
        }
    }
    for counter in &table.counters {
        if !found
            .objects
            .keys()
            .any(|(kind, name)| *kind == super::changes::OBJECT_COUNTER && name == counter)
        {
            fault(format!("counter {counter} is missing"));
        }
    }
    for (kind, name) in found.objects.keys() {
        if *kind != super::changes::OBJECT_COUNTER || !table.counters.contains(name) {
            fault(format!("object {name} is not ours"));
        }
    }
    for other in &found.sets {
        if table.sets.iter().all(|set| set.name != other.set.name) {
            fault(format!("set {} is not ours", other.set.name));
        }
    }
    for set in &table.sets {
        let Some(other) = found.sets.iter().find(|found| found.set.name == set.name) else {
            fault(format!("set {} is missing", set.name));
            continue;
        };
        if other.set != *set {
            fault(format!("set {} has other properties", set.name));
        }
        let wanted: BTreeSet<_> = wanted
            .iter()
            .filter(|placed| placed.family == table.family && placed.set == set.name)
            .map(|placed| &placed.element)
            .collect();
        for element in wanted.iter().filter(|element| !other.elements.contains_key(**element)) {
            fault(format!("set {} lacks {}", set.name, shown(element)));
        }
        for element in other.elements.keys().filter(|element| !wanted.contains(*element)) {
            fault(format!("set {} has {}, which is not ours", set.name, shown(element)));
        }
    }
}

/// A key's bytes with what can be read in them.
fn shown(element: &Element) -> String {
    let printable = |byte: &u8| if byte.is_ascii_graphic() { char::from(*byte) } else { '.' };
    let text: String = element.key.iter().map(printable).collect();
    let hex: String = element.key.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{} ({hex})", text.trim_end_matches('.'))
}
