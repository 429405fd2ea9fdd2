//! Bad input, races and faults at the API of declared objects.

use std::sync::Arc;
use std::time::Duration;

use mvm_client::{Change, Objects, Query};
use mvm_coordinator::CoordinatorSettings;
use mvm_pki::{Credential, LiveCredential};
use mvm_proto::object::kind_named;
use mvm_proto::wire::objects::v1::objects_client::ObjectsClient;
use mvm_proto::wire::objects::v1::{ApplyRequest, WatchRequest};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

use crate::crashes::FakeNode;
use crate::rest::{Answered, Events, Rest};
use crate::support::{PATIENCE, Running, cluster_id, document, new_cluster, soon, wait_until};

const POOL: &str = "/v1/tenants/acme/pools/web";

fn tenant() -> Value {
    json!({ "spec": { "quotas": { "max_pools": 100 } } })
}

fn pool(running: u32) -> Value {
    json!({ "spec": {
        "image": { "ref": "builtin:busybox" },
        "resources": { "vcpus": 1, "mem_mib": 64 },
        "counts": { "running": running },
    } })
}

/// An object with this many bytes in annotations.
fn large(kibibytes: usize, mark: usize) -> Value {
    let annotations: serde_json::Map<String, Value> =
        (0..kibibytes / 16).map(|n| (format!("a{n}"), json!(format!("{mark:016384}")))).collect();
    json!({ "metadata": { "annotations": annotations }, "spec": { "role": "viewer" } })
}

/// The version from which a watch of a kind misses nothing.
async fn version(rest: &mut Rest, path: &str) -> String {
    rest.get(path).await.body["metadata"]["resource_version"].as_str().unwrap().to_owned()
}

/// The service `Objects` on a connection of its own.
pub(crate) async fn channel(running: &Running) -> mvm_client::Channel {
    let credential = Credential::load(&running.data_dir.join("operator/operator.pem")).unwrap();
    let live = LiveCredential::new(credential);
    mvm_client::open(&running.target(), &live, &running.anchors(), &cluster_id(), PATIENCE).await.unwrap()
}

#[tokio::test]
async fn what_is_malformed_too_deep_or_too_large_is_refused_whole() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    assert_eq!(rest.put("/v1/tenants/acme", &tenant()).await.status, 201);
    let labels: String = (0..100_000).map(|n| format!("\"l{n}\":\"\",")).collect();
    let list = format!("[{}]", vec!["\"x\""; 100_000].join(","));
    let nested =
        |open: &str, close: &str| format!("{{\"spec\":{}1{}}}", open.repeat(10_000), close.repeat(10_000));
    let bodies: Vec<(&str, Vec<u8>)> = vec![
        ("nothing", Vec::new()),
        ("no JSON", b"{\"spec\":".to_vec()),
        ("no UTF-8", b"{\"spec\":\"\xff\xfe\"}".to_vec()),
        ("NaN", b"{\"spec\":NaN}".to_vec()),
        ("a list", b"[]".to_vec()),
        ("a field twice", b"{\"spec\":{},\"spec\":{}}".to_vec()),
        ("another kind", b"{\"kind\":\"Tenant\",\"spec\":{}}".to_vec()),
        ("another name", b"{\"metadata\":{\"name\":\"other\"},\"spec\":{}}".to_vec()),
        ("lists in lists", nested("[", "]").into_bytes()),
        ("objects in objects", nested("{\"a\":", "}").into_bytes()),
        ("a list of 100,000", format!("{{\"spec\":{{\"secrets\":{list}}}}}").into_bytes()),
        (
            "100,000 labels",
            format!("{{\"metadata\":{{\"labels\":{{{labels}\"z\":\"\"}}}},\"spec\":{{}}}}").into_bytes(),
        ),
        ("65 labels", {
            let labels: serde_json::Map<String, Value> =
                (0..65).map(|n| (format!("l{n}"), json!(""))).collect();
            json!({ "metadata": { "labels": labels }, "spec": pool(0)["spec"] }).to_string().into_bytes()
        }),
        ("one of 1 MiB", format!("{{\"spec\":{{\"x\":\"{}\"}}}}", "x".repeat(1 << 20)).into_bytes()),
        ("a body of 9 MiB", vec![b' '; 9 << 20]),
    ];
    for (what, body) in bodies {
        for method in ["PUT", "PATCH"] {
            let headers = [("content-type", "application/json")];
            let mut rest = Rest::operator(&running).await;
            let answer = rest.send_bytes(method, POOL, &headers, Some(body.clone().into())).await;
            let Ok(answer) = answer else {
                // The rest of a body that is too large is not read.
                assert_eq!(what, "a body of 9 MiB");
                continue;
            };
            let answer = Answered::read(answer).await;
            assert!(
                (400..500).contains(&answer.status),
                "{what} by {method}: {} {}",
                answer.status,
                answer.body
            );
            assert!(
                !answer.code().is_empty() && answer.body["request_id"].is_string(),
                "{what}: {}",
                answer.body
            );
            assert!(answer.body.to_string().len() < 128 * 1024, "{what}: {}", answer.body.to_string().len());
        }
    }
    assert_eq!(rest.get(POOL).await.status, 404);
    assert_eq!(rest.put(POOL, &pool(0)).await.status, 201);
}

