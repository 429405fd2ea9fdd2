//! Certificates that live 60 seconds, renewed under constant traffic: no request may fail. And a root that is replaced.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use mvm_pki::tls::client_config;
use mvm_pki::{Anchors, Credential, ExpectedPeer, LiveAnchors, LiveCredential, Role};
use mvm_tests::{Cluster, ClusterSettings, PATIENCE, path_text, wait_until};
use mvm_transport::{ALPN_H3, Client, Limits};

/// Renewals to see of the agent's and of the coordinator's certificate. Each comes after half of a life.
const RENEWALS: usize = 3;
/// Three half-lives with their jitter, and room for a busy machine.
const LIMIT: Duration = Duration::from_secs(170);
/// Requests on one connection before the next one is opened, so that both old and new connections meet each renewal.
const REQUESTS_PER_CONNECTION: u64 = 50;

/// Requests between two pushes: each push is two processes, and there are two cores.
const REQUESTS_PER_PUSH: u64 = 500;

struct Traffic {
    address: SocketAddr,
    credential: LiveCredential,
    anchors: LiveAnchors,
    stop: AtomicBool,
    done: AtomicU64,
}

impl Traffic {
    async fn connect(&self) -> Client {
        let expected = ExpectedPeer {
            cluster: self.credential.current().identity().cluster().clone(),
            role: Role::Node,
            name: Some("node-a".to_owned()),
            check_host: true,
        };
        let tls = client_config(Some(&self.credential), &self.anchors, expected, &[ALPN_H3])
            .expect("a test's own input");
        Client::connect(self.address, "127.0.0.1", tls, &Limits::default())
            .await
            .expect("a new connection is accepted")
    }

