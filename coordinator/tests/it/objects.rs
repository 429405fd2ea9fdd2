//! Declared objects: who may write them, what is refused, what becomes of them.

use http_body_util::BodyExt as _;
use mvm_proto::Phase;
use mvm_proto::status::{Capacity, Counts, NodeInfo, NodeStatus, PoolStatus};
use mvm_proto::wire::session::v1::{Stage, agent_frame};
use serde_json::{Value, json};

use crate::rest::{Answered, Rest};
use crate::support::{Node, Running, Session, document, mark_of, new_cluster, now, soon, stages, wait_until};

pub(crate) fn tenant() -> Value {
    json!({ "spec": { "quotas": { "max_pools": 2 } } })
}

pub(crate) fn pool(running: u32) -> Value {
    json!({ "spec": {
        "image": { "ref": "builtin:busybox" },
        "resources": { "vcpus": 1, "mem_mib": 64 },
        "counts": { "running": running },
    } })
}

pub(crate) const POOL: &str = "/v1/tenants/acme/pools/web";

pub(crate) async fn acme(rest: &mut Rest) {
    let made = rest.put("/v1/tenants/acme", &tenant()).await;
    assert_eq!(made.status, 201, "{}", made.body);
}

/// A node that says that it has room for so much.
pub(crate) async fn join(running: &Running, name: &str, vcpus: u32) -> (Node, Session) {
    let node = running.enrol(name).await;
    let session = connect(&node, vcpus, None).await;
    (node, session)
}

pub(crate) async fn connect(node: &Node, vcpus: u32, mark: Option<mvm_proto::status::Mark>) -> Session {
    let mut session = node.dial().await.unwrap();
    let capacity = Capacity { vcpus, mem_mib: 65_536, disk_mib: 65_536, max_instances: 100 };
    let mut hello = node.hello(mark);
    hello.info = Some(NodeInfo { node_id: node.id.clone(), capacity: Some(capacity), ..NodeInfo::default() });
    session.send(agent_frame::Body::Hello(hello)).await;
    session.welcome().await;
    session
}

/// Says that the node runs this many of `acme/web`; none: it knows of no such pool.
async fn report(session: &mut Session, node: &str, running: Option<u32>) {
    let pool = running.map(|running| PoolStatus {
        tenant_id: "acme".to_owned(),
        pool_id: "web".to_owned(),
        actual: Some(Counts { running, ..Counts::default() }),
        ..PoolStatus::default()
    });
    let status = NodeStatus {
        node_id: node.to_owned(),
        observed_at: now().to_string(),
        pools: pool.into_iter().collect(),
        ..NodeStatus::default()
    };
    session.send(agent_frame::Body::Status(status)).await;
}

/// The running count that a document wants of `acme/web`.
async fn wanted(session: &mut Session) -> u32 {
    let document = session.document().await;
    let mark = mark_of(&document);
    session.ack(mark.clone(), Stage::Accepted).await;
    session.ack(mark, Stage::Converged).await;
    let pools = document.get().desired.tenants.iter().flat_map(|tenant| &tenant.pools);
    pools.map(|pool| pool.desired_counts.running).sum()
}

pub(crate) async fn field(rest: &mut Rest, path: &str, pointer: &str) -> Value {
    rest.get(path).await.body.pointer(pointer).cloned().unwrap_or(Value::Null)
}

pub(crate) async fn until(rest: &mut Rest, path: &str, pointer: &str, expected: &Value) {
    let rest = tokio::sync::Mutex::new(rest);
    let what = format!("{path} {pointer} to be {expected}");
    wait_until(&what, async || field(*rest.lock().await, path, pointer).await == *expected).await;
}

