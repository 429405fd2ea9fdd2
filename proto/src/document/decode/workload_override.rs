//! Reads what a pool runs in place of what its image says.

use std::collections::BTreeMap;

use super::rules;
use crate::document::{
    MAX_ENV_NAME_BYTES, MAX_GUEST_PATH_BYTES, MAX_USER_ID, MAX_USER_NAME_BYTES, MAX_WORKLOAD_ARGS,
    MAX_WORKLOAD_BYTES, MAX_WORKLOAD_ENV, MAX_WORKLOAD_TEXT_BYTES, User, WorkloadOverride,
};
use crate::json::{Json, Node};

use super::super::MAX_COMMAND_WORDS;

const WORKLOAD: &[&str] = &["command", "args", "env", "working_dir", "user"];

pub(super) fn workload_override(node: &Node<'_, '_>) -> Option<WorkloadOverride> {
    let fields = node.fields(WORKLOAD)?;
    let command = fields.maybe("command", |node| command(&node));
    let args = fields.maybe("args", |node| words(&node, MAX_WORKLOAD_ARGS));
    let env = fields.or("env", BTreeMap::new(), |node| env(&node));
    let working_dir = fields.maybe("working_dir", |node| working_dir(&node));
    let user = fields.maybe("user", |node| user(&node));
    let workload = WorkloadOverride {
        command: command?,
        args: args?,
        env: env?,
        working_dir: working_dir?,
        user: user?,
    };
    if workload.is_empty() {
        return node.refuse(format_args!("must have at least one of {}", WORKLOAD.join(", ")));
    }
    let bytes = workload.bytes();
    if bytes > MAX_WORKLOAD_BYTES {
        let expected =
            format_args!("must have at most {MAX_WORKLOAD_BYTES} bytes in all words, names and values");
        return node.refuse_as(expected, format_args!("{bytes} bytes"));
    }
    Some(workload)
}

fn command(node: &Node<'_, '_>) -> Option<Vec<String>> {
    let words = words(node, MAX_COMMAND_WORDS)?;
    match words.first() {
        Some(program) if !program.is_empty() => Some(words),
        _ => node.refuse("must begin with a program"),
    }
}

fn words(node: &Node<'_, '_>, most: usize) -> Option<Vec<String>> {
    let items = node.items()?;
    if items.len() > most {
        return node.refuse(format_args!("must be at most {most} strings"));
    }
    // Every word is looked at, so that all mistakes are told.
    let words: Vec<_> = items.map(|item| text(&item)).collect();
    words.into_iter().collect()
}

/// What can be passed to a program.
fn text(node: &Node<'_, '_>) -> Option<String> {
    let text = node.text()?;
    if text.len() > MAX_WORKLOAD_TEXT_BYTES || text.contains('\0') {
        let expected = format_args!("must be at most {MAX_WORKLOAD_TEXT_BYTES} bytes, none of them zero");
        return node.refuse(expected);
    }
    Some(text.to_owned())
}

fn env(node: &Node<'_, '_>) -> Option<BTreeMap<String, String>> {
    let members = node.entries()?;
    if members.len() > MAX_WORKLOAD_ENV {
        return node.refuse(format_args!("must be at most {MAX_WORKLOAD_ENV} variables"));
    }
    let variable = |(name, node): (&str, Node<'_, '_>)| {
        let value = text(&node);
        if !is_variable(name) {
            let expected = format_args!(
                "must be named by 1 to {MAX_ENV_NAME_BYTES} letters, digits and underscores, not beginning with a digit"
            );
            return node.refuse_as(expected, "another name");
        }
        Some((name.to_owned(), value?))
    };
    let variables: Vec<_> = members.map(variable).collect();
    variables.into_iter().collect()
}

fn is_variable(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    (1..=MAX_ENV_NAME_BYTES).contains(&name.len())
        && name.bytes().all(plain)
        && !name.starts_with(|first: char| first.is_ascii_digit())
}

fn working_dir(node: &Node<'_, '_>) -> Option<String> {
    let text = rules::printable(node, MAX_GUEST_PATH_BYTES)?;
    let plain = |steps: &str| steps.is_empty() || rules::is_plain(steps);
    if text.strip_prefix('/').is_some_and(plain) {
        Some(text)
    } else {
        node.refuse("must be an absolute path without `.`, `..` or empty steps")
    }
}

fn user(node: &Node<'_, '_>) -> Option<User> {
    let Json::Str(name) = node.value() else {
        return node.integer32(0..=MAX_USER_ID).map(User::Id);
    };
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
    let begins = name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
    if begins && name.len() <= MAX_USER_NAME_BYTES && name.bytes().all(plain) {
        Some(User::Name(name.to_string()))
    } else {
        node.refuse(format_args!(
            "must be a number, or a name of 1 to {MAX_USER_NAME_BYTES} of a-z, A-Z, 0-9, `_`, `.` and `-` that begins with a \
             letter or `_`"
        ))
    }
}

#[cfg(test)]
mod tests;
