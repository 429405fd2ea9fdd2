//! One object over REST: get, replace, patch, delete.

use axum::Extension;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Path, RawQuery, State as Shared};
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::{MethodRouter, delete, get, patch, put};
use mvm_proto::Problem;
use mvm_proto::object::{Kind, Object};
use serde_json::{Map, Value, json};

use super::query::{self, OneQuery};
use super::{Answer, App, body, caller, shown, stream, tenant_id, write};
use crate::api::identify::Identified;
use crate::objects::{self, Caller, DeleteOptions, Mode};
use crate::placement::show_live;
use crate::refuse;
use crate::stored::MAX_TRIES;

/// What a request names, and who makes it.
struct Asked {
    app: App,
    caller: Caller,
    tenant: Option<mvm_proto::TenantId>,
    name: String,
    query: OneQuery,
    headers: HeaderMap,
}

type Identity = Option<Extension<Identified>>;
type Body = Result<Bytes, BytesRejection>;

pub(super) fn cluster_routes(kind: &'static Kind) -> MethodRouter<App> {
    routes(kind, |Path(name): Path<String>| (None, name))
}

pub(super) fn tenant_routes(kind: &'static Kind) -> MethodRouter<App> {
    routes(kind, |Path((tenant, name)): Path<(String, String)>| (Some(tenant), name))
}

fn routes<P>(kind: &'static Kind, named: fn(Path<P>) -> (Option<String>, String)) -> MethodRouter<App>
where
    P: serde::de::DeserializeOwned + Send + 'static,
{
    let read = move |Shared(app): Shared<App>,
                     path: Path<P>,
                     query: RawQuery,
                     who: Identity,
                     headers: HeaderMap| async move {
        show(kind, asked(app, named(path), query, who, headers)?).await
    };
    let replace = move |Shared(app): Shared<App>,
                        path: Path<P>,
                        query: RawQuery,
                        who: Identity,
                        headers: HeaderMap,
                        bytes: Body| async move {
        put_one(kind, asked(app, named(path), query, who, headers)?, bytes).await
    };
    let change = move |Shared(app): Shared<App>,
                       path: Path<P>,
                       query: RawQuery,
                       who: Identity,
                       headers: HeaderMap,
                       bytes: Body| async move {
        patch_one(kind, asked(app, named(path), query, who, headers)?, bytes).await
    };
    let remove = move |Shared(app): Shared<App>,
                       path: Path<P>,
                       query: RawQuery,
                       who: Identity,
                       headers: HeaderMap| async move {
        delete_one(kind, asked(app, named(path), query, who, headers)?).await
    };
    get(read).merge(put(replace)).merge(patch(change)).merge(delete(remove))
}

fn asked(
    app: App,
    (tenant, name): (Option<String>, String),
    RawQuery(query): RawQuery,
    who: Identity,
    headers: HeaderMap,
) -> Result<Asked, Problem> {
    let caller = caller(who)?;
    let query = query::read(query.as_deref())?;
    Ok(Asked { app, caller, tenant: tenant_id(tenant.as_deref())?, name, query, headers })
}

async fn show(kind: &'static Kind, asked: Asked) -> Answer {
    let mut object =
        objects::get(&asked.app.store, &asked.caller, kind, asked.tenant.as_ref(), &asked.name).await?;
    show_live(&asked.app, &mut object);
    Ok(shown(&object, None))
}

async fn put_one(kind: &'static Kind, asked: Asked, bytes: Body) -> Answer {
    let bytes = body::bytes(&asked.headers, bytes)?;
    let mut declared = body::object(&bytes, kind, asked.tenant.as_ref(), Some(&asked.name))?;
    if let Some(version) = body::if_match(&asked.headers)? {
        declared.metadata.resource_version = version;
    }
    write(&asked.app, &asked.caller, declared, Mode::Apply, None, &asked.query).await
}

/// A merge patch (RFC 7396) of labels, annotations and spec.
async fn patch_one(kind: &'static Kind, asked: Asked, bytes: Body) -> Answer {
    let bytes = body::bytes(&asked.headers, bytes)?;
    let change = body::patch(&bytes)?;
    let wanted = body::if_match(&asked.headers)?;
    for _ in 0..MAX_TRIES {
        let found =
            objects::get(&asked.app.store, &asked.caller, kind, asked.tenant.as_ref(), &asked.name).await?;
        let mut next = editable(&found);
        merge(&mut next, &change);
        // Of what was read, or of what the caller read: whatever changed since is not overwritten unseen.
        let version = wanted.clone().unwrap_or_else(|| found.metadata.resource_version.clone());
        next["metadata"]["resource_version"] = Value::String(version);
        let bytes = serde_json::to_vec(&next).unwrap_or_default();
        let declared = body::object(&bytes, kind, asked.tenant.as_ref(), Some(&asked.name))?;
        match write(&asked.app, &asked.caller, declared, Mode::Apply, None, &asked.query).await {
            Err(refused) if refused.0.code == "stale" && wanted.is_none() => {}
            answered => return answered,
        }
    }
    Err(refuse::too_busy("the object").into())
}

async fn delete_one(kind: &'static Kind, asked: Asked) -> Answer {
    let version = body::if_match(&asked.headers)?.unwrap_or_default();
    let OneQuery { dry_run, force, wait } = asked.query;
    let options = DeleteOptions { resource_version: &version, dry_run, force };
    let (app, caller) = (&asked.app, &asked.caller);
    let removed =
        objects::delete(&app.objects, caller, kind, asked.tenant.as_ref(), &asked.name, &options).await?;
    if !removed.gone
        && !dry_run
        && let Some(wait) = wait
    {
        stream::until_gone(app, caller, kind, &removed.object, wait).await?;
    }
    let answer: Response = shown(&removed.object, None);
    Ok(answer)
}

/// What of an object a user may change.
fn editable(object: &Object) -> Value {
    let metadata = &object.metadata;
    let mut editable = json!({
        "api_version": object.api_version,
        "kind": object.kind,
        "metadata": { "name": metadata.name, "labels": metadata.labels, "annotations": metadata.annotations },
        "spec": object.spec,
    });
    if let Some(tenant) = &metadata.tenant {
        editable["metadata"]["tenant"] = Value::String(tenant.to_string());
    }
    editable
}

/// `null` takes a member away, objects are merged, all else replaces.
fn merge(target: &mut Value, change: &Value) {
    let Value::Object(change) = change else {
        *target = change.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(members) = target else { return };
    for (key, value) in change {
        if value.is_null() {
            members.remove(key);
        } else {
            merge(members.entry(key.as_str()).or_insert(Value::Null), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_merge_patch_replaces_merges_and_removes() {
        let mut target = json!({ "a": { "b": 1, "c": 2 }, "d": [1] });
        merge(&mut target, &json!({ "a": { "b": null, "e": { "f": null, "g": 3 } }, "d": [2] }));
        assert_eq!(target, json!({ "a": { "c": 2, "e": { "g": 3 } }, "d": [2] }));
    }
}
