//! Errors as people and programs receive them: `application/problem+json` (RFC 9457) with a stable `code`.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub const PROBLEM_MEDIA_TYPE: &str = "application/problem+json";

/// Where gRPC carries a problem beside its status.
pub const PROBLEM_METADATA: &str = "mvm-problem-bin";

/// One thing wrong with one field of an input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FieldError {
    /// Where, as a JSON path: `tenants[0].pools[1].instance_resources.vcpus`; empty for the whole input.
    pub path: String,
    /// What would have been right.
    pub expected: String,
    /// What was there, shortened and escaped.
    pub found: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = if self.path.is_empty() { "document" } else { &self.path };
        write!(f, "{path}: {}, found {}", self.expected, self.found)
    }
}

/// An error answer. `code` is for programs and never changes its meaning; `detail` and `remediation` are for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Problem {
    #[serde(rename = "type")]
    pub kind: String,
    pub title: String,
    pub status: u16,
    pub code: String,
    pub detail: String,
    pub remediation: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<FieldError>,
    /// Of the request that was refused, where it has one: for the server's log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// Of the trace that the request belongs to, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
}

impl Problem {
    #[must_use]
    pub fn new(status: u16, code: &str, detail: impl Into<String>, remediation: impl Into<String>) -> Self {
        Self {
            kind: format!("urn:mvm:problem:{code}"),
            title: code.replace('_', " "),
            status,
            code: code.to_owned(),
            detail: detail.into(),
            remediation: remediation.into(),
            errors: Vec::new(),
            request_id: None,
            trace_id: None,
        }
    }

    #[must_use]
    pub fn with_errors(mut self, errors: Vec<FieldError>) -> Self {
        self.errors = errors;
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.detail, self.code)?;
        for error in &self.errors {
            write!(f, "\n  {error}")?;
        }
        if self.remediation.is_empty() { Ok(()) } else { write!(f, "\n{}", self.remediation) }
    }
}

impl std::error::Error for Problem {}
