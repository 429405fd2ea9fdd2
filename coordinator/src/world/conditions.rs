//! The conditions of a node in its object's status. Pure.

use mvm_proto::Timestamp;
use mvm_proto::status::{Condition, ConditionKind, set_condition};

use super::NodeNews;
use super::drains::Drained;

/// What of its disk an instance may not fill before it is told.
const DISK_SHORT_PERCENT: u64 = 90;
/// What changes with every document, or is said by `Ready`.
const NOT_SHOWN: [ConditionKind; 2] = [ConditionKind::Converged, ConditionKind::SessionConnected];
/// What is told of a node that it does not tell in these words itself.
const OWN: [&str; 6] = ["Ready", "SingleMachine", "KVMAvailable", "DiskPressure", "MemoryPressure", DRAINED];
const DRAINED: &str = "Drained";

/// Takes over what the node said of itself last, with what follows from it. `conditions` are those from before.
pub(super) fn update(
    conditions: &mut Vec<Condition>,
    news: &NodeNews,
    drained: Option<Drained>,
    now: Timestamp,
) {
    // What it says no more holds no more; and whatever names a node makes up, there are never more than it says at once.
    conditions.retain(|known| {
        let is_told = news.conditions.iter().any(|told| told.r#type == known.r#type);
        is_told || OWN.contains(&known.r#type.as_str())
    });
    for condition in &news.conditions {
        if is_shown(condition) {
            set_condition(conditions, condition.clone());
        }
    }
    for condition in [kvm(news, now), disk(news, now), memory(news, now)].into_iter().flatten() {
        set_condition(conditions, condition);
    }
    match drained {
        None => conditions.retain(|condition| condition.r#type != DRAINED),
        Some(drained) => {
            let (status, reason, message) = match drained {
                Drained::Empty => ("True", "Empty", String::new()),
                Drained::NotHeard => ("False", "NotConnected", "it has not said yet what it has".to_owned()),
                Drained::Under(left) => ("False", "Draining", format!("{left} left")),
                Drained::Blocked(left) => ("False", "Blocked", format!("{left} stay: `mvm drain` says why")),
            };
            set_condition(conditions, new(DRAINED, status, reason, &message, now));
        }
    }
    let told = conditions.iter().any(|condition| condition.r#type == "SingleMachine");
    let single = match &news.second_machine {
        Some(message) => Some(new("SingleMachine", "False", "SecondMachine", message, now)),
        None => told.then(|| new("SingleMachine", "True", "OneMachine", "", now)),
    };
    single.into_iter().for_each(|condition| set_condition(conditions, condition));
}

/// Whether a condition of a node is one of its object's.
pub(super) fn is_shown(condition: &Condition) -> bool {
    !NOT_SHOWN.iter().any(|kind| condition.is(*kind))
}

fn new(kind: &str, status: &str, reason: &str, message: &str, now: Timestamp) -> Condition {
    Condition {
        r#type: kind.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        since: now.to_string(),
    }
}

fn kvm(news: &NodeNews, now: Timestamp) -> Option<Condition> {
    let accelerator = news.info.as_ref()?.accelerator.as_str();
    Some(match accelerator {
        "" => new("KVMAvailable", "Unknown", "NotTold", "the agent is still finding out", now),
        "kvm" => new("KVMAvailable", "True", "Accelerates", "", now),
        other => new("KVMAvailable", "False", "NotUsed", &format!("instances run on {other}"), now),
    })
}

fn disk(news: &NodeNews, now: Timestamp) -> Option<Condition> {
    let said = |kind| news.conditions.iter().find(|condition: &&Condition| condition.is(kind));
    if let Some(failed) = said(ConditionKind::DiskWritable).filter(|condition| condition.fails()) {
        return Some(new("DiskPressure", "True", &failed.reason, &failed.message, now));
    }
    let (usage, capacity) = (news.usage?, news.info.as_ref()?.capacity?);
    let full = capacity.disk_mib > 0
        && usage.disk_used_mib.saturating_mul(100) >= capacity.disk_mib.saturating_mul(DISK_SHORT_PERCENT);
    Some(if full {
        let message = format!("instances use at least {DISK_SHORT_PERCENT}% of {} MiB", capacity.disk_mib);
        new("DiskPressure", "True", "NearlyFull", &message, now)
    } else {
        new("DiskPressure", "False", "Enough", "", now)
    })
}

fn memory(news: &NodeNews, now: Timestamp) -> Option<Condition> {
    let told = news.conditions.iter().find(|condition| condition.is(ConditionKind::MemoryAvailable))?;
    let status = if told.fails() { "True" } else { "False" };
    Some(new("MemoryPressure", status, &told.reason, &told.message, now))
}

#[cfg(test)]
mod tests {
    use mvm_proto::status::{Capacity, NodeInfo, Usage};

    use super::*;

    fn now() -> Timestamp {
        Timestamp::from_unix_ms(0)
    }

    fn shown(news: &NodeNews) -> Vec<(String, String)> {
        let mut conditions = Vec::new();
        update(&mut conditions, news, None, now());
        conditions.into_iter().map(|one| (one.r#type, one.status)).collect()
    }

    fn pair(kind: &str, status: &str) -> (String, String) {
        (kind.to_owned(), status.to_owned())
    }

    #[test]
    fn pressure_and_kvm_follow_from_what_the_agent_says() {
        let capacity = Some(Capacity { disk_mib: 1000, ..Capacity::default() });
        let info = NodeInfo { accelerator: "tcg".to_owned(), capacity, ..NodeInfo::default() };
        let condition = |kind, holds| Condition::new(kind, holds, "Why", "", now());
        let used = |disk_used_mib| Some(Usage { disk_used_mib, ..Usage::default() });
        let mut news = NodeNews {
            info: Some(info),
            usage: used(899),
            conditions: vec![
                condition(ConditionKind::MemoryAvailable, false),
                condition(ConditionKind::Converged, false),
            ],
            ..NodeNews::default()
        };
        let expected = [
            pair("MemoryAvailable", "False"),
            pair("KVMAvailable", "False"),
            pair("DiskPressure", "False"),
            pair("MemoryPressure", "True"),
        ];
        assert_eq!(shown(&news), expected);
        news.usage = used(900);
        assert!(shown(&news).contains(&pair("DiskPressure", "True")));
        (news.usage, news.conditions) = (used(1), vec![condition(ConditionKind::DiskWritable, false)]);
        assert!(shown(&news).contains(&pair("DiskPressure", "True")));
    }

    #[test]
    fn a_second_machine_is_told_until_it_is_gone() {
        let mut conditions = Vec::new();
        let mut news = NodeNews { second_machine: Some("b at 10.0.0.2".to_owned()), ..NodeNews::default() };
        update(&mut conditions, &news, None, now());
        assert_eq!(
            (conditions[0].status.as_str(), conditions[0].message.as_str()),
            ("False", "b at 10.0.0.2")
        );
        news.second_machine = None;
        update(&mut conditions, &news, None, now());
        assert_eq!((conditions.len(), conditions[0].status.as_str()), (1, "True"));
        assert_eq!(shown(&news), []);
    }

    #[test]
    fn what_a_node_says_no_more_is_not_shown_and_names_that_it_makes_up_do_not_add_up() {
        let mut conditions = vec![new("Ready", "True", "Connected", "", now())];
        for round in 0..3 {
            let told = vec![new(&format!("Odd{round}"), "True", "Why", "", now())];
            update(&mut conditions, &NodeNews { conditions: told, ..NodeNews::default() }, None, now());
        }
        let kinds: Vec<_> = conditions.iter().map(|condition| condition.r#type.as_str()).collect();
        assert_eq!(kinds, ["Ready", "Odd2"]);
    }
}