#[tokio::test]
async fn hostile_selectors_and_page_tokens_are_refused_or_select_nothing_else() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    for name in ["acme", "zeta"] {
        assert_eq!(rest.put(&format!("/v1/tenants/{name}"), &tenant()).await.status, 201);
        assert_eq!(rest.put(&format!("/v1/tenants/{name}/pools/web"), &pool(0)).await.status, 201);
    }
    let values = |count: usize| vec!["a"; count].join(",");
    for selector in [
        format!("team%20in%20({})", values(10_000)),
        values(100),
        "(".repeat(5000),
        "a=(.*)*$".to_owned(),
        "team%20in%20(a".to_owned(),
        "%00=x".to_owned(),
        "=".to_owned(),
    ] {
        let answer = rest.get(&format!("/v1/pools?label_selector={selector}")).await;
        assert_eq!((answer.status, answer.code()), (400, "bad_request"), "{selector:.80}");
    }
    for selector in [format!("spec{}=x", ".a".repeat(5000)), "kind=Pool".to_owned(), "spec.a".to_owned()] {
        let answer = rest.get(&format!("/v1/pools?field_selector={selector}")).await;
        assert_eq!((answer.status, answer.code()), (400, "bad_request"), "{selector:.80}");
    }
    // What looks like a pattern is compared as it is.
    let names = |answer: &Answered| {
        let items = answer.body["items"].as_array().unwrap_or_else(|| panic!("{}", answer.body));
        items.iter().map(|item| item["metadata"]["tenant"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    for text in [".*", "we?", "w%25", "%2A"] {
        let answer = rest.get(&format!("/v1/pools?field_selector=metadata.name%3D{text}")).await;
        assert_eq!(names(&answer), [""; 0], "{text}");
    }
    let long = "z".repeat(10_000);
    for token in ["zzzz", "..%2f..", "%00", "%F0%9F%92%A9", "acme%2f", "-1", long.as_str()] {
        let answer = rest.get(&format!("/v1/tenants/acme/pools?continue={token}")).await;
        assert!(
            answer.status == 400 || names(&answer).iter().all(|tenant| tenant == "acme"),
            "{token:.40}: {}",
            answer.body
        );
    }
    for odd in
        ["limit=-1", "limit=99999999999999999999", "resource_version=x", "watch=maybe", "resource_version=-1"]
    {
        assert_eq!(rest.get(&format!("/v1/pools?{odd}")).await.code(), "bad_request", "{odd}");
    }
}

#[tokio::test]
async fn of_a_thousand_writers_that_saw_the_same_version_one_wins() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let made = rest.put("/v1/tenants/acme", &tenant()).await;
    let seen = made.body["metadata"]["resource_version"].as_str().unwrap().to_owned();
    let mut writers = JoinSet::new();
    for connection in 0..20 {
        let client = ObjectsClient::new(channel(&running).await);
        for writer in 0..50 {
            let (mut client, seen) = (client.clone(), seen.clone());
            writers.spawn(async move {
                let object = json!({
                    "api_version": "mvm/v1", "kind": "Tenant", "spec": tenant()["spec"],
                    "metadata": { "name": "acme", "resource_version": seen, "labels": { "by": format!("w{connection}-{writer}") } },
                });
                let request = ApplyRequest { json: object.to_string().into_bytes(), ..ApplyRequest::default() };
                match client.apply(request).await {
                    Ok(answer) => Ok((answer.into_inner().outcome, format!("w{connection}-{writer}"))),
                    Err(status) => Err(mvm_client::problem_of(&status).unwrap().code),
                }
            });
        }
    }
    let mut won = Vec::new();
    while let Some(answer) = soon("a writer", writers.join_next()).await {
        match answer.unwrap() {
            Ok((outcome, by)) => won.push((outcome, by)),
            Err(code) => assert_eq!(code, "stale"),
        }
    }
    let labels = rest.get("/v1/tenants/acme").await.body["metadata"]["labels"].clone();
    assert!(
        won.len() == 1 && won[0].0 == "configured" && labels["by"] == won[0].1.as_str(),
        "{won:?} {labels}"
    );
}

#[tokio::test]
async fn a_thousand_documents_take_no_watcher_of_objects_its_place() {
    let (_dir, report) = new_cluster();
    let running = Arc::new(Running::start(&report.data_dir).await);
    let mut rest = Rest::operator(&running).await;
    assert_eq!(rest.put("/v1/tenants/acme", &tenant()).await.status, 201);
    let mut nodes = Vec::new();
    for n in 0..8 {
        nodes.push(running.enrol(&format!("n{n}")).await);
    }
    for node in &nodes {
        running.push(&document(&node.id, 1), 0).await;
    }
    let from = version(&mut rest, "/v1/tenants").await;
    let path = format!("/v1/tenants?watch=true&resource_version={from}");
    // This one does not read while the documents are written.
    let mut slow = Events::of(&mut Rest::operator(&running).await, &path).await;
    let mut pushes = JoinSet::new();
    for node in nodes {
        let running = Arc::clone(&running);
        pushes.spawn(async move {
            for n in 0..125_u32 {
                let mut document = document(&node.id, 1 + n % 5);
                // 12 KiB each: 12 MB in all.
                document["tenants"][0]["pools"][0]["flake_ref"] =
                    json!(format!("github:org/hello?{}", "x".repeat(200)));
                let pools: Vec<Value> = (0..4)
                    .map(|at| {
                        let mut pool = document["tenants"][0]["pools"][0].clone();
                        pool["pool_id"] = json!(format!("web{at}"));
                        pool
                    })
                    .collect();
                document["tenants"][0]["pools"] = json!(pools);
                let told = running.push(&document, 0).await;
                assert_eq!(told.last().unwrap().stage, "stored");
            }
        });
    }
    while let Some(pushed) = pushes.join_next().await {
        pushed.unwrap();
    }
    assert_eq!(rest.put("/v1/tenants/zeta", &tenant()).await.status, 201);
    let told = slow.next().await;
    assert_eq!((told.what.as_str(), told.name()), ("added", "zeta"));
    // So is one that comes back to where it was.
    let told = Events::of(&mut Rest::operator(&running).await, &path).await.next().await;
    assert_eq!((told.what.as_str(), told.name()), ("added", "zeta"));
}

#[tokio::test]
async fn a_watch_from_before_what_is_kept_is_gone_and_the_client_lists_again() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    assert_eq!(rest.put("/v1/tenants/acme", &tenant()).await.status, 201);
    let from = version(&mut rest, "/v1/tenants").await;
    // Neither reads: one goes on from a version, one was told of what there is.
    let _abandoned = Events::of(&mut Rest::operator(&running).await, "/v1/api-keys?watch=true").await;
    let kind = kind_named("api-keys").unwrap();
    let mut following = Objects::new(channel(&running).await).watch(Query::all(kind));
    assert!(matches!(soon("a list", following.next()).await.unwrap(), Change::Listed(all) if all.is_empty()));
    // 24 MiB, and 16 are kept.
    for n in 0..110 {
        let answer = rest.put("/v1/api-keys/large", &large(224, n)).await;
        assert!(answer.status < 300, "{}", answer.body);
    }
    let gone = rest.get(&format!("/v1/tenants?watch=true&resource_version={from}")).await;
    assert_eq!((gone.status, gone.code()), (410, "gone"), "{}", gone.body);
    let future = rest.get("/v1/tenants?watch=true&resource_version=1000000000").await;
    assert_eq!((future.status, future.code()), (410, "gone"), "{}", future.body);
    let request =
        WatchRequest { kind: "tenants".to_owned(), resource_version: from, ..WatchRequest::default() };
    let refused = ObjectsClient::new(channel(&running).await).watch(request).await.unwrap_err();
    assert_eq!(mvm_client::problem_of(&refused).unwrap().code, "gone");
    // An object that was not changed for that long can still be waited for.
    let waited = rest.put("/v1/tenants/acme?wait=50ms", &tenant()).await;
    assert_eq!(waited.status, 200, "{}", waited.body);
    // It was told of changes until it was too far behind, and then of all that there is.
    loop {
        let newest = match soon("a change", following.next()).await.unwrap() {
            Change::Listed(all) => all.into_iter().next(),
            Change::Added(object) | Change::Modified(object) => Some(object),
            Change::Deleted(_) => panic!("nothing was deleted"),
        };
        if newest.is_some_and(|object| object.metadata.annotations["a0"].ends_with("109")) {
            break;
        }
    }
}

