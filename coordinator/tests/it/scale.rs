//! Pools that are scaled: what is measured moves the count, the count is durable, and only those who may change a pool tell.

use mvm_proto::document::Pool;
use mvm_proto::status::{Counts, NodeStatus, PoolStatus};
use mvm_proto::wire::session::v1::agent_frame;
use serde_json::{Value, json};

use crate::crashes::FakeNode;
use crate::objects::{POOL, acme, connect, field, until};
use crate::rest::Rest;
use crate::support::{Running, Session, new_cluster, now, wait_until};

fn pool(scale: &Value) -> Value {
    json!({ "spec": {
        "image": { "ref": "builtin:busybox" },
        "resources": { "vcpus": 1, "mem_mib": 64 },
        "scale": scale,
    } })
}

fn by_queue() -> Value {
    pool(&json!({ "min": 1, "max": 8, "metric": "queue_depth", "target": 10 }))
}

async fn tell(rest: &mut Rest, path: &str, value: f64) -> u16 {
    rest.put(&format!("{path}/scale-metric"), &json!({ "value": value })).await.status
}

#[tokio::test]
async fn a_queue_that_grows_makes_more_run_and_the_count_outlives_the_coordinator() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let made = rest.put(POOL, &by_queue()).await;
    assert_eq!(made.status, 201, "{}", made.body);
    until(&mut rest, POOL, "/status/scale/running", &json!(1)).await;
    assert_eq!(field(&mut rest, POOL, "/status/scale/reason").await, json!("NoMeasurement"));
    // Five for fifty entries, at most four more at a time.
    assert_eq!(tell(&mut rest, POOL, 50.0).await, 200);
    until(&mut rest, POOL, "/status/scale/running", &json!(5)).await;
    until(&mut rest, POOL, "/status/ready", &json!("0/5")).await;
    assert_eq!(field(&mut rest, POOL, "/spec/counts/running").await, json!(0), "what is declared stays");
    wait_until("the event", async || {
        let events = Rest::operator(&running).await.get("/v1/events?object=pool/acme/web").await.body;
        let mut events = events["items"].as_array().unwrap().iter();
        events.any(|event| {
            event["reason"] == "ScaledUp" && event["message"] == "from 1 to 5 running, the load is 50.0"
        })
    })
    .await;
    running.stop().await;

    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    until(&mut rest, POOL, "/status/scale/running", &json!(5)).await;
    // Another bound counts at once; without `scale` the spec's own count does.
    let narrow = pool(&json!({ "min": 1, "max": 3, "metric": "queue_depth", "target": 10 }));
    assert_eq!(rest.put(POOL, &narrow).await.status, 200);
    until(&mut rest, POOL, "/status/ready", &json!("0/3")).await;
    let mut plain = pool(&Value::Null);
    plain["spec"]["counts"] = json!({ "running": 2 });
    plain["spec"].as_object_mut().unwrap().remove("scale");
    assert_eq!(rest.put(POOL, &plain).await.status, 200);
    until(&mut rest, POOL, "/status/ready", &json!("0/2")).await;
    assert_eq!(field(&mut rest, POOL, "/status/scale").await, Value::Null);
    running.stop().await;
}

#[tokio::test]
async fn only_who_works_with_a_pool_tells_of_its_load_and_only_of_one_that_is_scaled_by_it() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    assert_eq!(rest.put(POOL, &by_queue()).await.status, 201);
    let cpu = pool(&json!({ "max": 3, "metric": "cpu", "target": 50 }));
    const BY_CPU: &str = "/v1/tenants/acme/pools/busy";
    assert_eq!(rest.put(BY_CPU, &cpu).await.status, 201);
    for (role, expected) in [("tenant-admin", 200), ("tenant-user", 200), ("viewer", 403)] {
        let key = json!({ "spec": { "role": role, "tenant": "acme" } });
        let made = rest.put(&format!("/v1/api-keys/{role}"), &key).await;
        let secret = made.body["status"]["secret"].as_str().unwrap().to_owned();
        let mut keyed = Rest::with_key(&running, Some(&secret)).await;
        assert_eq!(tell(&mut keyed, POOL, 5.0).await, expected, "{role}");
        assert_eq!(tell(&mut keyed, "/v1/tenants/zeta/pools/web", 5.0).await, 404, "{role}");
    }
    assert_eq!(tell(&mut rest, BY_CPU, 5.0).await, 409);
    for bad in [json!({ "value": -1 }), json!({ "value": "5" }), json!({ "value": 1, "at": 2 }), json!({})] {
        assert_eq!(rest.put(&format!("{POOL}/scale-metric"), &bad).await.status, 400, "{bad}");
    }
    let mut both = by_queue();
    both["spec"]["counts"] = json!({ "running": 2 });
    for (bad, path) in [
        (both, "spec.counts.running"),
        (pool(&json!({ "min": 3, "max": 2, "metric": "requests", "target": 1 })), "spec.scale.max"),
        (pool(&json!({ "min": 0, "max": 2, "metric": "cpu", "target": 1 })), "spec.scale.min"),
        (pool(&json!({ "max": 2, "metric": "load", "target": 1 })), "spec.scale.metric"),
    ] {
        let refused = rest.put(POOL, &bad).await;
        assert!(
            refused.status >= 400 && refused.body["errors"].to_string().contains(path),
            "{}",
            refused.body
        );
    }
    running.stop().await;
}