#[tokio::test]
async fn an_object_is_created_changed_left_alone_and_deleted() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let made = rest.put(POOL, &pool(0)).await;
    assert_eq!((made.status, made.body["metadata"]["generation"].as_u64()), (201, Some(1)), "{}", made.body);
    assert_eq!(made.headers["location"], POOL);
    let version = made.headers["etag"].to_str().unwrap().to_owned();

    let labels = json!({ "metadata": { "labels": { "team": "search" } }, "spec": pool(0)["spec"] });
    let changed = loop {
        let same = rest.put(POOL, &pool(0)).await;
        assert_eq!((same.status, same.body["metadata"]["generation"].as_u64()), (200, Some(1)));
        let tag = [("if-match", same.headers["etag"].to_str().unwrap())];
        let changed = rest.call("PUT", POOL, &tag, Some(&labels)).await;
        // Its status may have been written in between.
        if changed.code() != "stale" {
            break changed;
        }
    };
    assert_eq!(
        (changed.status, changed.body["metadata"]["generation"].as_u64()),
        (200, Some(1)),
        "{}",
        changed.body
    );
    let stale = rest.call("PUT", POOL, &[("if-match", &version)], Some(&pool(1))).await;
    assert_eq!((stale.status, stale.code()), (412, "stale"), "{}", stale.body);

    let patch = json!({ "spec": { "counts": { "running": 0, "warm": 0 }, "critical": true } });
    let patched =
        rest.call("PATCH", POOL, &[("content-type", "application/merge-patch+json")], Some(&patch)).await;
    assert_eq!((patched.status, &patched.body["spec"]["critical"]), (200, &json!(true)), "{}", patched.body);
    assert_eq!(patched.body["metadata"]["generation"], 2);
    assert_eq!(patched.body["metadata"]["labels"]["team"], "search");

    let gone = rest.call("DELETE", &format!("{POOL}?wait=20s"), &[], None).await;
    assert_eq!(gone.status, 200, "{}", gone.body);
    assert_eq!(rest.get(POOL).await.code(), "not_found");
    let audit = rest.get("/v1/audit").await.body;
    let outcomes: Vec<_> = audit["items"].as_array().unwrap().iter().map(|entry| &entry["outcome"]).collect();
    assert_eq!(outcomes, ["created", "created", "configured", "configured", "deleted"]);
    assert_eq!(audit["items"][0]["by"], "operator/admin");
}

#[tokio::test]
async fn what_is_wrong_is_told_at_once_and_changes_nothing() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let unknown = rest.put(POOL, &pool(1)).await;
    assert_eq!((unknown.status, unknown.code()), (422, "tenant_unknown"));
    acme(&mut rest).await;
    let mut bad = pool(1);
    bad["spec"]["resources"]["vcpus"] = json!(99);
    bad["spec"]["count"] = json!({});
    bad["metadata"] = json!({ "name": "other" });
    let refused = rest.put(POOL, &bad).await;
    let paths: Vec<_> =
        refused.body["errors"].as_array().unwrap().iter().map(|error| &error["path"]).collect();
    assert_eq!((refused.status, paths), (422, vec![&json!("spec.count"), &json!("spec.resources.vcpus")]));
    assert!(refused.body["request_id"].is_string());
    assert_eq!(refused.headers["content-type"], "application/problem+json");
    bad = pool(1);
    bad["metadata"] = json!({ "name": "other" });
    assert_eq!(rest.put(POOL, &bad).await.body["errors"][0]["path"], "metadata.name");

    for (method, path, status) in [
        ("GET", "/v1/pool", 404),
        ("DELETE", "/v1/pools", 405),
        ("GET", "/v1/tenants/acme/pools?labels=a", 400),
        ("GET", "/v1/tenants/acme/pools?label_selector=%20a%20b", 400),
        ("GET", "/v1/tenants/..%2f/pools", 404),
        ("GET", "/v1/tenants/acme/pools/A%20B", 404),
        ("DELETE", "/v1/nodes/n1", 422),
        ("GET", "/v1/explain/tenant/acme/acme", 404),
    ] {
        let answer = rest.call(method, path, &[], None).await;
        assert_eq!(
            (answer.status, answer.headers["content-type"].as_bytes()),
            (status, &b"application/problem+json"[..]),
            "{method} {path}"
        );
    }
    let text = rest.call("PUT", POOL, &[("content-type", "text/plain")], Some(&pool(1))).await;
    assert_eq!(text.status, 415);
    // The quota of two pools.
    for name in ["a", "b"] {
        assert_eq!(rest.put(&format!("/v1/tenants/acme/pools/{name}"), &pool(1)).await.status, 201);
    }
    assert_eq!(rest.put("/v1/tenants/acme/pools/c", &pool(1)).await.code(), "quota_exceeded");
    assert_eq!(field(&mut rest, "/v1/pools", "/items").await.as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_pool_names_only_images_that_its_tenant_may_use_and_keeps_what_it_had() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    assert_eq!(rest.put(POOL, &pool(1)).await.status, 201);
    let mut strict = tenant();
    strict["spec"]["images"] = json!({ "allow": ["path:/srv/"] });
    assert_eq!(rest.put("/v1/tenants/acme", &strict).await.status, 200);
    assert_eq!(rest.put(POOL, &pool(2)).await.status, 200, "it had its image before");
    let other = rest.put("/v1/tenants/acme/pools/other", &pool(1)).await;
    assert_eq!(
        (other.status, &other.body["errors"][0]["path"]),
        (422, &json!("spec.image")),
        "{}",
        other.body
    );
    let mut path = pool(1);
    path["spec"]["image"]["ref"] = json!("path:/srv/web");
    assert_eq!(rest.put("/v1/tenants/acme/pools/other", &path).await.status, 201);
}

