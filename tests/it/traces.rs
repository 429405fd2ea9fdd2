//! Traces from a command through coordinator and agent to a guest: real processes, and a collector that the test runs.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use mvm_needs::{Need, can_run};
use mvm_tests::{Cluster, ClusterSettings, PATIENCE, path_text, small_pool, wait_until};
use serde_json::Value;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";
const TOKEN: &str = "Bearer hunter2";

/// A collector of OTLP over HTTP: it keeps the bodies that it was posted with the right token.
struct Collector {
    address: SocketAddr,
    bodies: Arc<Mutex<Vec<Vec<u8>>>>,
    is_over: Arc<AtomicBool>,
    serving: Option<JoinHandle<()>>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (bodies, is_over) = (Arc::<Mutex<Vec<_>>>::default(), Arc::<AtomicBool>::default());
        let (kept, over) = (Arc::clone(&bodies), Arc::clone(&is_over));
        let serving = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Ordering::SeqCst) {
                    return;
                }
                if let Some(body) = stream.ok().and_then(|stream| take(&stream)) {
                    kept.lock().unwrap().push(body);
                }
            }
        });
        Self { address, bodies, is_over, serving: Some(serving) }
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What was posted, as Python's decoder reads it.
    fn spans(&self, cluster: &Cluster) -> Vec<Value> {
        let bodies = self.bodies.lock().unwrap().clone();
        let files: Vec<PathBuf> = bodies
            .iter()
            .enumerate()
            .map(|(number, body)| {
                let path = cluster.path().join(format!("posted-{number}"));
                std::fs::write(&path, body).unwrap();
                path
            })
            .collect();
        let repository = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let python = repository.join("target/interop-venv/bin/python");
        assert!(python.exists(), "the Python environment is missing: run scripts/setup");
        let script = repository.join("tests/interop/otlp_decode.py");
        let decoded = Command::new(python).arg(script).args(files).output().unwrap();
        assert!(decoded.status.success(), "{}", String::from_utf8_lossy(&decoded.stderr));
        let lines = String::from_utf8(decoded.stdout).unwrap();
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        self.serving.take().map(JoinHandle::join);
    }
}

/// Reads one request and answers it as a collector does.
fn take(stream: &TcpStream) -> Option<Vec<u8>> {
    let mut reader = BufReader::new(stream);
    let (mut head, mut line) = (Vec::new(), String::new());
    while reader.read_line(&mut line).ok()? > 2 {
        head.push(std::mem::take(&mut line).trim_end().to_lowercase());
    }
    let header = |name: &str| {
        head.iter().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned())
    };
    let mut body = vec![0; header("content-length:")?.parse().ok()?];
    reader.read_exact(&mut body).ok()?;
    let is_right = head[0] == "post /v1/traces http/1.1"
        && header("content-type:").as_deref() == Some("application/x-protobuf")
        && header("authorization:").as_deref() == Some(&TOKEN.to_lowercase());
    let status = if is_right { "200 OK" } else { "401 Unauthorized" };
    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    (&mut &*stream).write_all(answer.as_bytes()).ok()?;
    is_right.then_some(body)
}

/// A coordinator and `node-a`, both of which export to the collector and record only what a caller asks for.
fn cluster(collector: &Collector, driver: impl FnOnce(&mut Cluster, &[&str])) -> Cluster {
    let dir = tempfile::tempdir().unwrap();
    let headers = dir.path().join("headers");
    std::fs::write(&headers, format!("authorization: {TOKEN}\n")).unwrap();
    std::fs::set_permissions(&headers, std::fs::Permissions::from_mode(0o600)).unwrap();
    let url = collector.url();
    let flags = ["--otlp-endpoint", &url, "--otlp-headers-file", path_text(&headers)];
    let flags = [&flags[..], &["--otlp-sampling-ratio", "0"]].concat();
    let mut cluster = Cluster::start_with(ClusterSettings::with(&flags));
    cluster.enrol("node-a");
    driver(&mut cluster, &flags);
    cluster.wait_connected("node-a");
    cluster
}

/// `mvm ARGS` as a part of [`TRACE`], which its caller records.
fn traced(cluster: &Cluster, args: &[&str]) -> Output {
    let mut command = cluster.command(args);
    command.env("TRACEPARENT", format!("00-{TRACE}-{CALLER}-01")).output().unwrap()
}

fn ok(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The one span of this service and name.
fn one<'a>(spans: &'a [Value], service: &str, name: &str) -> &'a Value {
    let found: Vec<_> =
        spans.iter().filter(|span| span["service"] == service && span["name"] == name).collect();
    assert_eq!(found.len(), 1, "{service} {name} in {spans:#?}");
    found[0]
}

fn declared(dir: &Cluster) -> PathBuf {
    let pool = "api_version: mvm/v1\nkind: Tenant\nmetadata: { name: acme }\n---\n".to_owned()
        + "api_version: mvm/v1\nkind: Pool\nmetadata: { tenant: acme, name: web }\n"
        + "spec: { image: { ref: 'builtin:busybox' }, resources: { vcpus: 1, mem_mib: 64 }, "
        + "counts: { running: 1 } }\n";
    dir.file("objects.yaml", &pool)
}

