//! Declared objects from the command line: files, tables, waiting, editing, plans, contexts.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Output;

use mvm_tests::{Cluster, PATIENCE, Process, mvm_binary, path_text, wait_until};
use serde_json::{Value, json};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/objects.yaml");

const TENANT: &str = "api_version: mvm/v1\nkind: Tenant\nmetadata: { name: acme, labels: { made: here } }\n";

fn pool(name: &str, running: u32) -> String {
    format!(
        "---\napi_version: mvm/v1\nkind: Pool\nmetadata: {{ name: {name}, tenant: acme, labels: {{ made: here }} }}\n\
         spec: {{ image: {{ ref: 'builtin:busybox' }}, resources: {{ vcpus: 1, mem_mib: 64 }}, counts: {{ running: {running} }} }}\n"
    )
}

/// A cluster whose tenant has these pools, with how many are to run.
fn declare(cluster: &Cluster, pools: &[(&str, u32)]) -> String {
    let pools: String = pools.iter().map(|(name, running)| pool(name, *running)).collect();
    let file = cluster.file("acme.yaml", &format!("{TENANT}{pools}"));
    cluster.mvm_ok(&["apply", "-f", path_text(&file)]);
    path_text(&file).to_owned()
}

fn code(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().expect("it was not killed"), text(&output.stdout), text(&output.stderr))
}

fn names(cluster: &Cluster, args: &[&str]) -> Vec<String> {
    let shown = cluster.mvm_ok(&[args, &["-o", "name"]].concat());
    shown.lines().map(str::to_owned).collect()
}

#[test]
fn files_are_applied_shown_and_deleted_in_the_order_in_which_objects_name_each_other() {
    let cluster = Cluster::start();
    let told = cluster.mvm_ok(&["apply", "-f", EXAMPLE, "--dry-run"]);
    assert_eq!(told.lines().count(), 5, "{told}");
    assert!(told.lines().all(|line| line.ends_with(" created (dry run)")), "{told}");
    assert_eq!(names(&cluster, &["get", "tenants,pools", "-A"]), [""; 0]);

    let objects =
        ["tenant/acme", "tenant/globex", "pool/acme/workers", "pool/acme/gateway", "pool/globex/web"];
    let lines = |became: &str| objects.map(|name| format!("{name} {became}\n")).concat();
    assert_eq!(cluster.mvm_ok(&["apply", "-f", EXAMPLE]), lines("created"));
    assert_eq!(cluster.mvm_ok(&["apply", "-f", EXAMPLE]), lines("unchanged"));

    assert_eq!(names(&cluster, &["get", "pools", "-A", "-l", "team=search"]), ["pool/acme/workers"]);
    assert_eq!(names(&cluster, &["get", "pl", "-t", "globex"]), ["pool/globex/web"]);
    let by_field = ["get", "pools", "--field-selector", "spec.pinned=true"];
    assert_eq!(names(&cluster, &by_field), ["pool/acme/gateway"]);
    let table = cluster.mvm_ok(&["get", "tenants,pools", "-A"]);
    let headings: Vec<_> = table.lines().filter(|line| line.contains("NAME")).collect();
    assert_eq!(headings.len(), 2, "a table for each kind: {table}");
    assert!(headings[1].starts_with("TENANT") && headings[1].ends_with("AGE"), "{table}");
    let one = cluster.mvm_json(&["get", "pool/acme/workers"]);
    assert_eq!((&one["kind"], &one["spec"]["counts"]["running"]), (&json!("Pool"), &json!(2)));
    let shown = cluster.mvm_ok(&["describe", "pool", "acme/workers"]);
    assert!(shown.contains("team=search") && shown.contains("counts.running"), "{shown}");

    // What is shown can be applied again.
    for format in ["yaml", "json"] {
        let shown = cluster.mvm_ok(&["get", "pools", "-A", "-o", format]);
        let file = cluster.file(&format!("shown.{format}"), &shown);
        let told = cluster.mvm_ok(&["apply", "-f", path_text(&file)]);
        assert!(told.lines().count() == 3 && told.lines().all(|line| line.ends_with(" unchanged")), "{told}");
    }

    let told = cluster.mvm_fails(&["get", "pool/acme/none"], 1);
    assert!(told.contains("not_found"), "{told}");
    let mut deleted: Vec<String> = cluster
        .mvm_ok(&["delete", "-f", EXAMPLE, "--wait", "--timeout", "60s", "-o", "name"])
        .lines()
        .map(str::to_owned)
        .collect();
    assert!(deleted[0].starts_with("pool/"), "pools go before their tenants: {deleted:?}");
    deleted.sort_unstable();
    deleted.dedup();
    assert_eq!(deleted.len(), 5, "{deleted:?}");
    assert_eq!(names(&cluster, &["get", "tenants,pools", "-A"]), [""; 0]);
    cluster.mvm_fails(&["delete", "-f", EXAMPLE], 1);
    cluster.mvm_ok(&["delete", "-f", EXAMPLE, "--ignore-not-found"]);
}

