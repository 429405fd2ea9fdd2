//! A drill: everything that a coordinator has is stolen, its keys, its certificate authority and its disk.
//!
//! The thief can speak to nodes as their coordinator and sign documents. It can't make nodes run an image that no offline
//! key vouches for, and the next root, made with the offline root key, ends what it can sign.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mvm_pki::SigningKey;
use mvm_pki::trust::RoleSpec;
use mvm_proto::Digest;
use mvm_tests::{Cluster, PATIENCE, copy_dir, path_text, wait_until};
use serde_json::Value;

use crate::trust::pinned::{forge, production};
use crate::trust::{accepted, example, signing};

const NODES: [&str; 2] = ["node-a", "node-b"];
/// From the operator's command to the last node. It takes seconds; the bound is what an incident can bear.
const IMMUNE_WITHIN: Duration = Duration::from_secs(5 * 60);

/// The minimal example with one pool of this name, running `count` instances of this image.
fn document(cluster: &Cluster, pool: &str, image: &str, count: u32) -> PathBuf {
    let text = std::fs::read_to_string(example("minimal")).unwrap();
    let mut document: Value = serde_json::from_str(&text).unwrap();
    let declared = &mut document["tenants"][0]["pools"][0];
    declared["pool_id"] = pool.into();
    declared["image_digest"] = image.into();
    declared["desired_counts"]["running"] = count.into();
    cluster.file(&format!("{pool}-{count}.json"), &document.to_string())
}

fn push<'a>(file: &'a Path, node: &'a str) -> [&'a str; 5] {
    ["push", "-f", path_text(file), "--node", node]
}

/// The pool of each instance that the node's own agent knows.
fn pools_of_instances(cluster: &Cluster, node: &str) -> Vec<String> {
    let endpoint = format!("unix:{}", cluster.agent_dir(node).join("agent.sock").display());
    let list = cluster.mvm_json(&["instance", "list", "--endpoint", &endpoint]);
    let list = list.get("instances").cloned().unwrap_or(list);
    let instances = list.as_array().expect("a list of instances");
    instances.iter().map(|instance| instance["pool_id"].as_str().unwrap().to_owned()).collect()
}

fn marks(cluster: &Cluster) -> Vec<(u64, u64)> {
    NODES.map(|node| accepted(&cluster.node(node).unwrap())).to_vec()
}

/// Whether the node on disk goes by a root that names this director key.
fn obeys(cluster: &Cluster, node: &str, director: &str) -> bool {
    let dir = cluster.agent_dir(node);
    let status = cluster.mvm_json(&["agent", "certs", "status", "--data-dir", path_text(&dir)]);
    let keys = status["trust_keys"].as_array().expect("a list of keys").iter();
    keys.filter(|key| key["role"] == "director").any(|key| key["key_id"] == director)
}

fn wait_all_connected(cluster: &Cluster) {
    NODES.iter().for_each(|node| cluster.wait_connected(node));
}

/// Puts another coordinator in the place of the one that runs.
fn replace_coordinator(cluster: &mut Cluster, data_dir: &Path) {
    cluster.kill_coordinator();
    cluster.start_coordinator_in(data_dir);
    wait_all_connected(cluster);
}

/// The thief pushes to every node; gives what each node said.
fn thief_pushes(cluster: &Cluster, stolen: &Path, file: &Path) -> Vec<String> {
    let operator = stolen.join("operator");
    let by_thief = ["--operator-dir", path_text(&operator), "--yes"];
    NODES.map(|node| cluster.mvm_fails(&[&push(file, node)[..], &by_thief].concat(), 1)).to_vec()
}

#[test]
fn with_all_keys_of_a_coordinator_stolen_no_unknown_image_starts_and_the_next_root_ends_the_theft() {
    let mut cluster = Cluster::start_with(production());
    let (data, offline) = (cluster.coordinator_dir(), cluster.path().join("offline"));
    std::fs::create_dir(&offline).unwrap();
    for name in ["root.key", "image.key", "trust.json"] {
        std::fs::rename(signing(&cluster, name), offline.join(name)).unwrap();
    }
    std::fs::rename(data.join("pki/root/ca.key"), offline.join("ca.key")).unwrap();
    NODES.iter().for_each(|node| cluster.join(node));
    let (good, evil) = (Digest::of(b"good").to_string(), Digest::of(b"evil").to_string());
    let image_key = offline.join("image.key");
    cluster.mvm_ok(&["trust", "vouch", "--yes", "--image-key", path_text(&image_key), "--digest", &good]);
    let honest = document(&cluster, "honest", &good, 2);
    NODES.iter().for_each(|node| drop(cluster.mvm_ok(&push(&honest, node))));
    let before = marks(&cluster);

    // The theft. The copy's trust is replaced by the thief's: its coordinator then vouches for everything itself.
    cluster.kill_coordinator();
    let stolen = cluster.path().join("stolen");
    copy_dir(&data, &stolen).unwrap();
    let director = SigningKey::from_file(&stolen.join("signing/director.key")).unwrap().public();
    let image = RoleSpec::single(SigningKey::generate().unwrap().public());
    forge(1, true, RoleSpec::single(director), image).save(&stolen.join("trust.json")).unwrap();
    replace_coordinator(&mut cluster, &stolen);
    for told in thief_pushes(&cluster, &stolen, &document(&cluster, "evil", &evil, 2)) {
        assert!(told.contains("refused the document") && told.contains("image"), "{told}");
    }
    assert_eq!(marks(&cluster), before);
    for node in NODES {
        let pools = pools_of_instances(&cluster, node);
        assert!(!pools.is_empty() && pools.iter().all(|pool| pool == "honest"), "{node}: {pools:?}");
    }

    // The owner is back at the address, and replaces the director key.
    replace_coordinator(&mut cluster, &data);
    let new = cluster.path().join("new.key");
    cluster.mvm_ok(&["trust", "keygen", path_text(&new)]);
    let public = new.with_added_extension("pub");
    let root_key = offline.join("root.key");
    let started = Instant::now();
    let next_root = ["trust", "next-root", "--yes", "--root-key", path_text(&root_key)];
    cluster.mvm_ok(&[&next_root[..], &["--director", path_text(&public)]].concat());
    let new_director = SigningKey::from_file(&new).unwrap().key_id();
    wait_until("every node to take the next root", IMMUNE_WITHIN, || {
        NODES.iter().all(|node| obeys(&cluster, node, &new_director))
    });
    let immune = started.elapsed();
    println!("from next-root to {} immune nodes: {immune:.2?}", NODES.len());
    assert!(immune < IMMUNE_WITHIN, "{immune:?}");

    // The thief again, with what nodes would have taken before: a vouched image under the stolen key.
    replace_coordinator(&mut cluster, &stolen);
    for told in thief_pushes(&cluster, &stolen, &document(&cluster, "honest", &good, 0)) {
        assert!(told.contains("refused the document") && told.contains("signature"), "{told}");
    }
    assert_eq!(marks(&cluster), before);

    // The owner goes on with the new key.
    std::fs::rename(&new, signing(&cluster, "director.key")).unwrap();
    replace_coordinator(&mut cluster, &data);
    let more = document(&cluster, "honest", &good, 3);
    for node in NODES {
        cluster.mvm_ok(&push(&more, node));
        wait_until("the owner's document to be in force", PATIENCE, || {
            pools_of_instances(&cluster, node) == ["honest"; 3]
        });
    }
    assert!(marks(&cluster).iter().zip(&before).all(|(after, before)| after > before));
}