#[tokio::test]
async fn a_watch_goes_on_over_a_restart() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let from = version(&mut rest, "/v1/tenants").await;
    assert_eq!(rest.put("/v1/tenants/a", &tenant()).await.status, 201);
    running.stop().await;
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    assert_eq!(rest.put("/v1/tenants/b", &tenant()).await.status, 201);
    let path = format!("/v1/tenants?watch=true&resource_version={from}");
    let mut events = Events::of(&mut rest, &path).await;
    let mut added = Vec::new();
    while added.len() < 2 {
        let told = events.next().await;
        // Their statuses are written meanwhile.
        if told.what != "modified" {
            added.push((told.what.clone(), told.name().to_owned()));
        }
    }
    assert_eq!(added, ["a", "b"].map(|name| ("added".to_owned(), name.to_owned())));
}

#[tokio::test]
async fn a_watch_of_some_objects_is_told_of_no_others() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let labelled = |team: &str| json!({ "metadata": { "labels": { "team": team } }, "spec": {} });
    let from = version(&mut rest, "/v1/tenants").await;
    let queries = ["label_selector=team%3Dsearch", "field_selector=metadata.name%3Da"];
    let mut watches = Vec::new();
    for query in queries {
        for after in [String::new(), format!("&resource_version={from}")] {
            let path = format!("/v1/tenants?watch=true&{query}{after}");
            let mut events = Events::of(&mut Rest::operator(&running).await, &path).await;
            if after.is_empty() {
                assert_eq!(events.next().await.what, "bookmark");
            }
            watches.push(events);
        }
    }
    for (name, team) in [
        ("b", "other"),
        ("b", "third"),
        ("a", "search"),
        ("a", "other"),
        ("b", "other"),
        ("a", "other2"),
        ("a", "search"),
    ] {
        let answer = rest.put(&format!("/v1/tenants/{name}"), &labelled(team)).await;
        assert!(answer.status < 300, "{}", answer.body);
    }
    rest.call("DELETE", "/v1/tenants/b", &[], None).await;
    rest.call("DELETE", "/v1/tenants/a?force=true", &[], None).await;
    let expected = [
        // By label: it comes, goes and comes; one that goes on from a version may have known `b`.
        &["added a", "deleted a", "added a", "deleted a"][..],
        &["deleted b", "added a", "deleted a", "added a", "deleted a"],
        // By name: all that happens to it.
        &["added a", "modified a", "modified a", "modified a", "deleted a"],
        &["added a", "modified a", "modified a", "modified a", "deleted a"],
    ];
    for (events, expected) in watches.iter_mut().zip(expected) {
        for wanted in expected {
            let told = events.next().await;
            assert_eq!(format!("{} {}", told.what, told.name()), *wanted, "of {expected:?}");
        }
    }
}