#[test]
fn wrong_files_are_told_as_a_whole_and_nothing_of_them_is_sent() {
    let cluster = Cluster::start();
    let wrong = pool("workers", 1).replace("vcpus", "vcpu").replace("---\n", "");
    cluster.file("b.yaml", &format!("{TENANT}---\n{wrong}"));
    cluster.file("c.json", "{\"kind\": \"Pool\", \"kind\": \"Pool\"}");
    let folder = path_text(cluster.path()).to_owned();
    let told = cluster.mvm_fails(&["apply", "-f", &folder], 2);
    for part in
        ["b.yaml, document 2: spec.resources.vcpu: did you mean `vcpus`?", "c.json: kind: must appear once"]
    {
        assert!(told.contains(part), "{part}: {told}");
    }
    assert_eq!(names(&cluster, &["get", "tenants"]), [""; 0]);
    // What the server refuses is told with the object, and the others go on.
    let orphan = pool("workers", 1).replace("acme", "nowhere");
    let file = cluster.file("d.yaml", &format!("{TENANT}{orphan}"));
    let (code, stdout, stderr) = code(&cluster.mvm(&["apply", "-f", path_text(&file)]));
    assert_eq!((code, stdout.as_str()), (1, "tenant/acme created\n"), "{stderr}");
    assert!(stderr.contains("pool/nowhere/workers: ") && stderr.contains("nowhere"), "{stderr}");
}

#[test]
fn a_key_s_text_is_shown_once_and_a_forced_deletion_waits_for_nothing() {
    let mut cluster = Cluster::start();
    let key = "api_version: mvm/v1\nkind: ApiKey\nmetadata: { name: NAME }\nspec: { role: viewer }\n";
    let file = |name: &str| path_text(&cluster.file(name, &key.replace("NAME", name))).to_owned();
    let (ci, web) = (file("ci"), file("web"));
    let told = cluster.mvm_ok(&["apply", "-f", &ci]);
    let lines: Vec<_> = told.lines().collect();
    assert!(lines.len() == 2 && lines[0] == "apikey/ci created" && lines[1].starts_with("mvm_"), "{told}");
    assert_eq!(cluster.mvm_ok(&["apply", "-f", &ci]), "apikey/ci unchanged\n");
    let made = cluster.mvm_json(&["apply", "-f", &web]);
    assert!(made[0]["secret"].as_str().is_some_and(|secret| secret.starts_with("mvm_")), "{made}");
    assert!(!cluster.mvm_ok(&["get", "api-keys", "-o", "yaml"]).contains("secret"));

    cluster.join("node-a");
    declare(&cluster, &[("workers", 1)]);
    cluster.mvm_ok(&["wait", "pool/acme/workers", "--for", "condition=Ready", "--timeout", "90s"]);
    cluster.kill_agent("node-a");
    assert_eq!(cluster.mvm_ok(&["delete", "pool", "acme/workers"]), "pool/acme/workers deleting\n");
    let table = cluster.mvm_ok(&["get", "pools", "-A"]);
    assert!(table.lines().any(|line| line.contains("workers") && line.contains("Deleting")), "{table}");
    let in_vain = ["delete", "pool", "acme/workers", "--wait", "--timeout", "1s"];
    let told = cluster.mvm_fails(&in_vain, 3);
    assert!(told.contains("pool/acme/workers"), "{told}");
    let forced = ["delete", "pool", "acme/workers", "--force"];
    assert_eq!(cluster.mvm_ok(&forced), "pool/acme/workers deleted\n");
    assert_eq!(names(&cluster, &["get", "pools", "-A"]), [""; 0]);
}

