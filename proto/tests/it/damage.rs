//! Ways to damage a valid document, and the names of places in it.

use proptest::prelude::*;
use serde_json::{Value, json};

/// One change to a document, at a place that is chosen when it is applied.
#[derive(Debug, Clone)]
pub(crate) struct Damage {
    place: Place,
    change: Change,
}

#[derive(Debug, Clone)]
enum Place {
    At(String),
    Any(prop::sample::Index),
}

#[derive(Debug, Clone)]
enum Change {
    Remove,
    Replace(Value),
    Rename,
    AddUnknown,
}

pub(crate) fn any_damage() -> impl Strategy<Value = Damage> {
    let other = prop::sample::select(vec![
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1.5),
        json!(9_007_199_254_740_991_u64),
        json!(9_007_199_254_740_992_u64),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("a"),
        json!("A b"),
        json!("../../etc/passwd"),
        json!("10.0.0.0/24"),
        json!("10.0.0.1/24"),
        json!("sha256:00"),
        json!("2026-01-31T09:30:00Z"),
        json!([]),
        json!([{}]),
        json!({}),
        json!({ "mode": "nat" }),
    ]);
    let change = prop_oneof![
        1 => Just(Change::Remove),
        4 => other.prop_map(Change::Replace),
        1 => Just(Change::Rename),
        1 => Just(Change::AddUnknown),
    ];
    (any::<prop::sample::Index>(), change).prop_map(|(at, change)| Damage { place: Place::Any(at), change })
}

impl Damage {
    pub(crate) fn remove(pointer: &str) -> Self {
        Self { place: Place::At(pointer.to_owned()), change: Change::Remove }
    }

    pub(crate) fn apply(&self, document: &mut Value) {
        let members = members(document);
        if members.is_empty() {
            return;
        }
        let pointer = match &self.place {
            Place::At(pointer) => pointer,
            Place::Any(index) => index.get(&members),
        };
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let parent = document.pointer_mut(parent).unwrap().as_object_mut().unwrap();
        match &self.change {
            Change::Remove => drop(parent.remove(key)),
            Change::Replace(value) => drop(parent.insert(key.to_owned(), value.clone())),
            Change::Rename => {
                let value = parent.remove(key).unwrap();
                parent.insert(key.to_uppercase(), value);
            }
            Change::AddUnknown => drop(parent.insert(format!("{key}s"), json!(1))),
        }
    }
}

/// The JSON pointers of all object members, in no particular order.
pub(crate) fn members(document: &Value) -> Vec<String> {
    let mut found = Vec::new();
    walk(document, "", &mut |pointer, _, is_member| {
        if is_member {
            found.push(pointer.to_owned());
        }
    });
    found
}

/// The JSON pointers of all strings, numbers and booleans but the schema version.
pub(crate) fn scalars(document: &Value) -> Vec<String> {
    let mut found = Vec::new();
    walk(document, "", &mut |pointer, value, _| {
        if !value.is_object() && !value.is_array() {
            found.push(pointer.to_owned());
        }
    });
    found
}

fn walk(value: &Value, at: &str, visit: &mut impl FnMut(&str, &Value, bool)) {
    match value {
        Value::Object(members) => {
            for (key, value) in members {
                let pointer = format!("{at}/{key}");
                visit(&pointer, value, true);
                walk(value, &pointer, visit);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().enumerate() {
                let pointer = format!("{at}/{index}");
                visit(&pointer, value, false);
                walk(value, &pointer, visit);
            }
        }
        _ => {}
    }
}

/// `/tenants/0/pools/1/role` as errors write it: `tenants[0].pools[1].role`.
pub(crate) fn path_of(pointer: &str) -> String {
    let mut path = String::new();
    for step in pointer.split('/').skip(1) {
        if step.bytes().all(|b| b.is_ascii_digit()) {
            path.push_str(&format!("[{step}]"));
        } else {
            if !path.is_empty() {
                path.push('.');
            }
            path.push_str(step);
        }
    }
    path
}

/// The document's text with the member at `pointer` written twice.
pub(crate) fn with_repeated_key(document: &Value, pointer: &str) -> String {
    const MARK: &str = "the second time";
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let mut marked = document.clone();
    let parent = marked.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    let value = parent[key].to_string();
    parent.insert(MARK.to_owned(), json!(0));
    marked.to_string().replacen(&format!("\"{MARK}\":0"), &format!("\"{key}\":{value}"), 1)
}