#[tokio::test]
async fn five_hundred_watches_are_told_and_abandoned_ones_hold_nothing_up() {
    const CONNECTIONS: usize = 10;
    const WATCHES: usize = 50;
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let mut watches = Vec::new();
    for _ in 0..CONNECTIONS {
        let client = ObjectsClient::new(channel(&running).await);
        for _ in 0..WATCHES {
            let request = WatchRequest { kind: "tenants".to_owned(), ..WatchRequest::default() };
            watches.push(client.clone().watch(request).await.unwrap().into_inner());
        }
    }
    // Half of them are never read again.
    let abandoned = watches.split_off(watches.len() / 2);
    for n in 0..100 {
        assert_eq!(rest.put(&format!("/v1/tenants/t{n}"), &tenant()).await.status, 201);
    }
    let mut readers = JoinSet::new();
    for mut watch in watches {
        readers.spawn(async move {
            let mut seen = 0;
            while seen < 100 {
                let event = soon("an event", watch.message()).await.unwrap().unwrap();
                seen += usize::from(event.r#type == "added");
            }
        });
    }
    while let Some(read) = readers.join_next().await {
        read.unwrap();
    }
    drop(abandoned);
    assert_eq!(rest.get("/v1/tenants?limit=1").await.status, 200);
}

#[tokio::test]
async fn a_caller_without_a_credential_is_refused_before_its_body_is_read() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    for key in ["", "authorization: Bearer mvm_0011223344556677_x\r\n"] {
        let mut stream = Rest::stream(&running, None).await;
        // The length is announced, and the body never comes.
        let head = format!(
            "POST /v1/tenants HTTP/1.1\r\nhost: x\r\n{key}content-type: application/json\r\ncontent-length: 8000000\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = [0; 12];
        soon("a refusal", stream.read_exact(&mut answer)).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&answer), "HTTP/1.1 401");
    }
}

