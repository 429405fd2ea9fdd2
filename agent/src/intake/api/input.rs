//! What handlers read of a request: ids, queries, bodies. Whatever is wrong with them is a problem with its own code.

use std::str::FromStr;

use axum::body::Body;
use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use bytes::Bytes;
use http::{HeaderMap, header};
use http_body_util::LengthLimitError;
use mvm_proto::json::Json;
use mvm_proto::text::is_caused_by;
use mvm_proto::{IdError, InstanceId, Phase, PoolId, TenantId};

use super::SMALL_BODY_BYTES;
use super::problem::{self, Refused};

pub(super) const JSON: &str = "application/json";

/// The ids in an instance's path.
pub(super) struct InstancePath {
    pub(super) tenant: TenantId,
    pub(super) pool: PoolId,
    pub(super) instance: InstanceId,
}

impl InstancePath {
    pub(super) fn read(path: Result<Path<(String, String, String)>, PathRejection>) -> Result<Self, Refused> {
        let Path((tenant, pool, instance)) = path.map_err(|_| unreadable_path())?;
        Ok(Self {
            tenant: id("tenant", &tenant)?,
            pool: id("pool", &pool)?,
            instance: id("instance", &instance)?,
        })
    }
}

/// What a call that changes one instance says: which one, and an object in its body. There are no parameters.
pub(super) async fn instance_and_body<T: serde::de::DeserializeOwned + Default>(
    path: Result<Path<(String, String, String)>, PathRejection>,
    query: Option<&str>,
    body: Body,
) -> Result<(InstancePath, T), Refused> {
    no_query(query)?;
    let path = InstancePath::read(path)?;
    Ok((path, object(&read_body(body, SMALL_BODY_BYTES).await?)?))
}

pub(super) fn id<T: FromStr<Err = IdError>>(field: &str, text: &str) -> Result<T, Refused> {
    text.parse().map_err(|rule: IdError| problem::bad_id(field, &rule, text))
}

pub(super) fn phase(text: &str) -> Result<Phase, Refused> {
    let known = || Phase::ALL.map(Phase::as_str).join(", ");
    text.parse().map_err(|_| problem::bad_query(format!("`phase` must be one of {}", known())))
}

pub(super) fn unreadable_path() -> Refused {
    problem::bad_id("text", &"UTF-8", "bytes that are not")
}

/// Refuses a query where none is known, so that a misspelt parameter is not silently ignored.
pub(super) fn no_query(query: Option<&str>) -> Result<(), Refused> {
    match query {
        None | Some("") => Ok(()),
        Some(text) => {
            Err(problem::bad_query(format!("this call takes no parameters, found {}", problem::shown(text))))
        }
    }
}

pub(super) fn media_type(headers: &HeaderMap, accepted: &[&str]) -> Result<(), Refused> {
    let found = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = found.map(|text| text.split(';').next().unwrap_or_default().trim());
    if essence.is_some_and(|text| accepted.iter().any(|media| text.eq_ignore_ascii_case(media))) {
        return Ok(());
    }
    Err(problem::wrong_media_type(found, JSON))
}

pub(super) async fn read_body(body: Body, limit: usize) -> Result<Bytes, Refused> {
    axum::body::to_bytes(body, limit).await.map_err(|cause| {
        let cause = cause.into_inner();
        if is_caused_by(&*cause, |_: &LengthLimitError| true) {
            problem::too_large(limit)
        } else {
            problem::bad_body("the body is incomplete")
        }
    })
}

/// Reads an object without duplicate keys, of which serde would keep the last; and serde alone would take a list for a
/// struct's fields in order. Nothing at all is the default.
pub(super) fn object<T: serde::de::DeserializeOwned + Default>(bytes: &[u8]) -> Result<T, Refused> {
    if bytes.is_empty() {
        return Ok(T::default());
    }
    match Json::parse(bytes, usize::MAX) {
        Ok(Json::Object(_)) => {}
        Ok(_) => return Err(problem::bad_body("an object is expected")),
        Err(errors) => {
            let first = errors.first().map(ToString::to_string);
            return Err(problem::bad_body(first.unwrap_or_default()));
        }
    }
    serde_json::from_slice(bytes).map_err(|cause| problem::bad_body(cause.to_string()))
}