#[tokio::test]
async fn a_dry_run_answers_as_the_write_would_and_writes_nothing() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let dry = rest.put(&format!("{POOL}?dry_run=true"), &pool(1)).await;
    assert_eq!((dry.status, &dry.body["spec"]["profile"]), (200, &json!("default")));
    assert_eq!(rest.get(POOL).await.status, 404);
}

#[tokio::test]
async fn a_request_with_a_key_is_done_once() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let mut body = tenant();
    body["metadata"] = json!({ "name": "acme" });
    let key = [("idempotency-key", "one")];
    let first = rest.call("POST", "/v1/tenants", &key, Some(&body)).await;
    let again = rest.call("POST", "/v1/tenants", &key, Some(&body)).await;
    assert_eq!((first.status, again.status), (201, 200));
    assert_eq!(first.body["metadata"]["uid"], again.body["metadata"]["uid"]);
    assert_eq!(rest.call("POST", "/v1/tenants", &[], Some(&body)).await.code(), "already_exists");
    body["metadata"] = json!({ "name": "other" });
    assert_eq!(rest.call("POST", "/v1/tenants", &key, Some(&body)).await.code(), "idempotency_key_reused");
}

#[tokio::test]
async fn an_api_key_reaches_what_its_role_and_tenant_allow_until_it_is_deleted() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    rest.put("/v1/tenants/zeta", &tenant()).await;
    rest.put("/v1/tenants/zeta/pools/secret", &pool(0)).await;
    let key = json!({ "spec": { "role": "tenant-admin", "tenant": "acme" } });
    let made = rest.put("/v1/api-keys/ci", &key).await;
    let text = made.body["status"]["secret"].as_str().unwrap().to_owned();
    // It is told this once.
    assert!(rest.get("/v1/api-keys/ci").await.body["status"]["secret"].is_null());

    let mut keyed = Rest::with_key(&running, Some(&text)).await;
    assert_eq!(keyed.put(POOL, &pool(0)).await.status, 201);
    let (forbidden, absent): (Answered, Answered) =
        (keyed.get("/v1/tenants/zeta/pools/secret").await, keyed.get("/v1/tenants/nope/pools/secret").await);
    assert_eq!((forbidden.status, forbidden.code()), (absent.status, absent.code()));
    assert_eq!(keyed.put("/v1/tenants/acme", &tenant()).await.code(), "forbidden");
    assert_eq!(keyed.get("/v1/audit").await.code(), "forbidden");
    let names = |answer: &Answered| {
        let items = answer.body["items"].as_array().unwrap();
        items.iter().map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names(&keyed.get("/v1/pools").await), ["web"]);
    assert_eq!(names(&keyed.get("/v1/tenants").await), ["acme"]);

    assert_eq!(Rest::with_key(&running, None).await.get("/v1/pools").await.code(), "credential_required");
    let other = format!("{}x", &text[..text.len() - 1]);
    assert_eq!(Rest::with_key(&running, Some(&other)).await.get("/v1/pools").await.code(), "key_refused");
    rest.call("DELETE", "/v1/api-keys/ci", &[], None).await;
    assert_eq!(keyed.get("/v1/pools").await.code(), "key_refused");
}

