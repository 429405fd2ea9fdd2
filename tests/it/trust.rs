//! Who may sign, changed from the command line while a cluster runs: images vouched for, a director key replaced.

mod pinned;
mod stolen;

use std::path::PathBuf;

use mvm_tests::{Cluster, ClusterSettings, path_text};
use serde_json::Value;

fn example(name: &str) -> String {
    format!("{}/../examples/{name}.json", env!("CARGO_MANIFEST_DIR"))
}

/// The digests of all images that an example names.
fn digests(name: &str) -> Vec<String> {
    let text = std::fs::read_to_string(example(name)).expect("the example is there");
    let document: Value = serde_json::from_str(&text).expect("an example is JSON");
    let tenants = document["tenants"].as_array().into_iter().flatten();
    let pools = tenants.flat_map(|tenant| tenant["pools"].as_array().into_iter().flatten());
    pools.filter_map(|pool| pool["image_digest"].as_str().map(str::to_owned)).collect()
}

fn signing(cluster: &Cluster, file: &str) -> PathBuf {
    cluster.coordinator_dir().join("signing").join(file)
}

fn accepted(info: &Value) -> (u64, u64) {
    let mark = &info["status"]["accepted"];
    (mark["epoch"].as_u64().unwrap_or(0), mark["generation"].as_u64().unwrap_or(0))
}

/// Makes a new director key, names it in the next root, and has the coordinator start with it. Gives the old one's file.
fn replace_director(cluster: &mut Cluster, more: &[&str]) -> PathBuf {
    let (new, old) = (cluster.path().join("new.key"), cluster.path().join("old.key"));
    cluster.mvm_ok(&["trust", "keygen", path_text(&new)]);
    let public = new.with_added_extension("pub");
    let root = signing(cluster, "root.key");
    let args =
        ["trust", "next-root", "--root-key", path_text(&root), "--director", path_text(&public), "--yes"];
    cluster.mvm_ok(&[&args[..], more].concat());
    let director = signing(cluster, "director.key");
    std::fs::rename(&director, &old).expect("the old key can be moved away");
    cluster.kill_coordinator();
    std::fs::copy(&new, &director).expect("the new key can be put in its place");
    cluster.start_coordinator();
    old
}

#[test]
fn images_must_be_vouched_for_before_a_production_cluster_runs_them() {
    let mut cluster = Cluster::start_with(ClusterSettings { dev: false, ..ClusterSettings::default() });
    cluster.join_with_secrets("node-a");
    let push = ["push", "-f", &example("production"), "--node", "node-a"];
    let refused = cluster.mvm(&push);
    assert!(!refused.status.success());
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(told.contains("image"), "{told}");

    let key = signing(&cluster, "image.key");
    let digests = digests("production");
    let vouch = ["trust", "vouch", "--yes", "--image-key", path_text(&key)];
    let flags: Vec<&str> = digests.iter().flat_map(|digest| ["--digest", digest]).collect();
    let state = cluster.mvm_json(&[&vouch[..], &flags].concat());
    assert_eq!(state["image_digests"], digests.len(), "{state:#}");
    cluster.mvm_ok(&push);
    assert!(accepted(&cluster.node("node-a").unwrap()).1 > 0);
}

#[test]
fn a_director_key_is_replaced_under_a_connected_agent_and_the_old_one_signs_nothing_more() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    cluster.mvm_ok(&["push", "-f", &example("minimal"), "--node", "node-a"]);
    let before = accepted(&cluster.node("node-a").unwrap());

    let old = replace_director(&mut cluster, &[]);
    cluster.wait_connected("node-a");
    cluster.mvm_ok(&["push", "-f", &example("pools"), "--node", "node-a"]);
    let after = accepted(&cluster.node("node-a").unwrap());
    assert!(after > before, "{after:?} is not above {before:?}");

    // A thief with the old key, at the node's own API.
    let agent = format!("https://127.0.0.1:{}", cluster.agents["node-a"].port);
    let director = signing(&cluster, "director.key");
    std::fs::remove_file(&director).unwrap();
    std::fs::copy(&old, &director).unwrap();
    let dir = cluster.coordinator_dir();
    let document = example("minimal");
    let args = ["push", "-f", &document, "--node", "node-a", "--direct", &agent];
    let refused = cluster.mvm(&[&args[..], &["--coordinator-dir", path_text(&dir)]].concat());
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && told.contains("signature"), "{told}");
    assert_eq!(accepted(&cluster.node("node-a").unwrap()), after);
}

#[test]
fn a_document_stored_before_the_director_key_changed_reaches_a_node_that_was_away() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    cluster.kill_agent("node-a");
    cluster.wait_node("node-a", "seen as gone", |info| info["connected"] == false);
    cluster.mvm_ok(&["push", "-f", &example("minimal"), "--node", "node-a", "--no-wait"]);
    replace_director(&mut cluster, &[]);
    cluster.start_agent("node-a", &[]);
    cluster.wait_node("node-a", "converged", |info| info["status"]["converged"]["generation"].is_u64());
}