#[test]
fn pruning_deletes_what_is_selected_and_in_no_file() {
    let cluster = Cluster::start();
    declare(&cluster, &[("workers", 0), ("old", 0)]);
    let left = cluster.file("left.yaml", &format!("{TENANT}{}", pool("workers", 0)));
    let prune = ["apply", "-f", path_text(&left), "--prune", "-l", "made=here"];
    let told = cluster.mvm_ok(&[&prune[..], &["--dry-run"]].concat());
    assert!(told.contains("pool/acme/old ") && told.contains("(dry run)"), "{told}");
    assert_eq!(names(&cluster, &["get", "pools", "-A"]).len(), 2);
    cluster.mvm_ok(&prune);
    cluster.mvm_ok(&["wait", "pool/acme/old", "--for", "delete", "--timeout", "60s"]);
    assert_eq!(names(&cluster, &["get", "pools", "-A"]), ["pool/acme/workers"]);
    cluster.mvm_fails(&["apply", "-f", path_text(&left), "--prune"], 2);
    let told = cluster.mvm_fails(&["apply", "-f", path_text(&left), "--prune", "-l", ""], 2);
    assert!(told.contains("must select by a label"), "{told}");
}

#[test]
fn a_pool_is_waited_for_planned_explained_and_shown_where_it_runs() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    let file = cluster.file("acme.yaml", &format!("{TENANT}{}", pool("workers", 2)));
    let file = path_text(&file);
    let (changes, shown, told) = code(&cluster.mvm(&["plan", "-f", file]));
    assert_eq!(changes, 2, "{shown}{told}");
    assert!(shown.contains("pool/acme/workers") && shown.contains("node-a"), "{shown}");
    assert_eq!(names(&cluster, &["get", "pools", "-A"]), [""; 0], "a plan changes nothing");
    let (differs, shown, told) = code(&cluster.mvm(&["diff", "-f", file]));
    assert!(differs == 1 && shown.contains("+++ declared/pool/acme/workers"), "{shown}{told}");

    cluster.mvm_ok(&["apply", "-f", file]);
    let told = cluster.mvm_ok(&["wait", "pool/acme/workers", "--for", "condition=Ready", "--timeout", "90s"]);
    assert_eq!(told, "pool/acme/workers condition met\n");
    let field =
        ["wait", "pool", "workers", "-t", "acme", "--for", "status.counts.running=2", "--timeout", "90s"];
    cluster.mvm_ok(&field);
    let (same, shown, told) = code(&cluster.mvm(&["diff", "-f", file]));
    assert_eq!((same, shown.as_str()), (0, ""), "{told}");
    let (nothing, shown, told) = code(&cluster.mvm(&["plan", "-f", file]));
    assert_eq!(nothing, 0, "{shown}{told}");
    let (changes, shown, _) = code(&cluster.mvm(&["plan", "--delete", "pool/acme/workers"]));
    assert!(changes == 2 && shown.contains("deleted"), "{shown}");

    let why = cluster.mvm_json(&["explain", "pool", "acme/workers"]);
    assert_eq!(
        (&why["pool"], &why["placed"][0]["node"]),
        (&json!("acme/workers"), &json!("node-a")),
        "{why}"
    );
    let shown = cluster.mvm_ok(&["explain", "pool/acme/workers"]);
    assert!(shown.contains("PLACED ON") && shown.contains("AGAINST ONE MORE"), "{shown}");
    assert!(cluster.mvm_ok(&["top", "nodes"]).contains("node-a"));
    let pools = cluster.mvm_json(&["top", "pools", "-t", "acme"]);
    assert_eq!(pools[0]["running"], 2, "{pools}");
    let row = cluster.mvm_ok(&["get", "pool/acme/workers"]);
    assert!(row.contains("Ready") && row.contains("2/2"), "{row}");
}