/// Everything that an answer says but for its request's ids, with the names that were asked for.
fn said(answer: &Answered, names: [&str; 2]) -> (u16, String) {
    let mut body = answer.body.clone();
    if let Some(members) = body.as_object_mut() {
        members.remove("request_id");
        members.remove("trace_id");
    }
    (answer.status, body.to_string().replace(names[0], "TENANT").replace(names[1], "NAME"))
}

#[tokio::test]
async fn what_a_tenants_key_may_not_see_is_told_as_what_is_not_there() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    for name in ["acme", "zeta"] {
        assert_eq!(rest.put(&format!("/v1/tenants/{name}"), &tenant()).await.status, 201);
    }
    assert_eq!(rest.put("/v1/tenants/zeta/pools/hidden", &pool(0)).await.status, 201);
    running.enrol("hidden").await;
    rest.put("/v1/api-keys/hidden", &json!({ "spec": { "role": "viewer" } })).await;
    let mut keys = Vec::new();
    for role in ["tenant-admin", "tenant-user"] {
        let key = json!({ "spec": { "role": role, "tenant": "acme" } });
        let made = rest.put(&format!("/v1/api-keys/{role}"), &key).await;
        keys.push(made.body["status"]["secret"].as_str().unwrap().to_owned());
    }
    // The same idempotency key, used for what another tenant has.
    let once = [("idempotency-key", "one")];
    let mut body = pool(0);
    body["metadata"] = json!({ "name": "once" });
    assert_eq!(rest.call("POST", "/v1/tenants/zeta/pools", &once, Some(&body)).await.status, 201);

    let of_plan = |tenant: &str, name: &str| {
        let mut object = pool(1);
        object["api_version"] = json!("mvm/v1");
        object["kind"] = json!("Pool");
        object["metadata"] = json!({ "tenant": tenant, "name": name });
        json!({ "objects": [object] })
    };
    for key in &keys {
        let mut keyed = Rest::with_key(&running, Some(key)).await;
        let mut compared = 0;
        for (method, path, headers, body) in [
            ("GET", "/v1/tenants/TENANT", &[][..], None),
            ("PUT", "/v1/tenants/TENANT", &[], Some(tenant())),
            ("PUT", "/v1/tenants/TENANT?dry_run=true", &[], Some(tenant())),
            ("PATCH", "/v1/tenants/TENANT", &[], Some(json!({ "spec": {} }))),
            ("DELETE", "/v1/tenants/TENANT", &[], None),
            ("DELETE", "/v1/tenants/TENANT?force=true&dry_run=true", &[], None),
            ("GET", "/v1/tenants/TENANT/pools", &[], None),
            ("GET", "/v1/tenants/TENANT/pools?limit=1&continue=TENANT%2FNAME", &[], None),
            ("GET", "/v1/tenants/TENANT/pools?watch=true", &[], None),
            ("GET", "/v1/tenants/TENANT/pools?watch=true&resource_version=1", &[], None),
            (
                "POST",
                "/v1/tenants/TENANT/pools",
                &once,
                Some(json!({ "metadata": { "name": "NAME" }, "spec": pool(0)["spec"] })),
            ),
            (
                "POST",
                "/v1/tenants/TENANT/pools?dry_run=true",
                &[],
                Some(json!({ "metadata": { "name": "NAME" }, "spec": pool(0)["spec"] })),
            ),
            ("GET", "/v1/tenants/TENANT/pools/NAME", &[], None),
            ("PUT", "/v1/tenants/TENANT/pools/NAME", &[], Some(pool(0))),
            ("PUT", "/v1/tenants/TENANT/pools/NAME", &[("if-match", "\"1\"")], Some(pool(0))),
            ("PUT", "/v1/tenants/TENANT/pools/NAME?wait=1s", &[], Some(pool(0))),
            ("PATCH", "/v1/tenants/TENANT/pools/NAME", &[], Some(json!({ "spec": { "critical": true } }))),
            ("DELETE", "/v1/tenants/TENANT/pools/NAME", &[], None),
            ("DELETE", "/v1/tenants/TENANT/pools/NAME?dry_run=true", &[("if-match", "\"1\"")], None),
            ("GET", "/v1/explain/pool/TENANT/NAME", &[], None),
            ("GET", "/v1/nodes/NAME", &[], None),
            ("PUT", "/v1/nodes/NAME", &[], Some(json!({ "spec": {} }))),
            ("DELETE", "/v1/nodes/NAME", &[], None),
            ("GET", "/v1/api-keys/NAME", &[], None),
            ("PUT", "/v1/api-keys/NAME", &[], Some(json!({ "spec": { "role": "viewer" } }))),
            ("DELETE", "/v1/api-keys/NAME", &[], None),
            ("POST", "/v1/plan", &[], Some(of_plan("TENANT", "NAME"))),
        ] {
            let mut answers = Vec::new();
            for names in [["zeta", "hidden"], ["nope", "absent"]] {
                let named = |text: &str| text.replace("TENANT", names[0]).replace("NAME", names[1]);
                let body = body
                    .as_ref()
                    .map(|body: &Value| serde_json::from_str::<Value>(&named(&body.to_string())).unwrap());
                let answer = keyed.call(method, &named(path), headers, body.as_ref()).await;
                assert_eq!(
                    (answer.status, answer.code()),
                    (404, "not_found"),
                    "{method} {path}: {}",
                    answer.body
                );
                answers.push(said(&answer, names));
            }
            assert_eq!(answers[0], answers[1], "{method} {path}");
            compared += 1;
        }
        assert_eq!(compared, 27);
        // What it may see says nothing of the others.
        for path in [
            "/v1/pools",
            "/v1/tenants",
            "/v1/pools?label_selector=!x",
            "/v1/pools?field_selector=metadata.tenant%3Dzeta",
        ] {
            let answer = keyed.get(path).await;
            assert!(
                answer.status == 200 && !answer.body.to_string().contains("zeta"),
                "{path}: {}",
                answer.body
            );
        }
        for path in ["/v1/nodes", "/v1/api-keys", "/v1/audit"] {
            let answer = keyed.get(path).await;
            assert!(
                matches!(answer.status, 403 | 404) && !answer.body.to_string().contains("hidden"),
                "{path}"
            );
        }
        let mut watching =
            Events::of(&mut Rest::with_key(&running, Some(key)).await, "/v1/pools?watch=true").await;
        let mut next = watching.next().await;
        while next.what != "bookmark" {
            assert_eq!(next.object["metadata"]["tenant"], "acme");
            next = watching.next().await;
        }
        rest.put("/v1/tenants/zeta/pools/more", &pool(0)).await;
        rest.call("DELETE", "/v1/tenants/zeta/pools/more?force=true", &[], None).await;
        let own =
            format!("/v1/tenants/acme/pools/p{}", key.len() + keys.iter().position(|k| k == key).unwrap());
        assert_eq!(rest.put(&own, &pool(0)).await.status, 201);
        assert_eq!(watching.next().await.object["metadata"]["tenant"], "acme");
    }
    assert_eq!(rest.get("/v1/tenants/zeta/pools/hidden").await.status, 200);
}

