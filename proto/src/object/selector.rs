//! Selectors: which objects of a list are meant.

use std::str::FromStr;

use serde_json::Value;

use super::{Object, check_label_key, check_label_value};
use crate::placement::Labels;

/// The most requirements of one selector.
const MAX_REQUIREMENTS: usize = 32;
/// The longest selector: each object of a list is held against all of it.
const MAX_SELECTOR_BYTES: usize = 4096;

/// Why a text is no selector.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SelectorError(String);

/// `team=search,tier!=gold,env in (a,b),env notin (c),gpu,!spot`: all of them must hold. Empty selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LabelSelector(Vec<Requirement>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    wants: Wants,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Wants {
    Present,
    Absent,
    OneOf(Vec<String>),
    NoneOf(Vec<String>),
}

impl LabelSelector {
    #[must_use]
    pub fn matches(&self, labels: &Labels) -> bool {
        self.0.iter().all(|Requirement { key, wants }| {
            let value = labels.get(key);
            match wants {
                Wants::Present => value.is_some(),
                Wants::Absent => value.is_none(),
                Wants::OneOf(values) => value.is_some_and(|value| values.contains(value)),
                Wants::NoneOf(values) => value.is_none_or(|value| !values.contains(value)),
            }
        })
    }
}

impl FromStr for LabelSelector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        check_length(text)?;
        let parts: Vec<&str> =
            split(text).into_iter().map(str::trim).filter(|part| !part.is_empty()).collect();
        if parts.len() > MAX_REQUIREMENTS {
            return Err(SelectorError(format!("a selector has at most {MAX_REQUIREMENTS} requirements")));
        }
        parts.into_iter().map(requirement).collect::<Result<_, _>>().map(Self)
    }
}

fn check_length(text: &str) -> Result<(), SelectorError> {
    if text.len() > MAX_SELECTOR_BYTES {
        return Err(SelectorError(format!("a selector has at most {MAX_SELECTOR_BYTES} bytes")));
    }
    Ok(())
}

/// Divides at the commas that are in no parentheses.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut begin, mut depth) = (Vec::new(), 0, 0u32);
    for (at, letter) in text.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(&text[begin..at]);
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[begin..]);
    parts
}

fn requirement(text: &str) -> Result<Requirement, SelectorError> {
    let set = |text: &str| -> Option<Vec<String>> {
        let inside = text.trim().strip_prefix('(')?.strip_suffix(')')?;
        Some(inside.split(',').map(|value| value.trim().to_owned()).collect())
    };
    let one = |value: &str| vec![value.trim().trim_start_matches('=').trim().to_owned()];
    let (key, wants) = if let Some((key, values)) = text.split_once(" notin ") {
        (key, set(values).map(Wants::NoneOf))
    } else if let Some((key, values)) = text.split_once(" in ") {
        (key, set(values).map(Wants::OneOf))
    } else if let Some((key, value)) = text.split_once("!=") {
        (key, Some(Wants::NoneOf(one(value))))
    } else if let Some((key, value)) = text.split_once('=') {
        (key, Some(Wants::OneOf(one(value))))
    } else if let Some(key) = text.strip_prefix('!') {
        (key, Some(Wants::Absent))
    } else {
        (text, Some(Wants::Present))
    };
    let key = key.trim();
    let refuse = |rule: &str| SelectorError(format!("{}: {rule}", crate::json::quote(text)));
    let wants = wants.ok_or_else(|| refuse("must be `key in (a,b)`"))?;
    check_label_key(key).map_err(|rule| refuse(&format!("the key {rule}")))?;
    if let Wants::OneOf(values) | Wants::NoneOf(values) = &wants {
        for value in values {
            check_label_value(value).map_err(|rule| refuse(&format!("the value {rule}")))?;
        }
    }
    Ok(Requirement { key: key.to_owned(), wants })
}

/// `spec.cordoned=true,status.state!=Ready`: fields by their paths, compared as text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FieldSelector(Vec<(String, bool, String)>);

impl FieldSelector {
    #[must_use]
    pub fn matches(&self, object: &Object) -> bool {
        let Ok(object) = serde_json::to_value(object) else { return self.0.is_empty() };
        self.0.iter().all(|(path, equal, wanted)| (shown(&object, path) == *wanted) == *equal)
    }

    /// Whether an object of this name may match, whatever else it has.
    #[must_use]
    pub fn may_match_name(&self, name: &str) -> bool {
        let of_name = self.0.iter().filter(|(path, ..)| path == "metadata.name");
        of_name.into_iter().all(|(_, equal, wanted)| (name == wanted) == *equal)
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

fn shown(object: &Value, path: &str) -> String {
    let found = path.split('.').try_fold(object, |value, step| value.get(step));
    match found {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

impl FromStr for FieldSelector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        check_length(text)?;
        let parts: Vec<&str> = text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
        if parts.len() > MAX_REQUIREMENTS {
            return Err(SelectorError(format!("a selector has at most {MAX_REQUIREMENTS} requirements")));
        }
        let read = |part: &str| {
            let (path, equal, value) = match part.split_once("!=") {
                Some((path, value)) => (path, false, value),
                None => {
                    let (path, value) = part.split_once('=').ok_or_else(|| {
                        SelectorError(format!(
                            "{}: must be `field=value` or `field!=value`",
                            crate::json::quote(part)
                        ))
                    })?;
                    (path, true, value.trim_start_matches('='))
                }
            };
            let path = path.trim();
            if !["metadata.", "spec.", "status."].iter().any(|start| path.starts_with(start)) {
                let rule = "the field must begin with `metadata.`, `spec.` or `status.`";
                return Err(SelectorError(format!("{}: {rule}", crate::json::quote(part))));
            }
            Ok((path.to_owned(), equal, value.trim().to_owned()))
        };
        parts.into_iter().map(read).collect::<Result<_, _>>().map(Self)
    }
}
