//! Changes as server-sent events, and waiting for an object.

use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures::stream;
use mvm_proto::object::{Kind, Object};
use mvm_proto::{Problem, TenantId};
use serde_json::json;

use super::Refused;
use crate::objects::{self, Caller, Changed, Filter, watch};
use crate::refuse;
use crate::state::State;

/// Keeps proxies from closing a quiet stream.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Every change of the kind's objects as an event: its name is what happened, its id the version to go on from, its data
/// the object.
pub(super) async fn changes(
    app: &State,
    caller: &Caller,
    kind: &'static Kind,
    filter: Filter,
    after: &str,
) -> Result<Response, Refused> {
    let watching = watch(&app.store, caller, kind, filter, after).await?;
    let shutdown = app.shutdown.clone();
    let events = stream::unfold(Some((watching, shutdown)), |watching| async {
        let (mut watching, shutdown) = watching?;
        let next = tokio::select! {
            next = watching.next() => next,
            () = shutdown.cancelled() => Err(refuse::stopping()),
        };
        let event =
            |name: &str, id: u64, data: String| Event::default().event(name).id(id.to_string()).data(data);
        match next {
            Ok((changed, object, version)) => {
                let data = match &object {
                    Some(object) => serde_json::to_string(object).unwrap_or_default(),
                    None => json!({ "resource_version": version.to_string() }).to_string(),
                };
                Some((
                    Ok::<_, std::convert::Infallible>(event(changed.as_str(), version, data)),
                    Some((watching, shutdown)),
                ))
            }
            Err(problem) => {
                let data = serde_json::to_string(&problem).unwrap_or_default();
                Some((Ok(Event::default().event("error").data(data)), None))
            }
        }
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response())
}

/// The object once it is ready in its newest form, or as it is when the time is over.
pub(super) async fn until_ready(
    app: &State,
    caller: &Caller,
    kind: &'static Kind,
    object: Object,
    wait: Duration,
) -> Result<Object, Problem> {
    let is_ready = |object: &Object| {
        let observed = object.status.get("observed_generation").and_then(serde_json::Value::as_u64);
        let ready = object
            .conditions()
            .iter()
            .any(|condition| condition.r#type == "Ready" && condition.status == "True");
        ready && observed >= Some(object.metadata.generation)
    };
    let newest = follow(app, caller, kind, &object, wait, |_, object| is_ready(object)).await?;
    Ok(newest.unwrap_or(object))
}

/// Waits until the object is gone, or the time is over.
pub(super) async fn until_gone(
    app: &State,
    caller: &Caller,
    kind: &'static Kind,
    object: &Object,
    wait: Duration,
) -> Result<(), Problem> {
    follow(app, caller, kind, object, wait, |changed, _| changed == Changed::Deleted).await.map(drop)
}

/// The newest form of an object, once `until` holds or the time is over.
async fn follow(
    app: &State,
    caller: &Caller,
    kind: &'static Kind,
    object: &Object,
    wait: Duration,
    until: impl Fn(Changed, &Object) -> bool,
) -> Result<Option<Object>, Problem> {
    let tenant = object.metadata.tenant.as_ref();
    let name = format!("metadata.name={}", object.metadata.name);
    let filter = Filter::new(tenant.map(TenantId::as_str).unwrap_or_default(), "", &name)?;
    // From now on: what the object's own version was may be long ago, and no longer kept.
    let from = objects::revision(&app.store).await?.to_string();
    let mut watching = watch(&app.store, caller, kind, filter, &from).await?;
    // What has happened already is in no change to come.
    let mut newest = match objects::get(&app.store, caller, kind, tenant, &object.metadata.name).await {
        Ok(now) if until(Changed::Modified, &now) => return Ok(Some(now)),
        Ok(now) => Some(now),
        Err(problem) if problem.code == "not_found" => return Ok(None),
        Err(problem) => return Err(problem),
    };
    let following = async {
        loop {
            let (changed, found, _) = watching.next().await?;
            let Some(found) = found else { continue };
            let done = until(changed, &found);
            newest = Some(found);
            if done || changed == Changed::Deleted {
                return Ok::<_, Problem>(());
            }
        }
    };
    tokio::select! {
        followed = tokio::time::timeout(wait, following) => if let Ok(Err(problem)) = followed { return Err(problem) },
        () = app.shutdown.cancelled() => return Err(refuse::stopping()),
    }
    Ok(newest)
}