#[tokio::test]
async fn lists_come_in_pages_and_by_selectors() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    for n in 0..7 {
        let labels = json!({ "metadata": { "labels": { "half": if n % 2 == 0 { "even" } else { "odd" } } }, "spec": {} });
        assert_eq!(rest.put(&format!("/v1/tenants/t{n}"), &labels).await.status, 201);
    }
    let (mut from, mut names) = (String::new(), Vec::new());
    loop {
        let page = rest.get(&format!("/v1/tenants?limit=3&continue={from}")).await.body;
        let items = page["items"].as_array().unwrap();
        assert!(items.len() <= 3);
        names.extend(items.iter().map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()));
        from = page["metadata"]["continue"].as_str().unwrap().to_owned();
        if from.is_empty() {
            break;
        }
    }
    assert_eq!(names, ["t0", "t1", "t2", "t3", "t4", "t5", "t6"]);
    let count = async |rest: &mut Rest, query: &str| {
        rest.get(&format!("/v1/tenants?{query}")).await.body["items"].as_array().unwrap().len()
    };
    assert_eq!(count(&mut rest, "label_selector=half%3Deven").await, 4);
    assert_eq!(count(&mut rest, "label_selector=half%20in%20(odd)").await, 3);
    assert_eq!(count(&mut rest, "field_selector=metadata.name%3Dt3").await, 1);
}

#[tokio::test]
async fn a_watch_goes_on_where_a_list_ended_and_misses_nothing() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let version = field(&mut rest, "/v1/api-keys", "/metadata/resource_version").await;
    for n in 0..300 {
        assert_eq!(
            rest.put(&format!("/v1/api-keys/t{n}"), &json!({ "spec": { "role": "viewer" } })).await.status,
            201
        );
        if n % 3 == 0 {
            rest.call("DELETE", &format!("/v1/api-keys/t{n}"), &[], None).await;
        }
    }
    let mut watching = Rest::operator(&running).await;
    let path = format!("/v1/api-keys?watch=true&resource_version={}", version.as_str().unwrap());
    let mut body = watching.send("GET", &path, &[], None).await.into_body();
    let (mut text, mut seen) = (String::new(), Vec::new());
    while seen.len() < 400 {
        let frame = soon("an event", body.frame()).await.unwrap().unwrap();
        text.push_str(&String::from_utf8_lossy(frame.data_ref().unwrap()));
        while let Some((event, rest)) = text.clone().split_once("\n\n") {
            text = rest.to_owned();
            let line = |start: &str| {
                event.lines().find_map(|line| line.strip_prefix(start)).unwrap_or_default().to_owned()
            };
            let object: Value = serde_json::from_str(&line("data: ")).unwrap_or_default();
            seen.push((line("event: "), object["metadata"]["name"].as_str().unwrap_or_default().to_owned()));
        }
    }
    let expected: Vec<(String, String)> = (0..300)
        .flat_map(|n| {
            let deleted = (n % 3 == 0).then(|| ("deleted".to_owned(), format!("t{n}")));
            std::iter::once(("added".to_owned(), format!("t{n}"))).chain(deleted)
        })
        .collect();
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn a_thousand_writers_of_one_object_lose_nothing() {
    let (_dir, report) = new_cluster();
    let running = std::sync::Arc::new(Running::start(&report.data_dir).await);
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..10 {
        let running = std::sync::Arc::clone(&running);
        writers.spawn(async move {
            let mut rest = Rest::operator(&running).await;
            for n in 0..100 {
                let label = json!({ "metadata": { "labels": { format!("w{writer}"): n.to_string() } } });
                let headers = [("content-type", "application/merge-patch+json")];
                let answer = rest.call("PATCH", "/v1/tenants/acme", &headers, Some(&label)).await;
                assert_eq!(answer.status, 200, "{}", answer.body);
            }
        });
    }
    while let Some(written) = writers.join_next().await {
        written.unwrap();
    }
    let labels = field(&mut rest, "/v1/tenants/acme", "/metadata/labels").await;
    assert!((0..10).all(|writer| labels[format!("w{writer}")] == "99"), "{labels}");
}

