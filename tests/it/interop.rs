//! HTTP/3 with a client that is not ours: Python's aioquic, with an operator's certificate, against a real agent.
//!
//! `scripts/setup` makes the Python environment under `target/interop-venv`.

use std::path::PathBuf;
use std::process::{Command, Output};

use mvm_tests::{Cluster, path_text};
use serde_json::Value;

fn repository() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn aioquic(cluster: &Cluster, credential: &str, requests: &[&str]) -> Output {
    let python = repository().join("target/interop-venv/bin/python");
    assert!(python.exists(), "the Python environment is missing: run scripts/setup");
    let port = cluster.agents["node-a"].port.to_string();
    let ca = cluster.coordinator_dir().join("operator/ca.crt");
    let args = ["127.0.0.1", &port, "node-a", path_text(&ca), credential];
    let script = repository().join("tests/interop/h3_client.py");
    Command::new(python).arg(script).args(args).args(requests).output().expect("python runs")
}

fn answers(output: &Output) -> Vec<Value> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "aioquic failed: {stderr}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    stdout.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect()
}

#[test]
fn a_foreign_http3_client_reads_node_info_and_gets_problems_for_bad_requests() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    let operator = cluster.coordinator_dir().join("operator/operator.pem");
    let requests =
        ["GET", "/v1/node/info", "GET", "/v1/nothing-here", "GET", "/v1/tenants/NOT%20AN%20ID/instances"];
    let answers = answers(&aioquic(
        &cluster,
        path_text(&operator),
        &[&requests[..], &["POST", "/v1/reconcile"]].concat(),
    ));

    assert_eq!(answers[0]["status"], 200);
    assert_eq!(answers[0]["body"]["node_id"], "node-a");
    assert_eq!(answers[0]["body"]["cluster"], "test");
    let codes = [(&answers[1], 404), (&answers[2], 400), (&answers[3], 403)];
    for (answer, status) in codes {
        assert_eq!(answer["status"], status, "{answer}");
        assert_eq!(answer["content_type"], "application/problem+json", "{answer}");
        for member in ["code", "detail", "remediation"] {
            assert!(
                answer["body"][member].as_str().is_some_and(|text| !text.is_empty()),
                "{member} in {answer}"
            );
        }
    }
}

#[test]
fn a_foreign_client_without_a_certificate_gets_no_answer() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    let output = aioquic(&cluster, "-", &["GET", "/v1/node/info"]);
    assert!(!output.status.success());
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// schemathesis reads the API's description, and sends what it says is right and what it says is wrong. All its checks
/// but one: not everything that a schema takes is valid, since rules between fields are in no schema.
#[test]
fn a_foreign_tester_finds_the_api_as_its_description_says() {
    let cluster = Cluster::start();
    let objects = r#"
api_version: mvm/v1
kind: Tenant
metadata: { name: acme }
---
api_version: mvm/v1
kind: Pool
metadata: { tenant: acme, name: workers }
spec:
  image: { ref: "builtin:busybox" }
  resources: { vcpus: 1, mem_mib: 64 }
---
api_version: mvm/v1
kind: Secret
metadata: { tenant: acme, name: db }
spec: { data: { PASSWORD: hunter2 } }
---
api_version: mvm/v1
kind: ApiKey
metadata: { name: tester }
spec: { role: admin }
"#;
    let file = cluster.file("objects.yaml", objects);
    let applied = cluster.mvm(&["apply", "-f", path_text(&file)]);
    let told = String::from_utf8_lossy(&applied.stdout).into_owned();
    let key = told.split_whitespace().find(|word| word.starts_with("mvm_")).expect("the text of the key");
    let tester = repository().join("target/interop-venv/bin/st");
    assert!(tester.exists(), "schemathesis is missing: run scripts/setup");
    let ca = cluster.coordinator_dir().join("operator/ca.crt");
    let output = Command::new(tester)
        .current_dir(cluster.path())
        .env("SCHEMATHESIS_HOOKS", "schemathesis_hooks")
        .env("PYTHONPATH", repository().join("tests/interop"))
        .args(["run", &format!("{}/openapi.json", cluster.url()), "--tls-verify", path_text(&ca)])
        .args(["-H", &format!("Authorization: Bearer {key}"), "--seed", "1", "--max-examples", "10"])
        .args(["--phases", "coverage,fuzzing", "--exclude-checks", "positive_data_acceptance"])
        .args(["--request-timeout", "30", "--continue-on-failure", "--warnings", "off", "--no-color"])
        .output()
        .expect("schemathesis runs");
    let report = String::from_utf8_lossy(&output.stdout);
    println!("{report}");
    assert!(output.status.success(), "{report}{}", String::from_utf8_lossy(&output.stderr));
    let counts = |label: &str| {
        let line = report.lines().find_map(|line| line.trim().strip_prefix(label));
        line.unwrap_or_else(|| panic!("no {label} in\n{report}")).trim().to_owned()
    };
    let tested = counts("Tested:");
    assert_eq!(counts("Selected:"), format!("{tested}/{tested}"), "{report}");
    assert!(tested.parse::<u32>().is_ok_and(|tested| tested >= 32), "{report}");
}
