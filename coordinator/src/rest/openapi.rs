//! The API's description (OpenAPI 3.1), made of the same table and types that serve it.

use mvm_proto::object::{API_VERSION, KINDS, Kind, openapi_schemas};
use serde_json::{Map, Value, json};

/// The whole description.
pub(super) fn document() -> Value {
    let mut paths = Map::new();
    for kind in &KINDS {
        let all = format!("/v1/{}", kind.plural);
        if kind.is_tenant_scoped() {
            paths.insert(all, json!({ "get": list(kind, "all_") }));
            let of_tenant = format!("/v1/tenants/{{tenant}}/{}", kind.plural);
            paths.insert(of_tenant.clone(), collection(kind));
            paths.insert(format!("{of_tenant}/{{name}}"), one(kind));
        } else {
            paths.insert(all.clone(), collection(kind));
            paths.insert(format!("{all}/{{name}}"), one(kind));
        }
    }
    paths.insert("/v1/tenants/{tenant}/pools/{name}/scale-metric".to_owned(), scale_metric());
    paths.insert("/v1/plan".to_owned(), plan());
    paths.insert("/v1/explain/{kind}/{tenant}/{name}".to_owned(), explain());
    let about = "What has no place for want of nodes, and which nodes have nothing.";
    paths.insert("/v1/demand".to_owned(), plain("demand", about, &object_answer()));
    paths.insert("/v1/events".to_owned(), events());
    paths.insert(
        "/v1/audit".to_owned(),
        plain("audit", "The newest writes: who, what, from where.", &object_answer()),
    );
    paths.insert("/openapi.json".to_owned(), open("openapi", "This description.", &object_answer()));
    let text = json!({ "text/plain": { "schema": { "type": "string" } } });
    paths.insert("/healthz".to_owned(), open("healthz", "Whether the process serves.", &text));
    paths.insert("/readyz".to_owned(), open("readyz", "Whether it takes requests.", &text));
    paths.insert("/version".to_owned(), open("version", "What runs here.", &object_answer()));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "mvm",
            "version": env!("CARGO_PKG_VERSION"),
            "description": format!("Declared objects of {API_VERSION}. Errors are problems (RFC 9457) with a stable `code`."),
        },
        "paths": paths,
        "components": {
            "schemas": openapi_schemas(),
            "securitySchemes": { "key": { "type": "http", "scheme": "bearer" }, "certificate": { "type": "mutualTLS" } },
        },
        "security": [{ "key": [] }, { "certificate": [] }],
    })
}

fn object_answer() -> Value {
    json!({ "application/json": { "schema": { "type": "object" } } })
}

