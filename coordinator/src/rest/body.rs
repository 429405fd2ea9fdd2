//! What requests bring: bodies, preconditions, keys.

use std::borrow::Cow;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, header};
use mvm_proto::json::{Json, Node, Report, quote};
use mvm_proto::object::{API_VERSION, Declared, Kind, MAX_OBJECT_BYTES, read_tree};
use mvm_proto::{FieldError, Problem, TenantId};
use serde_json::Value;

use crate::refuse;

/// The body of a request that says it is JSON.
pub(super) fn bytes(headers: &HeaderMap, bytes: Result<Bytes, BytesRejection>) -> Result<Bytes, Problem> {
    let kind = headers.get(header::CONTENT_TYPE).map(|value| value.to_str().unwrap_or_default());
    let media = kind.map(|kind| kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase());
    let is_json = |media: &String| media == "application/json" || media == "application/merge-patch+json";
    if !media.as_ref().is_some_and(is_json) {
        let detail = "the body must have the content type application/json";
        return Err(Problem::new(415, "media_type", detail, "Send `Content-Type: application/json`."));
    }
    bytes.map_err(|rejection| {
        let detail = "the body can't be read, or is too large";
        Problem::new(rejection.status().as_u16(), "body_refused", detail, "Send a smaller body.")
    })
}

fn refused(errors: Vec<FieldError>) -> Problem {
    refuse::invalid("the object").with_errors(errors)
}

/// One object. What the path says of it may be left out of the body, and may not differ.
pub(super) fn object(
    bytes: &[u8],
    kind: &'static Kind,
    tenant: Option<&TenantId>,
    name: Option<&str>,
) -> Result<Declared, Problem> {
    let mut json = Json::parse(bytes, MAX_OBJECT_BYTES).map_err(refused)?;
    if let Json::Object(members) = &mut json {
        complete(members, "api_version", API_VERSION);
        complete(members, "kind", kind.name);
        if let Some((_, Json::Object(metadata))) = members.iter_mut().find(|(key, _)| key == "metadata") {
            complete_from_path(metadata, tenant, name);
        } else if name.is_some() && !members.iter().any(|(key, _)| key == "metadata") {
            let mut metadata = Vec::new();
            complete_from_path(&mut metadata, tenant, name);
            members.push((Cow::Borrowed("metadata"), Json::Object(metadata)));
        }
    }
    let declared = read_tree(&json).map_err(refused)?;
    let differs = |path: &str, expected: &str, found: &str| {
        let (path, expected) = (path.to_owned(), format!("must be `{expected}`, as the path says"));
        refused(vec![FieldError { path, expected, found: quote(found) }])
    };
    if declared.kind.name != kind.name {
        return Err(differs("kind", kind.name, declared.kind.name));
    }
    if let Some(name) = name.filter(|name| *name != declared.metadata.name) {
        return Err(differs("metadata.name", name, &declared.metadata.name));
    }
    match (tenant, &declared.metadata.tenant) {
        (Some(expected), found) if found.as_ref() != Some(expected) => {
            let found = found.as_ref().map_or("", TenantId::as_str);
            Err(differs("metadata.tenant", expected.as_str(), found))
        }
        _ => Ok(declared),
    }
}

fn complete_from_path<'a>(
    metadata: &mut Vec<(Cow<'a, str>, Json<'a>)>,
    tenant: Option<&TenantId>,
    name: Option<&str>,
) {
    if let Some(tenant) = tenant {
        complete(metadata, "tenant", tenant.as_str());
    }
    if let Some(name) = name {
        complete(metadata, "name", name);
    }
}

fn complete<'a>(members: &mut Vec<(Cow<'a, str>, Json<'a>)>, key: &'static str, value: &str) {
    if !members.iter().any(|(name, _)| name == key) {
        members.push((Cow::Borrowed(key), Json::Str(Cow::Owned(value.to_owned()))));
    }
}

/// `{"objects": [...]}`, or one object.
pub(super) fn objects(bytes: &[u8], most: usize) -> Result<Vec<Declared>, Problem> {
    let json = Json::parse(bytes, super::MAX_BODY_BYTES).map_err(refused)?;
    let report = Report::default();
    let root = Node::root(&json, &report);
    let is_one = json.get("objects").is_none() && json.get("kind").is_some();
    let list = match json.get("objects") {
        _ if is_one => std::slice::from_ref(&json),
        Some(Json::Array(items)) => items.as_slice(),
        _ => {
            let _: Option<()> =
                root.fields(&["objects"]).and_then(|fields| fields.get("objects", |n| n.items().map(drop)));
            return Err(refused(report.into_errors()));
        }
    };
    if !is_one {
        let _ = root.fields(&["objects"]);
    }
    if !report.is_empty() {
        return Err(refused(report.into_errors()));
    }
    if list.len() > most {
        return Err(refuse::bad_request(format!("a plan is of at most {most} objects")));
    }
    let mut errors = Vec::new();
    let mut declared = Vec::new();
    for (at, item) in list.iter().enumerate() {
        match read_tree(item) {
            Ok(object) => declared.push(object),
            Err(found) => errors.extend(found.into_iter().map(|error| {
                let path = if error.path.is_empty() { String::new() } else { format!(".{}", error.path) };
                FieldError { path: format!("objects[{at}]{path}"), ..error }
            })),
        }
    }
    if errors.is_empty() { Ok(declared) } else { Err(refused(errors)) }
}

/// A merge patch: an object with the members that users may change.
pub(super) fn patch(bytes: &[u8]) -> Result<Value, Problem> {
    let json = Json::parse(bytes, MAX_OBJECT_BYTES).map_err(refused)?;
    let Json::Object(members) = &json else { return Err(refuse::bad_request("a patch is a JSON object")) };
    let odd =
        members.iter().find(|(key, _)| !["metadata", "spec", "api_version", "kind"].contains(&key.as_ref()));
    if let Some((key, _)) = odd {
        return Err(refused(vec![FieldError {
            path: key.to_string(),
            expected: "must not be there: a patch changes metadata and spec".to_owned(),
            found: "an unknown field".to_owned(),
        }]));
    }
    let is_no_object = |value: &Json<'_>| !matches!(value, Json::Object(_) | Json::Null);
    let odd = members.iter().find(|(key, value)| key == "metadata" && is_no_object(value));
    if let Some((key, value)) = odd {
        let (path, expected) = (key.to_string(), "must be an object, or null".to_owned());
        return Err(refused(vec![FieldError { path, expected, found: value.to_string() }]));
    }
    serde_json::to_value(&json).map_err(|error| refuse::bad_request(error.to_string()))
}

/// The version that the caller has seen.
pub(super) fn if_match(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let Some(value) = headers.get(header::IF_MATCH) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default().trim();
    if text == "*" {
        return Ok(None);
    }
    let version = text.strip_prefix("W/").unwrap_or(text).trim_matches('"');
    match version.parse::<u64>() {
        Ok(_) => Ok(Some(version.to_owned())),
        Err(_) => {
            Err(refuse::bad_request("If-Match must be the object's resource_version, as its ETag says"))
        }
    }
}

pub(super) fn idempotency_key(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    value.to_str().map(Some).map_err(|_| refuse::bad_request("Idempotency-Key must be printable ASCII"))
}