const FIVE_MINUTES_MS: i64 = 5 * 60 * 1000;

/// What a clock that is set while everything runs must leave as it is.
#[tokio::test]
async fn a_clock_that_is_set_while_it_runs_loses_no_node_and_no_request() {
    let (_dir, report) = new_cluster();
    // A node is told as away two heartbeats after its session ended.
    let quick = |settings: &mut CoordinatorSettings| settings.heartbeat = Duration::from_secs(5);
    let running = Running::start_with(&report.data_dir, quick).await;
    let mut rest = Rest::operator(&running).await;
    assert_eq!(rest.put("/v1/tenants/acme", &tenant()).await.status, 201);
    let node = FakeNode::start(running.enrol("a").await);
    let spare = FakeNode::start(running.enrol("b").await);
    let is = async |node: &str, state: &str| {
        Rest::operator(&running).await.get(&format!("/v1/nodes/{node}")).await.body["status"]["state"]
            == state
    };
    wait_until("both nodes", async || is("a", "Ready").await && is("b", "Ready").await).await;
    let mut body = pool(2);
    body["metadata"] = json!({ "name": "web" });
    let once = [("idempotency-key", "one")];
    let made = rest.call("POST", "/v1/tenants/acme/pools", &once, Some(&body)).await;
    assert_eq!(made.status, 201);
    let has = |node: &FakeNode| node.heard.lock().mark.clone();
    wait_until("the documents", async || has(&node).is_some() && has(&spare).is_some()).await;
    let marks = (has(&node), has(&spare));
    // One is away, for much less than the grace of five minutes.
    node.follow(None);
    wait_until("it to be away", async || is("a", "Unknown").await).await;
    for shift_ms in [FIVE_MINUTES_MS, -FIVE_MINUTES_MS, 2 * FIVE_MINUTES_MS, 0] {
        mvm_coordinator::shift_clock(shift_ms);
        // A change has everything settled by the new time.
        let labels = json!({ "metadata": { "labels": { "at": format!("s{}", shift_ms.unsigned_abs()) } }, "spec": {} });
        assert!(rest.put("/v1/tenants/other", &labels).await.status < 300);
        spare.say(&format!("at {shift_ms}"));
        wait_until("what the node says", async || {
            let shown = Rest::operator(&running).await.get("/v1/nodes/b").await.body;
            shown["status"]["conditions"][0]["message"] == format!("at {shift_ms}")
        })
        .await;
        assert!(is("a", "Unknown").await, "by {shift_ms} ms it is lost");
        let again = rest.call("POST", "/v1/tenants/acme/pools", &once, Some(&body)).await;
        assert_eq!(
            (again.status, &again.body["metadata"]["uid"]),
            (200, &made.body["metadata"]["uid"]),
            "by {shift_ms} ms"
        );
        assert_eq!(has(&spare), marks.1, "by {shift_ms} ms what the other node had went over to this one");
    }
    node.follow(Some(running.addresses.quic));
    wait_until("it to be back", async || is("a", "Ready").await).await;
    assert_eq!((has(&node), has(&spare)), marks);
}

