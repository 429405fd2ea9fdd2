//! What Firecracker allows when, and how it says no. Pure: files and processes are the machine's.

use serde_json::{Value, json};

pub const MAX_VCPUS: u64 = 32;

/// What is said to one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub body: Option<String>,
}

impl Answer {
    #[must_use]
    pub fn done() -> Self {
        Self { status: 204, body: None }
    }

    #[must_use]
    pub fn value(value: &Value) -> Self {
        Self { status: 200, body: Some(value.to_string()) }
    }

    #[must_use]
    pub fn fault(status: u16, message: &str) -> Self {
        Self { status, body: Some(json!({ "fault_message": message }).to_string()) }
    }

    #[must_use]
    pub fn refused(message: &str) -> Self {
        Self::fault(400, message)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    NotStarted,
    Running,
    Paused,
}

impl Phase {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::NotStarted => "Not started",
            Phase::Running => "Running",
            Phase::Paused => "Paused",
        }
    }
}

pub const AFTER_START: &str = "The requested operation is not supported after starting the microVM.";
pub const BEFORE_START: &str = "The requested operation is not supported before starting the microVM.";
pub const LOAD_TOO_LATE: &str =
    "Loading a microVM snapshot not allowed after configuring boot-specific resources.";

/// What a request may do at this point of a process's life, before its content is looked at.
pub fn timing(method: &str, path: &str, phase: Phase, configured: bool) -> Result<(), String> {
    let started = phase != Phase::NotStarted;
    let top = path.trim_start_matches('/').split('/').next().unwrap_or_default();
    match (method, top) {
        ("GET", "" | "version" | "machine-config" | "vm" | "balloon" | "mmds") => Ok(()),
        ("PUT", "actions" | "mmds") => Ok(()),
        ("PUT", "snapshot") if path == "/snapshot/load" && !started && configured => {
            Err(LOAD_TOO_LATE.into())
        }
        ("PUT", "snapshot") if path == "/snapshot/load" => before(started),
        ("PUT", "snapshot") if path == "/snapshot/create" => after(started),
        (
            "PUT",
            "machine-config" | "boot-source" | "drives" | "network-interfaces" | "vsock" | "entropy"
            | "balloon" | "cpu-config" | "pmem" | "serial" | "logger" | "metrics",
        ) => before(started),
        ("PATCH", "vm" | "drives" | "network-interfaces" | "balloon") => after(started),
        ("PATCH", "machine-config") => before(started),
        ("PATCH", "mmds") => Ok(()),
        _ => {
            let path = path.trim_start_matches('/');
            Err(format!("Invalid request method and/or path: {method} {path}."))
        }
    }
}

fn before(started: bool) -> Result<(), String> {
    if started { Err(AFTER_START.to_owned()) } else { Ok(()) }
}

fn after(started: bool) -> Result<(), String> {
    if started { Ok(()) } else { Err(BEFORE_START.to_owned()) }
}

/// The body of a request, with no field that is not known and none missing that is required.
pub fn body(bytes: &[u8], required: &[&str], optional: &[&str]) -> Result<Value, String> {
    let value: Value = serde_json::from_slice(bytes).map_err(|error| unreadable(&error.to_string()))?;
    let Some(fields) = value.as_object() else { return Err(unreadable("invalid type, expected a map")) };
    if let Some(missing) = required.iter().find(|name| !fields.contains_key(**name)) {
        return Err(unreadable(&format!("missing field `{missing}`")));
    }
    let known = |name: &String| required.contains(&name.as_str()) || optional.contains(&name.as_str());
    if let Some(unknown) = fields.keys().find(|name| !known(name)) {
        return Err(unreadable(&format!("unknown field `{unknown}`")));
    }
    Ok(value)
}

fn unreadable(what: &str) -> String {
    format!("An error occurred when deserializing the json body of a request: {what}.")
}

/// A text field that was required.
#[must_use]
pub fn text(value: &Value, name: &str) -> String {
    value.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// The id in the path and the one in the body are one.
pub fn same_id(path: &str, value: &Value, field: &str) -> Result<String, String> {
    let in_path = path.rsplit('/').next().unwrap_or_default();
    let in_body = text(value, field);
    if in_path == in_body {
        return Ok(in_body);
    }
    Err(format!("The id from the path [{in_path}] does not match the id from the body [{in_body}]!"))
}

/// The bug of 1.16.0 and 1.16.1: a resume without a snapshot since the pause.
#[must_use]
pub fn loses_vsock(version: &str, snapshot_since_pause: bool) -> bool {
    matches!(version, "1.16.0" | "1.16.1") && !snapshot_since_pause
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_ends_with_the_start_and_the_rest_begins_there() {
        for path in ["/machine-config", "/boot-source", "/drives/a", "/vsock", "/entropy", "/logger"] {
            assert_eq!(timing("PUT", path, Phase::NotStarted, false), Ok(()));
            assert_eq!(timing("PUT", path, Phase::Running, true), Err(AFTER_START.into()));
        }
        for (method, path) in [("PATCH", "/vm"), ("PUT", "/snapshot/create"), ("PATCH", "/drives/a")] {
            assert_eq!(timing(method, path, Phase::NotStarted, true), Err(BEFORE_START.into()));
            assert_eq!(timing(method, path, Phase::Paused, true), Ok(()));
        }
        assert_eq!(timing("PUT", "/snapshot/load", Phase::NotStarted, false), Ok(()));
        assert_eq!(timing("PUT", "/snapshot/load", Phase::NotStarted, true), Err(LOAD_TOO_LATE.into()));
        assert!(timing("PUT", "/nothing", Phase::Running, true).unwrap_err().contains("Invalid request"));
        assert!(timing("DELETE", "/vm", Phase::Running, true).unwrap_err().contains("Invalid request"));
    }

    #[test]
    fn the_wedge_is_in_two_versions_and_only_without_a_snapshot() {
        assert!(loses_vsock("1.16.1", false) && loses_vsock("1.16.0", false));
        assert!(
            !loses_vsock("1.16.1", true) && !loses_vsock("1.15.1", false) && !loses_vsock("1.17.0", false)
        );
    }
}