fn reference(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

fn operation(
    id: &str,
    summary: &str,
    parameters: Vec<Value>,
    body: Option<Value>,
    answers: &[(&str, Value)],
) -> Value {
    let mut responses = Map::new();
    for (status, content) in answers {
        responses.insert((*status).to_owned(), json!({ "description": "done", "content": content }));
    }
    let problem = json!({
        "description": "a problem",
        "content": { "application/problem+json": { "schema": reference("Problem") } },
    });
    responses.insert("default".to_owned(), problem);
    let mut operation = json!({ "operationId": id, "summary": summary, "responses": responses });
    if !parameters.is_empty() {
        operation["parameters"] = Value::Array(parameters);
    }
    if let Some(schema) = body {
        operation["requestBody"] =
            json!({ "required": true, "content": { "application/json": { "schema": schema } } });
    }
    operation
}

fn id(verb: &str, kind: &Kind) -> String {
    format!("{verb}_{}", kind.plural.replace('-', "_"))
}

fn of_path(kind: &Kind, named: bool) -> Vec<Value> {
    let name = |name: &str| {
        let pattern = mvm_proto::id::NAME_PATTERN;
        json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string", "pattern": pattern } })
    };
    let tenant = kind.is_tenant_scoped().then(|| name("tenant"));
    tenant.into_iter().chain(named.then(|| name("name"))).collect()
}

fn query(name: &str, schema: &Value, description: &str) -> Value {
    json!({ "name": name, "in": "query", "required": false, "schema": schema, "description": description })
}

fn writing(extra: Vec<Value>, mut parameters: Vec<Value>) -> Vec<Value> {
    let truth = json!({ "type": "boolean" });
    parameters.push(query("dry_run", &truth, "Everything but the writing."));
    let time = json!({ "type": "string", "pattern": "^[0-9]{1,3}(ms|s)$" });
    parameters.push(query(
        "wait",
        &time,
        "Answer only once it is ready, or gone, or this time is over: 30s.",
    ));
    parameters.extend(extra);
    parameters
}

fn if_match() -> Value {
    let schema = json!({ "type": "string", "pattern": "^\"[0-9]{1,15}\"$" });
    json!({ "name": "If-Match", "in": "header", "required": false, "schema": schema,
        "description": "Refuse with 412 unless this is the object's version." })
}

fn list(kind: &Kind, of: &str) -> Value {
    let mut parameters = if of.is_empty() { of_path(kind, false) } else { Vec::new() };
    let text = json!({ "type": "string" });
    parameters.push(query("label_selector", &text, "team=search,env in (a,b),!gpu"));
    parameters.push(query("field_selector", &text, "spec.cordoned=true"));
    parameters.push(query(
        "limit",
        &json!({ "type": "integer", "minimum": 0, "maximum": 4_294_967_295_u32 }),
        "The most of one page.",
    ));
    parameters.push(query("continue", &text, "Where the page before said that the next begins."));
    let truth = json!({ "type": "boolean" });
    parameters.push(query("watch", &truth, "Changes as server-sent events, without end."));
    let version = json!({ "type": "string", "pattern": "^[0-9]{0,15}$" });
    parameters.push(query(
        "resource_version",
        &version,
        "Watch from here on; 410 when that is too long ago.",
    ));
    let schema = json!({
        "type": "object",
        "required": ["api_version", "kind", "metadata", "items"],
        "properties": { "items": { "type": "array", "items": reference(kind.name) } },
    });
    let content = json!({ "application/json": { "schema": schema }, "text/event-stream": { "schema": { "type": "string" } } });
    operation(
        &id(&format!("list_{of}"), kind).replace("__", "_"),
        kind.about,
        parameters,
        None,
        &[("200", content)],
    )
}

fn shown(kind: &Kind) -> Value {
    json!({ "application/json": { "schema": reference(kind.name) } })
}

fn collection(kind: &Kind) -> Value {
    let key = json!({ "name": "Idempotency-Key", "in": "header", "required": false,
        "schema": { "type": "string", "pattern": "^[!-~]{1,64}$" }, "description": "Sent again, it is done once." });
    let parameters = writing(vec![key], of_path(kind, false));
    let answers = [("200", shown(kind)), ("201", shown(kind))];
    json!({
        "get": list(kind, ""),
        "post": operation(&id("create", kind), "Creates one.", parameters, Some(reference(kind.name)), &answers),
    })
}

fn one(kind: &Kind) -> Value {
    let force = query("force", &json!({ "type": "boolean" }), "Without waiting for what it runs to be gone.");
    let change = || writing(vec![if_match()], of_path(kind, true));
    let answers = [("200", shown(kind)), ("201", shown(kind))];
    let patched = json!({ "type": "object", "additionalProperties": false,
        "properties": { "metadata": { "type": "object" }, "spec": { "type": "object" } } });
    json!({
        "get": operation(&id("get", kind), "Shows one.", of_path(kind, true), None, &[("200", shown(kind))]),
        "put": operation(&id("put", kind), "Creates it, or changes it to this.", change(), Some(reference(kind.name)), &answers),
        "patch": operation(&id("patch", kind), "Changes some fields (RFC 7396).", change(), Some(patched), &answers),
        "delete": operation(&id("delete", kind), "Deletes it.", writing(vec![if_match(), force], of_path(kind, true)), None, &answers[..1]),
    })
}

fn plain(id: &str, summary: &str, content: &Value) -> Value {
    json!({ "get": operation(id, summary, Vec::new(), None, &[("200", content.clone())]) })
}

/// For callers without a credential too.
fn open(id: &str, summary: &str, content: &Value) -> Value {
    let mut operation = plain(id, summary, content);
    operation["get"]["security"] = json!([]);
    operation
}

fn plan() -> Value {
    let any: Vec<Value> = KINDS.iter().map(|kind| reference(kind.name)).collect();
    let body = json!({ "type": "object", "required": ["objects"], "additionalProperties": false,
        "properties": { "objects": { "type": "array", "items": { "oneOf": any } } } });
    json!({ "post": operation("plan", "What declaring these objects would do.", Vec::new(), Some(body), &[("200", object_answer())]) })
}

fn scale_metric() -> Value {
    let pool = KINDS.iter().find(|kind| kind.name == "Pool");
    let parameters = pool.map(|pool| of_path(pool, true)).unwrap_or_default();
    let body = json!({ "type": "object", "required": ["value"], "additionalProperties": false,
        "properties": { "value": { "type": "number", "minimum": 0, "maximum": 1e12 } } });
    let answer = json!({ "application/json": { "schema": reference("PoolScaleStatus") } });
    let about = "What was measured of the load of a pool that is scaled by it.";
    json!({ "put": operation("scale_metric", about, parameters, Some(body), &[("200", answer)]) })
}

fn events() -> Value {
    let text = json!({ "type": "string" });
    let parameters = vec![
        query("object", &text, "Of this object alone: pool/acme/workers, node/n1."),
        query("tenant", &text, "Of this tenant's objects alone."),
    ];
    let answer = json!({ "application/json": { "schema": {
        "type": "object", "required": ["items"],
        "properties": { "items": { "type": "array", "items": reference("ObjectEvent") } },
    } } });
    let about = "What happened to objects lately, the newest last.";
    json!({ "get": operation("events", about, parameters, None, &[("200", answer)]) })
}

fn explain() -> Value {
    let name = |name: &str| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string", "minLength": 1, "pattern": "^[a-z0-9-]+$" } });
    let parameters = ["kind", "tenant", "name"].map(name).to_vec();
    json!({ "get": operation("explain", "Why a pool is where it is.", parameters, None, &[("200", object_answer())]) })
}