    async fn request(&self, client: &Client) {
        let request = http::Request::get("/v1/node/info").body(Bytes::new()).expect("a test's own input");
        let answer = client.request(request).await.expect("a request is answered");
        assert_eq!(answer.status(), 200);
        answer.into_body().bytes(1 << 20).await.expect("a body arrives");
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// New connections all the time.
    async fn short_connections(self: Arc<Self>) {
        while !self.stop.load(Ordering::Relaxed) {
            let client = self.connect().await;
            for _ in 0..REQUESTS_PER_CONNECTION {
                self.request(&client).await;
            }
            client.close().await;
        }
    }

    /// One connection that outlives every certificate it began with.
    async fn long_connection(self: Arc<Self>) {
        let client = self.connect().await;
        while !self.stop.load(Ordering::Relaxed) {
            self.request(&client).await;
        }
    }
}

fn serial(cluster: &Cluster) -> String {
    let dir = cluster.agent_dir("node-a");
    let status = cluster.mvm_json(&["agent", "certs", "status", "--data-dir", path_text(&dir)]);
    assert_eq!(status["state"], "valid", "{status}");
    status["serial"].as_str().expect("a test's own input").to_owned()
}

fn coordinator_serial(cluster: &Cluster) -> String {
    Credential::load(&cluster.coordinator_dir().join("pki/coordinator.pem"))
        .expect("a test's own input")
        .serial_hex()
        .to_owned()
}

#[test]
fn certificates_of_sixty_seconds_are_renewed_under_traffic_without_one_failed_request() {
    let settings = ClusterSettings::with(&["--leaf-life", "60s"]);
    let mut cluster = Cluster::start_with(settings);
    cluster.enrol("node-a");
    let sans = ["--san", "127.0.0.1", "--rate-per-second", "1000000", "--rate-burst", "1000000"];
    cluster.start_agent("node-a", &sans);
    cluster.wait_connected("node-a");
    let operator = cluster.coordinator_dir().join("operator");
    let traffic = Arc::new(Traffic {
        address: SocketAddr::from(([127, 0, 0, 1], cluster.agents["node-a"].port)),
        credential: LiveCredential::new(Credential::load(&operator.join("operator.pem")).unwrap()),
        anchors: LiveAnchors::new(Anchors::load(&operator.join("ca.crt")).unwrap()),
        stop: AtomicBool::new(false),
        done: AtomicU64::new(0),
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let loads = [
        runtime.spawn(traffic.clone().short_connections()),
        runtime.spawn(traffic.clone().long_connection()),
    ];

    let (mut agent, mut coordinator) = (BTreeSet::new(), BTreeSet::new());
    let deadline = Instant::now() + LIMIT;
    let mut pushes = 0;
    while (agent.len() <= RENEWALS || coordinator.len() <= RENEWALS) && Instant::now() < deadline {
        agent.insert(serial(&cluster));
        coordinator.insert(coordinator_serial(&cluster));
        // Operators and sessions are traffic too: every push goes over gRPC and down the node's one session.
        let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/minimal.json");
        cluster.mvm_ok(&["push", "-f", example, "--node", "node-a"]);
        pushes += 1;
        assert!(loads.iter().all(|load| !load.is_finished()), "a request failed");
        // Beside the traffic and not in its place.
        let before = traffic.done.load(Ordering::Relaxed);
        wait_until("the traffic to go on", PATIENCE, || {
            traffic.done.load(Ordering::Relaxed) >= before + REQUESTS_PER_PUSH
                || loads.iter().any(|load| load.is_finished())
        });
    }
    traffic.stop.store(true, Ordering::Relaxed);
    for load in loads {
        runtime.block_on(load).expect("no request failed");
    }
    println!(
        "{} requests and {pushes} pushes, agent renewed {} times, coordinator {} times",
        traffic.done.load(Ordering::Relaxed),
        agent.len() - 1,
        coordinator.len() - 1
    );
    assert!(
        agent.len() > RENEWALS && coordinator.len() > RENEWALS,
        "too few renewals: {agent:?} {coordinator:?}"
    );
}

fn roots_of(cluster: &Cluster) -> Vec<String> {
    let list = cluster.mvm_json(&[
        "coordinator",
        "root",
        "list",
        "--data-dir",
        path_text(&cluster.coordinator_dir()),
    ]);
    list.as_array()
        .expect("a test's own input")
        .iter()
        .map(|root| root["fingerprint"].as_str().expect("a test's own input").to_owned())
        .collect()
}

fn restart(cluster: &mut Cluster) {
    cluster.kill_coordinator();
    cluster.start_coordinator();
    cluster.wait_connected("node-a");
}

/// Waits until the agent's own list of roots is what the coordinator's is.
fn wait_agent_roots(cluster: &Cluster, roots: &[String]) {
    let dir = cluster.agent_dir("node-a");
    wait_until("the agent to take the list of roots", PATIENCE, || {
        let status = cluster.mvm_json(&["agent", "certs", "status", "--data-dir", path_text(&dir)]);
        let mut known: Vec<_> = status["roots"]
            .as_array()
            .expect("a test's own input")
            .iter()
            .map(|root| root["fingerprint"].as_str().expect("a test's own input").to_owned())
            .collect();
        let mut roots = roots.to_vec();
        known.sort();
        roots.sort();
        known == roots
    });
    wait_told(cluster, "node-a", roots);
}

/// Waits until the coordinator knows that the node trusts exactly these roots.
fn wait_told(cluster: &Cluster, node: &str, roots: &[String]) {
    cluster.wait_node(node, "the coordinator to know its roots", |node| {
        let told = node["info"]["roots"].as_array().cloned().unwrap_or_default();
        told.len() == roots.len() && roots.iter().all(|root| told.iter().any(|told| told == root))
    });
}

#[test]
fn the_root_is_replaced_while_an_agent_stays_connected_and_served() {
    let mut cluster = Cluster::start_with(ClusterSettings::with(&["--leaf-life", "12s"]));
    cluster.join("node-a");
    let (data, new_root) = (cluster.coordinator_dir(), cluster.path().join("new-root"));
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/minimal.json");
    let root = |cluster: &Cluster, step: &[&str]| {
        cluster.mvm_ok(&[&["coordinator", "root"], step, &["--data-dir", path_text(&data)]].concat());
    };
    let old = roots_of(&cluster);

    root(&cluster, &["add", "--root-key-dir", path_text(&new_root)]);
    restart(&mut cluster);
    wait_agent_roots(&cluster, &roots_of(&cluster));
    cluster.mvm_ok(&["push", "-f", example]);

    root(&cluster, &["switch", "--root-key-dir", path_text(&new_root)]);
    assert!(
        !cluster
            .mvm(&["coordinator", "root", "retire", &roots_of(&cluster)[0], "--data-dir", path_text(&data)])
            .status
            .success()
    );
    // The coordinator issues under the old root until it is started again.
    let told =
        cluster.mvm_fails(&["coordinator", "root", "retire", &old[0], "--data-dir", path_text(&data)], 1);
    assert!(
        told.contains("1 of 1 nodes") && told.contains("node-a: its certificate was issued under it"),
        "{told}"
    );
    assert!(told.contains("mvm agent certs rotate") && told.contains("--force"), "{told}");
    restart(&mut cluster);
    let before = serial(&cluster);
    wait_until("the agent to be renewed under the new root", PATIENCE, || serial(&cluster) != before);
    cluster.mvm_ok(&["push", "-f", example]);

    root(&cluster, &["retire", &old[0]]);
    let operator = cluster.coordinator_dir().join("operator");
    cluster.mvm_ok(&[
        "coordinator",
        "operator",
        "create",
        "admin",
        "--data-dir",
        path_text(&data),
        "--out",
        path_text(&operator),
    ]);
    restart(&mut cluster);
    wait_agent_roots(&cluster, &roots_of(&cluster));
    cluster.mvm_ok(&["push", "-f", example]);
    assert_ne!(roots_of(&cluster), old);
}

#[test]
fn a_switch_that_would_cut_nodes_off_is_refused_and_a_forced_one_can_be_taken_back() {
    let mut cluster = Cluster::start();
    for node in ["node-a", "node-b"] {
        cluster.join(node);
    }
    let data = cluster.coordinator_dir();
    let (old_dir, new_dir) = (data.join("pki/root"), cluster.path().join("new-root"));
    let step = |step: &[&'static str], dir: &std::path::Path| -> Vec<String> {
        let words = [&["coordinator", "root"], step].concat();
        let mut words: Vec<String> = words.into_iter().map(str::to_owned).collect();
        words.extend(["--data-dir", path_text(&data), "--root-key-dir", path_text(dir)].map(str::to_owned));
        words
    };
    let ok = |cluster: &Cluster, args: &[String]| {
        cluster.mvm_ok(&args.iter().map(String::as_str).collect::<Vec<_>>());
    };
    let refused = |cluster: &Cluster, args: &[String]| {
        cluster.mvm_fails(&args.iter().map(String::as_str).collect::<Vec<_>>(), 1)
    };
    let rotate = |cluster: &Cluster, node: &str| {
        let dir = cluster.agent_dir(node);
        cluster.mvm_ok(&["agent", "certs", "rotate", "--data-dir", path_text(&dir)]);
        wait_told(cluster, node, &roots_of(cluster));
    };
    let old = roots_of(&cluster);
    for node in ["node-a", "node-b"] {
        wait_told(&cluster, node, &old);
    }

    ok(&cluster, &step(&["add"], &new_dir));
    let told = refused(&cluster, &step(&["switch"], &new_dir));
    assert!(told.contains("2 of 2 nodes") && told.contains("node-a:") && told.contains("node-b:"), "{told}");
    assert!(told.contains("mvm agent certs rotate") && told.contains("--force"), "{told}");
    restart(&mut cluster);
    cluster.wait_connected("node-b");
    rotate(&cluster, "node-a");
    let told = refused(&cluster, &step(&["switch"], &new_dir));
    assert!(told.contains("1 of 2 nodes") && !told.contains("node-a:") && told.contains("node-b:"), "{told}");

    // What was told is remembered of a node that is away, too.
    cluster.kill_agent("node-b");
    cluster.wait_node("node-b", "missed", |node| node["connected"] == false);
    assert!(refused(&cluster, &step(&["switch"], &new_dir)).contains("node-b: it is not connected"));
    ok(&cluster, &step(&["switch", "--force"], &new_dir));
    restart(&mut cluster);
    cluster.start_agent("node-b", &[]);
    wait_until("node-b to be cut off", PATIENCE, || {
        cluster.agents["node-b"].process.log().contains("could not open a session")
    });

    // The way back, with no force: every node trusts the old root.
    ok(&cluster, &step(&["switch"], &old_dir));
    restart(&mut cluster);
    cluster.wait_connected("node-b");
    rotate(&cluster, "node-b");
    ok(&cluster, &step(&["switch"], &new_dir));
    restart(&mut cluster);
    cluster.wait_connected("node-b");

    // Only what was issued since the switch is under the new root.
    rotate(&cluster, "node-a");
    let retire = ["coordinator", "root", "retire", &old[0], "--data-dir", path_text(&data)];
    let told = cluster.mvm_fails(&retire, 1);
    assert!(told.contains("1 of 2 nodes") && !told.contains("node-a:") && told.contains("node-b:"), "{told}");
    cluster.mvm_ok(&[&retire[..], &["--force"]].concat());
    assert!(!roots_of(&cluster).contains(&old[0]));
}