#[test]
fn the_load_of_a_pool_says_how_many_run() {
    let cluster = Cluster::start();
    let scaled = pool("web", 0)
        .replace("counts: { running: 0 }", "scale: { min: 1, max: 8, metric: queue_depth, target: 10 }");
    let file = cluster.file("acme.yaml", &format!("{TENANT}{scaled}{}", pool("plain", 0)));
    cluster.mvm_ok(&["apply", "-f", path_text(&file)]);
    let told = cluster.mvm_ok(&["pool", "load", "acme/web", "42.5"]);
    assert!(told.contains("running") && told.contains('1'), "{told}");
    cluster.mvm_ok(&["wait", "pool/acme/web", "--for", "status.scale.running=5"]);
    let told = cluster.mvm_json(&["pool", "load", "web", "42.5", "-t", "acme"]);
    assert_eq!((&told["running"], &told["load"]), (&json!(5), &json!(42.5)), "{told}");
    let refused = cluster.mvm_fails(&["pool", "load", "acme/plain", "1"], 1);
    assert!(refused.contains("is not scaled by what callers measure"), "{refused}");
    cluster.mvm_fails(&["pool", "load", "acme/web", "NaN"], 1);
}

#[test]
fn waiting_in_vain_says_how_it_is_instead() {
    let cluster = Cluster::start();
    declare(&cluster, &[("workers", 1)]);
    let awaited = ["wait", "pool/acme/workers", "--for", "spec.counts.running=9", "--timeout", "1s"];
    let told = cluster.mvm_fails(&awaited, 3);
    assert!(
        told.contains("gave up on pool/acme/workers") && told.contains("spec.counts.running is 1"),
        "{told}"
    );
    let told = cluster.mvm_fails(&["wait", "pool/acme/none", "--for", "condition=Ready"], 1);
    assert!(told.contains("there is no pool/acme/none"), "{told}");
    cluster.mvm_ok(&["wait", "pool/acme/none", "--for", "delete"]);
    cluster.mvm_fails(&["wait", "pool/acme/workers", "--for", "ready"], 2);
}

#[test]
fn what_changes_is_followed_over_a_restart_of_the_coordinator() {
    let mut cluster = Cluster::start();
    declare(&cluster, &[("a", 0)]);
    let log = cluster.path().join("followed.log");
    let follower = Process::start(cluster.command(&["get", "pools", "-A", "-w", "-o", "name"]), &log);
    let told = |name: &str| follower.log().lines().any(|line| line == name);
    wait_until("what there is", PATIENCE, || told("pool/acme/a"));
    declare(&cluster, &[("a", 0), ("b", 0)]);
    wait_until("what comes", PATIENCE, || told("pool/acme/b"));
    cluster.kill_coordinator();
    cluster.start_coordinator();
    declare(&cluster, &[("a", 0), ("b", 0), ("c", 0)]);
    wait_until("what comes after the restart", PATIENCE, || told("pool/acme/c"));
}

/// An editor that runs a script on its file.
fn editor(cluster: &Cluster, script: &str) -> String {
    let path = cluster.file("editor.sh", &format!("#!/bin/sh\n{script}\n"));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).expect("it is ours");
    path_text(&path).to_owned()
}

