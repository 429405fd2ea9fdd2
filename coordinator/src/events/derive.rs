//! What happened, from what is said of an object before and after. Pure: a status that is written again makes no event.

use std::collections::BTreeMap;

use mvm_proto::object::{EventType, Object, PoolObjectStatus};
use mvm_proto::status::Condition;
use serde::Deserialize as _;
use serde_json::Value;

use super::Happening;

/// What comes and goes with every start of an instance, and is told by the nodes' own events.
const PASSING: [&str; 2] = ["Starting", "Preparing"];
/// Nodes that a message names.
const NODES_NAMED: usize = 5;

/// What happened to an object whose status becomes `after`.
pub(crate) fn happenings(object: &Object, after: &Value) -> Vec<Happening> {
    let mut found = Vec::new();
    if object.kind == "Pool" {
        found.extend(scaled(&object.status, after));
        found.extend(scheduled(&object.status, after));
    }
    let before = conditions(&object.status);
    for condition in conditions(after) {
        let known = before.iter().find(|known| known.r#type == condition.r#type);
        found.extend(of_condition(known, &condition));
    }
    found
}

fn conditions(status: &Value) -> Vec<Condition> {
    let conditions = status.get("conditions");
    conditions.and_then(|conditions| Vec::deserialize(conditions).ok()).unwrap_or_default()
}

/// Another count of a pool that is scaled.
fn scaled(before: &Value, after: &Value) -> Option<Happening> {
    let running = |status: &Value| status.pointer("/scale/running").and_then(Value::as_u64);
    let (had, has) = (running(before)?, running(after)?);
    let reason = if has > had { "ScaledUp" } else { "ScaledDown" };
    let load = after.pointer("/scale/load").map(|load| format!(", the load is {load}")).unwrap_or_default();
    let message = format!("from {had} to {has} running{load}");
    (had != has).then(|| Happening { r#type: EventType::Normal, reason: reason.to_owned(), message })
}

/// Instances that got a place on a node.
fn scheduled(before: &Value, after: &Value) -> Option<Happening> {
    let wanted = |status: &Value| -> BTreeMap<String, u32> {
        let placed = PoolObjectStatus::deserialize(status).map(|status| status.placed).unwrap_or_default();
        let all = placed.into_iter().map(|placed| {
            let counts = placed.wanted;
            let sum = counts.running.saturating_add(counts.warm).saturating_add(counts.sleeping);
            (placed.node.to_string(), sum)
        });
        all.collect()
    };
    let had = wanted(before);
    let more: Vec<(String, u32)> = wanted(after)
        .into_iter()
        .filter_map(|(node, count)| {
            let more = count.saturating_sub(had.get(&node).copied().unwrap_or(0));
            (more > 0).then_some((node, more))
        })
        .collect();
    let shown = more.iter().take(NODES_NAMED).map(|(node, count)| format!("{count} on {node}"));
    let mut message = shown.collect::<Vec<_>>().join(", ");
    if more.len() > NODES_NAMED {
        message.push_str(&format!(" (and {} nodes more)", more.len() - NODES_NAMED));
    }
    let reason = "Scheduled".to_owned();
    (!more.is_empty()).then_some(Happening { r#type: EventType::Normal, reason, message })
}

/// A condition that is of another kind than before; of those that are there for the first time only what is bad, and that
/// the object is ready.
fn of_condition(before: Option<&Condition>, after: &Condition) -> Option<Happening> {
    let is_same = |before: &Condition| (&before.status, &before.reason) == (&after.status, &after.reason);
    let is_ready = after.r#type == "Ready";
    let is_bad = is_bad(after);
    // How a rollout stands is told once: by `Progressing`.
    if after.r#type == "RolledOut" || before.is_some_and(is_same) || PASSING.contains(&after.reason.as_str())
    {
        return None;
    }
    // What everything is as long as nothing happens, and what is said of `Ready` anyway.
    let passes_unnoticed = match before {
        None => !is_bad && !is_ready,
        Some(_) => after.r#type == "Placed" && !is_bad,
    };
    if passes_unnoticed {
        return None;
    }
    let r#type = if is_bad { EventType::Warning } else { EventType::Normal };
    let reason = if is_ready && !is_bad && after.reason == "AllPlaced" { "Ready" } else { &after.reason };
    let message = match after.message.as_str() {
        "" if is_ready && !is_bad => String::new(),
        "" => format!("{} is {}", after.r#type, after.status),
        text if is_ready => text.to_owned(),
        text => format!("{} is {}: {text}", after.r#type, after.status),
    };
    Some(Happening { r#type, reason: reason.to_owned(), message })
}

/// Pressure and deletion are bad where they hold, all else where it does not. That no KVM is there is how a machine is.
fn is_bad(condition: &Condition) -> bool {
    match condition.r#type.as_str() {
        "KVMAvailable" | "Deleting" => false,
        kind if kind.ends_with("Pressure") => condition.status == "True",
        _ => condition.status != "True",
    }
}

#[cfg(test)]
mod tests {
    use mvm_proto::object::Metadata;
    use serde_json::json;

    use super::*;

    fn object(kind: &str, status: Value) -> Object {
        let metadata: Metadata = serde_json::from_value(json!({ "name": "web" })).unwrap();
        Object {
            api_version: "mvm/v1".to_owned(),
            kind: kind.to_owned(),
            metadata,
            spec: Value::Null,
            status,
        }
    }

    fn pool(placed: &[(&str, u32)], ready: (&str, &str, &str)) -> Value {
        let placed =
            placed.iter().map(|(node, running)| json!({ "node": node, "wanted": { "running": running } }));
        json!({
            "placed": placed.collect::<Vec<_>>(),
            "conditions": [{ "type": "Ready", "status": ready.0, "reason": ready.1, "message": ready.2, "since": "" }],
        })
    }

    fn told(kind: &str, before: Value, after: &Value) -> Vec<(EventType, String, String)> {
        let found = happenings(&object(kind, before), after);
        found.into_iter().map(|one| (one.r#type, one.reason, one.message)).collect()
    }

    fn one(r#type: EventType, reason: &str, message: &str) -> (EventType, String, String) {
        (r#type, reason.to_owned(), message.to_owned())
    }

    #[test]
    fn places_that_are_new_are_told_and_those_that_go_are_not() {
        let before = pool(&[("n1", 3), ("n2", 1)], ("True", "AllPlaced", ""));
        let after = pool(&[("n1", 1), ("n2", 2), ("n3", 4)], ("True", "AllPlaced", ""));
        assert_eq!(
            told("Pool", before.clone(), &after),
            [one(EventType::Normal, "Scheduled", "1 on n2, 4 on n3")]
        );
        assert_eq!(told("Pool", after, &before), [one(EventType::Normal, "Scheduled", "2 on n1")]);
    }

    #[test]
    fn a_condition_of_another_kind_is_told_once_and_words_that_change_are_not() {
        let lacks = |message: &str| pool(&[], ("False", "Unplaced", message));
        let ready = pool(&[], ("True", "AllPlaced", ""));
        assert_eq!(
            told("Pool", ready.clone(), &lacks("no room")),
            [one(EventType::Warning, "Unplaced", "no room")]
        );
        assert_eq!(told("Pool", lacks("no room"), &lacks("no node")), []);
        assert_eq!(told("Pool", lacks("no room"), &ready), [one(EventType::Normal, "Ready", "")]);
        assert_eq!(told("Pool", ready, &pool(&[], ("False", "Starting", "2 of 3 run"))), []);
    }

    #[test]
    fn of_what_is_said_for_the_first_time_only_what_is_bad_is_told() {
        let condition = |kind: &str, status: &str, reason: &str| json!({ "type": kind, "status": status, "reason": reason, "message": "", "since": "" });
        let after = json!({ "conditions": [
            condition("Ready", "True", "Connected"),
            condition("DriverReady", "True", "Works"),
            condition("DiskPressure", "False", "Enough"),
            condition("KVMAvailable", "False", "NotUsed"),
            condition("MemoryPressure", "True", "Short"),
            condition("DnsReady", "False", "NoResolver"),
        ] });
        let expected = [
            one(EventType::Normal, "Connected", ""),
            one(EventType::Warning, "Short", "MemoryPressure is True"),
            one(EventType::Warning, "NoResolver", "DnsReady is False"),
        ];
        assert_eq!(told("Node", Value::Null, &after), expected);
        assert_eq!(told("Node", after.clone(), &after), []);
    }
}