#[tokio::test]
async fn a_clock_that_is_set_between_two_starts_changes_nothing() {
    let (_dir, report) = new_cluster();
    let mut running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    assert_eq!(rest.put("/v1/tenants/acme", &tenant()).await.status, 201);
    let node = FakeNode::start(running.enrol("a").await);
    assert_eq!(rest.put(POOL, &pool(1)).await.status, 201);
    let mark = || node.heard.lock().mark.clone();
    wait_until("the document", async || mark().is_some()).await;
    let had = mark();
    // Back, and forward.
    for shift_ms in [-FIVE_MINUTES_MS, 0] {
        node.follow(None);
        running.stop().await;
        mvm_coordinator::shift_clock(shift_ms);
        running = Running::start(&report.data_dir).await;
        node.follow(Some(running.addresses.quic));
        let ready = async || {
            let mut rest = Rest::operator(&running).await;
            let (node, pool) = (rest.get("/v1/nodes/a").await.body, rest.get(POOL).await.body);
            (node["status"]["state"] == "Ready") && pool["status"]["ready"] == "1/1"
        };
        wait_until("the node to be back", ready).await;
        assert_eq!(mark(), had, "by {shift_ms} ms: what it has is not issued again");
    }
    // What comes after is above what there was, whatever the clock says.
    assert_eq!(Rest::operator(&running).await.put(POOL, &pool(2)).await.status, 200);
    wait_until("the next document", async || mark() != had).await;
    let audit = Rest::operator(&running).await.get("/v1/audit").await.body;
    assert_eq!(audit["items"].as_array().unwrap().len(), 3, "{audit}");
}