fn edit(cluster: &Cluster, script: &str) -> (i32, String, String) {
    let editor = editor(cluster, script);
    let mut command = cluster.command(&["edit", "pool/acme/workers"]);
    code(&command.env("EDITOR", editor).env("TMPDIR", cluster.path()).output().expect("mvm runs"))
}

#[test]
fn an_edited_object_is_applied_and_a_refused_one_opened_again_with_the_errors() {
    let cluster = Cluster::start();
    declare(&cluster, &[("workers", 0)]);
    let running = || cluster.mvm_json(&["get", "pool/acme/workers"])["spec"]["counts"]["running"].clone();

    let (code, _, stderr) = edit(&cluster, "exit 0");
    assert!(code == 0 && stderr.contains("left as it was"), "{stderr}");
    let (code, stdout, stderr) = edit(&cluster, r#"sed -i 's/running: 0/running: 3/' "$1""#);
    assert_eq!((code, stdout.as_str(), running()), (0, "pool/acme/workers edited\n", json!(3)), "{stderr}");

    // Wrong at first; then the errors are there, and it is put right.
    let seen = cluster.path().join("seen.yaml");
    let script = format!(
        "if grep -q 'It was refused' \"$1\"; then cp \"$1\" {}; sed -i 's/running: many/running: 4/' \"$1\"; \
         else sed -i 's/running: 3/running: many/' \"$1\"; fi",
        path_text(&seen)
    );
    let (code, _, stderr) = edit(&cluster, &script);
    assert_eq!((code, running()), (0, json!(4)), "{stderr}");
    let seen = std::fs::read_to_string(seen).expect("it was opened again");
    let told = seen.lines().find(|line| line.contains("spec.counts.running: must be"));
    assert!(told.is_some_and(|line| line.starts_with("# ")), "{seen}");

    // Left wrong, it is given up, and the text is kept.
    let (code, _, stderr) = edit(&cluster, r#"sed -i 's/running: 4/running: many/' "$1""#);
    assert!(code == 1 && stderr.contains("the text is kept in"), "{stderr}");
    assert_eq!(running(), json!(4));
}

#[test]
fn an_edit_is_not_refused_because_the_status_was_written_meanwhile() {
    let cluster = Cluster::start();
    declare(&cluster, &[("workers", 2)]);
    // The quota is in the reason why nothing is placed.
    let quota = cluster.file(
        "quota.yaml",
        "api_version: mvm/v1\nkind: Tenant\nmetadata: { name: acme, labels: { made: here } }\nspec: { quotas: { max_running: 0 } }\n",
    );
    let script = format!(
        "version=$(grep resource_version \"$1\"); {mvm} apply -f {quota} && \
         while {mvm} get pool/acme/workers -o yaml | grep -q \"$version\"; do :; done && sed -i 's/running: 2/running: 5/' \"$1\"",
        mvm = path_text(mvm_binary()),
        quota = path_text(&quota),
    );
    let (code, stdout, stderr) = edit(&cluster, &script);
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert!(stdout.ends_with("pool/acme/workers edited\n"), "{stdout}");
    assert_eq!(cluster.mvm_json(&["get", "pool/acme/workers"])["spec"]["counts"]["running"], 5);
}

#[test]
fn a_cordoned_node_is_told_as_such() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    let cordoned = || cluster.mvm_json(&["get", "node/node-a"])["spec"]["cordoned"].clone();
    wait_until("the node's object", PATIENCE, || cluster.mvm(&["get", "node/node-a"]).status.success());
    assert_eq!(cluster.mvm_ok(&["cordon", "node-a"]), "node/node-a cordoned\n");
    assert_eq!(cordoned(), Value::Bool(true));
    assert_eq!(cluster.mvm_ok(&["cordon", "node/node-a"]), "node/node-a already cordoned\n");
    assert_eq!(cluster.mvm_ok(&["uncordon", "node-a"]), "node/node-a uncordoned\n");
    assert_eq!(cordoned(), Value::Bool(false));
    let told = cluster.mvm_fails(&["cordon", "node-z"], 1);
    assert!(told.contains("node/node-z"), "{told}");
}

#[test]
fn a_node_is_handed_over_from_objects_to_pushes_and_back_by_a_command_that_asks() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    declare(&cluster, &[("workers", 1)]);
    cluster.mvm_ok(&["wait", "pool/acme/workers", "--for", "condition=Ready", "--timeout", "90s"]);
    let asked = cluster.mvm_fails(&["node", "manage", "node-a", "--by", "push"], 2);
    assert!(asked.contains("acme/workers (1)") && asked.contains("repeat with --yes"), "{asked}");
    let node = || cluster.mvm_json(&["get", "node/node-a"]);
    assert_eq!(node()["spec"]["managed_by"], "objects", "nothing was changed");
    cluster.mvm_ok(&["node", "manage", "node-a", "--by", "push", "--yes"]);
    assert_eq!(node()["spec"]["managed_by"], "push");
    cluster.mvm_ok(&["wait", "pool/acme/workers", "--for", "condition=Placed=False", "--timeout", "90s"]);
    let told = cluster.mvm_ok(&["node", "manage", "node-a", "--by", "objects", "--yes"]);
    assert_eq!(told, "node/node-a is managed by objects\n");
    cluster.mvm_ok(&["wait", "pool/acme/workers", "--for", "condition=Ready", "--timeout", "90s"]);
    let same = cluster.mvm_ok(&["node", "manage", "node-a", "--by", "objects"]);
    assert!(same.contains("already"), "{same}");
}

