//! Errors as answers: `application/problem+json`, from handlers and from axum alike.

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use mvm_proto::problem::{FieldError, PROBLEM_MEDIA_TYPE, Problem};
use mvm_proto::text::one_line;
use mvm_telemetry::current;

/// The longest part of a peer's text that is repeated to it.
const SHOWN_BYTES: usize = 80;

/// A handler's way to say no.
#[derive(Debug)]
pub(super) struct Refused(pub(super) Problem);

impl<E: Into<Problem>> From<E> for Refused {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        current::fail(&self.0.code);
        let trace_id = current::context().map(|context| context.trace_id());
        let problem = Problem { request_id: current::request_id(), trace_id, ..self.0 };
        let body = serde_json::to_vec(&problem).unwrap_or_default();
        let media_type = HeaderValue::from_static(PROBLEM_MEDIA_TYPE);
        (status, [(header::CONTENT_TYPE, media_type)], body).into_response()
    }
}

/// A peer's text, shortened and with everything unprintable escaped.
pub(super) fn shown(text: &str) -> String {
    one_line(text, SHOWN_BYTES)
}

pub(super) async fn unknown_path(request: Request) -> Refused {
    let detail = format!("there is no such path: {}", shown(request.uri().path()));
    let remediation = "See docs/authorisation.md for every path that an agent answers.";
    Refused(Problem::new(404, "not_found", detail, remediation))
}

pub(super) async fn wrong_method(request: Request) -> Refused {
    let (method, path) = (shown(request.method().as_str()), shown(request.uri().path()));
    let detail = format!("{path} does not support {method}");
    let remediation = "See docs/authorisation.md for the method of each path.";
    Refused(Problem::new(405, "method_not_allowed", detail, remediation))
}

pub(super) fn bad_id(field: &str, rule: &impl std::fmt::Display, found: &str) -> Refused {
    let error = FieldError { path: field.to_owned(), expected: rule.to_string(), found: shown(found) };
    let detail = format!("the path's {field} is not an id");
    Refused(Problem::new(400, "bad_id", detail, "Correct the id in the path.").with_errors(vec![error]))
}

pub(super) fn bad_query(detail: impl Into<String>) -> Refused {
    let remediation = "Leave the query out, or use only the parameters that this call takes.";
    Refused(Problem::new(400, "bad_query", detail, remediation))
}

pub(super) fn bad_body(detail: impl Into<String>) -> Refused {
    Refused(Problem::new(400, "bad_body", detail, "Send the whole body as this call describes it."))
}

pub(super) fn too_large(limit: usize) -> Refused {
    let detail = format!("the body is larger than the limit of {limit} bytes");
    Refused(Problem::new(413, "body_too_large", detail, "Split the document over several nodes or pools."))
}

pub(super) fn wrong_media_type(found: Option<&str>, expected: &str) -> Refused {
    let found = found.map_or_else(|| "none".to_owned(), shown);
    let detail = format!("the content type is {found}, not {expected}");
    Refused(Problem::new(415, "unsupported_media_type", detail, format!("Send `content-type: {expected}`.")))
}

pub(super) fn timed_out() -> Refused {
    let detail = "the node did not finish in time; the action continues";
    Refused(Problem::new(504, "timed_out", detail, "Look at the node's status, then ask again."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_is_repeated_short_and_escaped() {
        assert_eq!(shown("a\u{1b}[31m\n"), "a\\x1b[31m\\n");
        assert_eq!(shown(&"x".repeat(500)).len(), SHOWN_BYTES);
    }
}