#[test]
fn one_trace_leads_from_apply_and_exec_through_the_coordinator_to_the_agents_steps_and_its_guest() {
    let collector = Collector::start();
    let cluster = cluster(&collector, |cluster, flags| cluster.start_agent("node-a", flags));
    let file = declared(&cluster);
    ok(traced(&cluster, &["apply", "-f", path_text(&file)]));
    cluster.mvm_ok(&["wait", "pool/acme/web", "--for=condition=Ready"]);
    assert_eq!(ok(traced(&cluster, &["exec", "acme/web", "--", "echo", "secret words"])), "secret words\n");
    // Nobody asks for these.
    cluster.mvm_ok(&["exec", "acme/web", "--", "echo", "others"]);
    cluster.mvm_ok(&["get", "pools", "-A"]);
    let mut spans = Vec::new();
    wait_until("all of the trace to be exported", PATIENCE, || {
        spans = collector.spans(&cluster);
        let has = |name: &str| spans.iter().any(|span| span["name"] == name);
        has("create instance") && has("guest exec") && has("relay exec")
    });
    assert!(spans.iter().all(|span| span["trace"] == TRACE), "{spans:#?}");

    let objects = |method: &str| format!("mvm.objects.v1.Objects/{method}");
    let applied: Vec<_> = spans.iter().filter(|span| span["name"] == objects("Apply").as_str()).collect();
    let names: Vec<_> = applied.iter().map(|span| span["attributes"]["mvm.object"].as_str()).collect();
    assert!(names.contains(&Some("tenants/acme")) && names.contains(&Some("pools/acme/web")), "{names:?}");
    let pool = applied.iter().find(|span| span["attributes"]["mvm.object"] == "pools/acme/web").unwrap();
    assert_eq!(pool["attributes"]["mvm.outcome"], "created");
    assert_eq!((&pool["parent"], &pool["service"]), (&CALLER.into(), &"mvm-coordinator".into()));

    // What followed from it: a document, its acceptance, its step.
    let issued = one(&spans, "mvm-coordinator", "issue document");
    let accepted = one(&spans, "mvm-agent", "accept document");
    let step = one(&spans, "mvm-agent", "create instance");
    assert!(applied.iter().any(|span| span["span"] == issued["parent"]), "{issued}");
    assert_eq!((&accepted["parent"], &step["parent"]), (&issued["span"], &accepted["span"]));
    assert_eq!(accepted["attributes"]["mvm.outcome"], "accepted");
    assert_eq!(step["attributes"]["mvm.phase"], "running");
    assert!(step["took"].as_u64() > Some(0));

    // The stream, hop by hop.
    let relay = one(&spans, "mvm-coordinator", "relay exec");
    let stream = one(&spans, "mvm-agent", "exec");
    let guest = one(&spans, "mvm-agent", "guest exec");
    assert_eq!((&stream["parent"], &guest["parent"]), (&relay["span"], &stream["span"]));
    assert_eq!(guest["attributes"]["mvm.exec.exit_code"], 0);
    assert_eq!(stream["attributes"]["mvm.instance"], step["attributes"]["mvm.instance"]);

    // Nothing of what ran, and of who may read it, is in any of them.
    let all = collector.bodies.lock().unwrap().concat();
    let has = |text: &str| all.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(!has("secret words") && !has("hunter2") && has("acme"));
}

#[test]
fn a_program_in_a_microvm_finds_the_trace_that_it_belongs_to() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let collector = Collector::start();
    let images = mvm_tests::test_images();
    let cluster = cluster(&collector, |cluster, flags| {
        let flags = [flags, &["--driver", "qemu", "--images-dir", path_text(&images)]].concat();
        let alone = ["--network", "none", "--cgroups", "best-effort", "--jail", "best-effort"];
        cluster.start_agent("node-a", &[&flags[..], &alone, &["--ignore-memory-pressure"]].concat());
    });
    let pool = small_pool(1, 0, 0);
    let file = cluster.file("document.json", &pool.to_string());
    cluster.mvm_ok(&["push", "-f", path_text(&file), "--node", "node-a"]);
    let listed = cluster.mvm_json(&["instance", "list"]);
    let id = listed[0]["instance_id"].as_str().unwrap();
    let script = "echo trace=$TRACEPARENT";
    let said = ok(traced(&cluster, &["exec", id, "--", "sh", "-c", script]));
    assert_eq!(cluster.mvm_ok(&["exec", id, "--", "sh", "-c", script]), "trace=\n", "nobody records it");
    let given = ok(traced(&cluster, &["exec", id, "--env", "TRACEPARENT=own", "--", "sh", "-c", script]));
    assert_eq!(given, "trace=own\n", "what the caller says stays");
    let mut spans = Vec::new();
    wait_until("the guest's span to be exported", PATIENCE, || {
        spans = collector.spans(&cluster);
        spans.iter().filter(|span| span["name"] == "guest exec").count() == 2
    });
    let of = |span: &&Value| format!("trace=00-{TRACE}-{}-01\n", span["span"].as_str().unwrap()) == said;
    assert!(spans.iter().filter(|span| span["name"] == "guest exec").any(|span| of(&span)), "{said}");
}

#[test]
fn a_collector_that_is_away_costs_spans_and_nothing_else() {
    let collector = Collector::start();
    let url = collector.url();
    // Its port is free again, and nothing listens there.
    drop(collector);
    let flags = ["--otlp-endpoint", &url];
    let mut cluster = Cluster::start_with(ClusterSettings::with(&flags));
    cluster.enrol("node-a");
    cluster.start_agent("node-a", &flags);
    cluster.wait_connected("node-a");
    let file = declared(&cluster);
    cluster.mvm_ok(&["apply", "-f", path_text(&file)]);
    cluster.mvm_ok(&["wait", "pool/acme/web", "--for=condition=Ready"]);
    assert_eq!(cluster.mvm_ok(&["exec", "acme/web", "--", "echo", "works"]), "works\n");
    wait_until("the coordinator to say so once", PATIENCE, || {
        let log = cluster.coordinator.as_ref().unwrap().log();
        log.matches("could not export spans").count() == 1
    });
    let log = cluster.coordinator.as_ref().unwrap().log();
    assert!(log.contains("request{trace="), "{log}");
}