#[test]
fn a_context_says_whom_to_call_as_whom_and_which_tenant_is_meant() {
    let cluster = Cluster::start();
    declare(&cluster, &[("workers", 0)]);
    let (url, operator) = (cluster.url(), cluster.coordinator_dir().join("operator"));
    let mvm = |args: &[&str]| {
        let mut command = cluster.command(args);
        command.env_remove("MVM_COORDINATOR").env_remove("MVM_OPERATOR_DIR");
        code(&command.output().expect("mvm runs"))
    };
    let set = ["context", "set", "here", "--coordinator", &url, "--operator-dir", path_text(&operator)];
    assert_eq!(mvm(&[&set[..], &["-t", "acme"]].concat()).0, 0);
    let file = cluster.path().join(".config/mvm/contexts.toml");
    assert_eq!(std::fs::metadata(&file).expect("it is there").permissions().mode() & 0o777, 0o600);
    assert_eq!(mvm(&["context", "set", "nowhere", "--coordinator", "https://127.0.0.1:1"]).0, 0);
    assert_eq!(mvm(&["context", "current"]).1, "here\n");
    let get = ["get", "pool", "workers", "-o", "name", "--timeout", "8s"];
    assert_eq!(mvm(&get).1, "pool/acme/workers\n");
    assert_eq!(mvm(&[&get[..], &["--context", "nowhere", "-t", "acme"]].concat()).0, 1);
    let told = mvm(&[&get[..], &["--context", "elsewhere"]].concat());
    assert!(told.0 == 2 && told.2.contains("there is no context elsewhere: here, nowhere"), "{told:?}");
    assert_eq!(mvm(&["context", "use", "nowhere"]).0, 0);
    assert_eq!(
        mvm(&[&get[..], &["--coordinator", &url, "--operator-dir", path_text(&operator), "-t", "acme"]]
            .concat())
        .0,
        0
    );
    assert_eq!(mvm(&["context", "delete", "nowhere"]).0, 0);
    let list = mvm(&["context", "list"]).1;
    assert!(list.contains("here") && !list.contains("nowhere") && !list.contains('*'), "{list}");
}