#[tokio::test]
async fn a_pool_is_placed_on_nodes_told_as_ready_and_taken_off_again() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let (_a, mut session_a) = join(&running, "a", 4).await;
    let (_b, mut session_b) = join(&running, "b", 4).await;
    until(&mut rest, "/v1/nodes/b", "/status/state", &json!("Ready")).await;
    assert_eq!(rest.put(POOL, &pool(2)).await.status, 201);
    // One each: the emptier node is the better one.
    assert_eq!((wanted(&mut session_a).await, wanted(&mut session_b).await), (1, 1));
    until(&mut rest, POOL, "/status/ready", &json!("0/2")).await;
    report(&mut session_a, "a", Some(1)).await;
    report(&mut session_b, "b", Some(1)).await;
    until(&mut rest, POOL, "/status/ready", &json!("2/2")).await;
    let conditions = field(&mut rest, POOL, "/status/conditions").await;
    let ready = conditions.as_array().unwrap().iter().find(|condition| condition["type"] == "Ready").unwrap();
    assert_eq!((&ready["status"], &ready["reason"]), (&json!("True"), &json!("AllPlaced")));
    let explained = rest.get("/v1/explain/pool/acme/web").await.body;
    assert_eq!(
        (&explained["nodes"][0]["has"], explained["placed"].as_array().unwrap().len()),
        (&json!(1), 2)
    );

    let gone = rest.call("DELETE", POOL, &[], None).await;
    assert_eq!((gone.status, gone.body["metadata"]["deleting_since"].is_string()), (200, true));
    assert_eq!((wanted(&mut session_a).await, wanted(&mut session_b).await), (0, 0));
    report(&mut session_a, "a", None).await;
    // The other one still says that it runs.
    assert_eq!(rest.get(POOL).await.status, 200);
    report(&mut session_b, "b", None).await;
    wait_until("the pool to be gone", async || Rest::operator(&running).await.get(POOL).await.status == 404)
        .await;
}

#[tokio::test]
async fn what_no_node_takes_is_told_with_the_reason() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    rest.put(POOL, &pool(1)).await;
    until(&mut rest, POOL, "/status/unplaced/counts/running", &json!(1)).await;
    let (_a, mut session) = join(&running, "a", 4).await;
    assert_eq!(wanted(&mut session).await, 1);
    until(&mut rest, POOL, "/status/unplaced", &Value::Null).await;
}

#[tokio::test]
async fn a_restart_issues_nothing_again_and_goes_on() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let (mut node, mut session) = join(&running, "a", 4).await;
    rest.put(POOL, &pool(1)).await;
    let mark = session.obey().await;
    report(&mut session, "a", Some(1)).await;
    until(&mut rest, POOL, "/status/ready", &json!("1/1")).await;
    running.stop().await;

    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    node.address = running.addresses.quic;
    let mut session = connect(&node, 4, Some(mark.clone())).await;
    report(&mut session, "a", Some(1)).await;
    until(&mut rest, "/v1/nodes/a", "/status/state", &json!("Ready")).await;
    session.expect_quiet().await;
    rest.put(POOL, &pool(2)).await;
    let next = session.obey().await;
    assert_eq!((next.epoch, next.generation), (2, mark.generation + 1));
}

#[tokio::test]
async fn a_node_takes_pushes_or_objects_and_says_which() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let (_a, mut session_a) = join(&running, "a", 4).await;
    let (_b, _session_b) = join(&running, "b", 4).await;
    assert_eq!(field(&mut rest, "/v1/nodes/b", "/spec/managed_by").await, "objects");
    running.push(&document("b", 1), 0).await;
    until(&mut rest, "/v1/nodes/b", "/spec/managed_by", &json!("push")).await;
    rest.put(POOL, &pool(2)).await;
    assert_eq!(wanted(&mut session_a).await, 2);
    // What objects have placed is not pushed away.
    let mut stream = running
        .operator()
        .await
        .push(crate::support::push_request(&document("a", 1), 0))
        .await
        .unwrap()
        .into_inner();
    let mut told = Vec::new();
    let refused = loop {
        match soon("a stage", stream.message()).await {
            Ok(Some(stage)) => told.push(stage),
            Ok(None) => panic!("{:?}", stages(&told)),
            Err(status) => break mvm_client::problem_of(&status).unwrap(),
        }
    };
    assert_eq!(refused.code, "managed_by_objects");
}

#[tokio::test]
async fn a_plan_says_what_would_change_and_changes_nothing() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let (_a, _session) = join(&running, "a", 4).await;
    until(&mut rest, "/v1/nodes/a", "/status/state", &json!("Ready")).await;
    let mut declared = pool(3);
    declared["api_version"] = json!("mvm/v1");
    declared["kind"] = json!("Pool");
    declared["metadata"] = json!({ "tenant": "acme", "name": "web" });
    let plan = rest.call("POST", "/v1/plan", &[], Some(&json!({ "objects": [declared] }))).await.body;
    assert_eq!(plan["objects"][0]["outcome"], "created", "{plan}");
    let step = &plan["nodes"][0]["steps"][0];
    let phase = Phase::Running.to_string();
    assert_eq!(
        (&step["action"], &step["count"], step["phase"].as_str()),
        (&json!("start"), &json!(3), Some(phase.as_str())),
        "{plan}"
    );
    assert_eq!(rest.get(POOL).await.status, 404);
}