async fn report(session: &mut Session, cpu_percent: u32) {
    let counts = Some(Counts { running: 1, ..Counts::default() });
    let pool = PoolStatus {
        tenant_id: "acme".to_owned(),
        pool_id: "web".to_owned(),
        actual: counts,
        cpu_percent: Some(cpu_percent),
        ..PoolStatus::default()
    };
    let status = NodeStatus {
        node_id: "n1".to_owned(),
        observed_at: now().to_string(),
        pools: vec![pool],
        ..NodeStatus::default()
    };
    session.send(agent_frame::Body::Status(status)).await;
}

#[tokio::test]
async fn processors_that_instances_use_make_more_run() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let node = running.enrol("n1").await;
    let mut session = connect(&node, 16, None).await;
    let spec = pool(&json!({ "max": 8, "metric": "cpu", "target": 50 }));
    assert_eq!(rest.put(POOL, &spec).await.status, 201);
    session.obey().await;
    report(&mut session, 95).await;
    wait_until("two to be wanted", async || {
        Rest::operator(&running).await.get(POOL).await.body["status"]["scale"]["running"] == 2
    })
    .await;
    assert_eq!(field(&mut rest, POOL, "/status/scale/load").await, json!(95.0));
    // What one instance can't use is not believed of it.
    session.obey().await;
    report(&mut session, u32::MAX).await;
    wait_until("four to be wanted", async || {
        Rest::operator(&running).await.get(POOL).await.body["status"]["scale"]["running"] == 4
    })
    .await;
    assert_eq!(field(&mut rest, POOL, "/status/scale/load").await, json!(200.0));
    running.stop().await;
}

/// Its new instances are of the revision that is rolled out where they have their place, and the limits hold for what is wanted now.
#[tokio::test]
async fn a_pool_grows_and_shrinks_in_the_middle_of_a_rollout() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let node = FakeNode::start(running.enrol("n1").await);
    let other = FakeNode::start(running.enrol("n2").await);
    let mut spec = by_queue();
    spec["spec"]["counts"] = json!({ "warm": 2 });
    spec["spec"]["placement"] = json!({ "max_per_node": 6 });
    assert_eq!(rest.put(POOL, &spec).await.status, 201);
    until(&mut rest, POOL, "/status/rollout/phase", &json!("done")).await;
    spec["spec"]["resources"]["mem_mib"] = json!(96);
    spec["spec"]["update"] = json!({ "paused": true });
    assert_eq!(rest.put(POOL, &spec).await.status, 200);
    until(&mut rest, POOL, "/status/rollout/phase", &json!("paused")).await;
    // What is begun meanwhile is of the revision that is everywhere.
    assert_eq!(tell(&mut rest, POOL, 80.0).await, 200);
    until(&mut rest, POOL, "/status/ready", &json!("8/8")).await;
    let sizes = || {
        let of = |node: &FakeNode| {
            let heard = node.heard.lock();
            let pools = heard.desired.iter().flat_map(mvm_proto::DesiredState::pools);
            let of_pool = |pool: &Pool| (pool.instance_resources.mem_mib, pool.desired_counts.running);
            pools.map(|(_, pool)| of_pool(pool)).collect::<Vec<(u64, u32)>>()
        };
        [&node, &other].map(of).concat()
    };
    let running_now = |sizes: &[(u64, u32)]| sizes.iter().map(|(_, running)| running).sum::<u32>();
    let all: Vec<(u64, u32)> = sizes();
    assert_eq!((running_now(&all), all.iter().all(|(mem_mib, _)| *mem_mib == 64)), (8, true), "{all:?}");
    assert_eq!(
        field(&mut rest, POOL, "/status/counts/warm").await,
        json!(0),
        "the nodes of this test keep none"
    );
    // It goes on, with as many as are wanted by now; the other counts are as declared.
    spec["spec"]["update"] = json!({});
    spec["spec"]["scale"]["max"] = json!(3);
    assert_eq!(rest.put(POOL, &spec).await.status, 200);
    until(&mut rest, POOL, "/status/rollout/phase", &json!("done")).await;
    until(&mut rest, POOL, "/status/ready", &json!("3/3")).await;
    let all = sizes();
    assert_eq!((running_now(&all), all.iter().all(|(mem_mib, _)| *mem_mib == 96)), (3, true), "{all:?}");
    assert_eq!(field(&mut rest, POOL, "/status/rollout/settled").await, json!(2));
    running.stop().await;
}
