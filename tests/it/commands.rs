//! The command line itself: help, exit codes, output forms, settings from flag, environment and file.

use std::process::{Command, Output};

use mvm_needs::Need;
use mvm_tests::{Cluster, mvm_binary, path_text};
use serde_json::Value;
use tempfile::TempDir;

fn mvm(args: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(mvm_binary());
    command.args(args).env_clear().envs(environment.iter().copied());
    command.output().expect("mvm runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn every_command_has_help_and_a_man_page() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("man");
    assert!(mvm(&["man", path_text(&folder)], &[]).status.success());
    let pages: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|page| page.unwrap().file_name()).collect();
    assert!(pages.iter().any(|page| page == "mvm-agent-certs-request.1"), "{pages:?}");
    for page in &pages {
        let name = page.to_str().unwrap().trim_end_matches(".1").to_owned();
        let words: Vec<&str> = name.split('-').skip(1).filter(|word| !word.is_empty()).collect();
        // `next-root` is one command with a hyphen.
        let words: Vec<String> =
            words.join(" ").replace("next root", "next-root").split(' ').map(str::to_owned).collect();
        let mut args: Vec<&str> = words.iter().map(String::as_str).filter(|word| !word.is_empty()).collect();
        if args.contains(&"help") {
            continue;
        }
        args.push("--help");
        let output = mvm(&args, &[]);
        assert!(output.status.success(), "mvm {args:?}: {}", text(&output.stderr));
    }
}

#[test]
fn there_is_one_verb_for_each_act_and_the_old_ones_still_work() {
    let help = |args: &[&str]| mvm(&[args, &["--help"]].concat(), &[]);
    let shown = |group: &[&str]| text(&help(group).stdout);
    for group in [&["node"][..], &["tenant"], &["pool"], &["instance"], &["image"], &["trust"], &["audit"]] {
        for verb in ["get", "info", "show", "inspect"] {
            let output = help(&[group, &[verb]].concat());
            assert!(output.status.success(), "mvm {group:?} {verb}: {}", text(&output.stderr));
            // Asked for by any name, it is called by the one.
            assert!(text(&output.stdout).contains(&format!("{} get", group[0])), "{group:?} {verb}");
        }
        let shown = shown(group);
        let listed =
            |verb: &str| shown.lines().any(|line| line.trim_start().starts_with(&format!("{verb} ")));
        assert!(listed("get") && !listed("info") && !listed("show") && !listed("inspect"), "{shown}");
    }
    let lists = [&["node"][..], &["tenant"], &["pool"], &["instance"], &["image"]];
    let of_coordinator =
        [&["coordinator", "token"][..], &["coordinator", "operator"], &["coordinator", "root"]];
    for group in lists.iter().chain(&of_coordinator) {
        assert!(help(&[group, &["ls"][..]].concat()).status.success(), "{group:?} ls");
    }
    for group in [&["node"][..], &["instance"], &["image"]].iter().chain(&of_coordinator) {
        assert!(help(&[group, &["rm"][..]].concat()).status.success(), "{group:?} rm");
    }
}

#[test]
fn version_schema_and_completion_are_printed_for_programs() {
    let version: Value = serde_json::from_slice(&mvm(&["version", "-o", "json"], &[]).stdout).unwrap();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    let schema: Value = serde_json::from_slice(&mvm(&["schema", "desired-state"], &[]).stdout).unwrap();
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    for shell in ["bash", "zsh", "fish"] {
        assert!(text(&mvm(&["completion", shell], &[]).stdout).contains("mvm"), "{shell}");
    }
}

#[test]
fn a_flag_beats_the_environment_which_beats_the_file() {
    let dir = TempDir::new().unwrap();
    let config = dir.path().join("config.toml");
    std::fs::write(&config, "output = \"json\"\n").unwrap();
    let file = ("MVM_CONFIG", path_text(&config));
    let form = |args: &[&str], environment: &[(&str, &str)]| match mvm(args, environment).stdout.first() {
        Some(b'{') => "json",
        Some(b'v') => "yaml",
        _ => "table",
    };
    assert_eq!(form(&["version"], &[]), "table");
    assert_eq!(form(&["version"], &[file]), "json");
    assert_eq!(form(&["version"], &[file, ("MVM_OUTPUT", "yaml")]), "yaml");
    assert_eq!(form(&["version", "-o", "table"], &[file, ("MVM_OUTPUT", "yaml")]), "table");
    assert_eq!(form(&["version"], &[file, ("MVM_OUTPUT", "")]), "json", "an empty variable is not set");
}

#[test]
fn switches_in_the_environment_are_written_in_any_usual_way() {
    for on in ["1", "true", "YES", "on"] {
        assert_eq!(mvm(&["version"], &[("MVM_QUIET", on)]).status.code(), Some(0), "{on}");
    }
    for off in ["0", "false", "no", "off", ""] {
        assert_eq!(mvm(&["version"], &[("MVM_QUIET", off)]).status.code(), Some(0), "{off}");
    }
    let wrong = mvm(&["version"], &[("MVM_QUIET", "maybe")]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("use 1, true, yes or on"), "{}", text(&wrong.stderr));
}

#[test]
fn mistakes_in_settings_are_usage_errors_that_name_them() {
    let dir = TempDir::new().unwrap();
    let config = dir.path().join("config.toml");
    std::fs::write(&config, "[agent.serve]\nintervall-secs = 3\n").unwrap();
    let output = mvm(&["--config", path_text(&config), "version"], &[]);
    assert_eq!(output.status.code(), Some(2));
    let told = text(&output.stderr);
    assert!(
        told.contains("[agent.serve] intervall-secs is no setting: did you mean interval-secs?"),
        "{told}"
    );
    assert_eq!(mvm(&["nonsense"], &[]).status.code(), Some(2));
    assert_eq!(mvm(&["version"], &[("MVM_OUTPUT", "xml")]).status.code(), Some(2));
}

#[test]
fn doctor_names_what_is_wrong_with_a_fix_for_each_and_leaves_no_trace() {
    let dir = TempDir::new().unwrap();
    let data = dir.path().join("not-there-yet");
    // A port that someone else has, and no VMM at all.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().to_string();
    let args = ["doctor", "-o", "json", "--data-dir", path_text(&data), "--metrics-listen", &port];
    let output = mvm(&[&args[..], &["--qemu", "/no/qemu", "--listen", "127.0.0.1:0"]].concat(), &[]);
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["health"], "failed");
    let checks = report["checks"].as_array().unwrap();
    let of = |name: &str| checks.iter().find(|check| check["name"] == name).unwrap();
    for name in ["vmm", "port (metrics)"] {
        assert_eq!(of(name)["health"], "failed", "{report:#}");
    }
    assert_eq!(of("port (API)")["health"], "ok");
    assert_eq!(of("certificates")["health"], "warning");
    for name in ["kvm", "user", "rights", "disk", "image tools", "clock"] {
        assert!(!of(name)["found"].as_str().unwrap().is_empty(), "{name}");
    }
    let fixed =
        |check: &Value| check["health"] == "ok" || check["fix"].as_str().is_some_and(|fix| !fix.is_empty());
    assert!(checks.iter().all(fixed), "{report:#}");
    assert!(!data.exists());
}

/// What an ordinary user gives, here and in the README.
const NO_BOUNDS: [&str; 6] = ["--network", "none", "--cgroups", "none", "--jail", "none"];

/// `mvm`, without some of root's capabilities, in a mount namespace that has no control groups.
fn mvm_without(capabilities: &str, args: &[&str]) -> Output {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c"]);
    command
        .arg(r#"while umount -l /sys/fs/cgroup/* /sys/fs/cgroup 2>/dev/null; do :; done; exec setpriv "$@""#);
    command.args(["sh", capabilities, "--"]).arg(mvm_binary()).args(args).output().expect("unshare runs")
}

#[test]
fn an_agent_does_not_start_where_a_bound_that_it_requires_cannot_be_had_and_doctor_says_so_before() {
    if !mvm_needs::can_run(&[Need::Root, Need::Mounts, Need::Tun]) {
        return;
    }
    let dir = TempDir::new().unwrap();
    let document = dir.path().join("none.json");
    for (capabilities, required, hint) in [
        ("--no-new-privs", ["--cgroups", "required"], "--cgroups best-effort"),
        ("--bounding-set=-net_admin", ["--network", "bridges"], "CAP_NET_ADMIN"),
        ("--bounding-set=-mknod", ["--jail", "required"], "--jail best-effort"),
    ] {
        let data = dir.path().join(required[0]);
        let mut flags =
            vec!["--data-dir", path_text(&data), "--user", "root", "--driver", "qemu", "--qemu", "/bin/true"];
        flags.extend([
            "--desired",
            path_text(&document),
            "--metrics-listen",
            "127.0.0.1:0",
            "--listen",
            "127.0.0.1:0",
        ]);
        for bound in NO_BOUNDS.chunks(2) {
            flags.extend(if bound[0] == required[0] { required } else { [bound[0], bound[1]] });
        }
        let served = mvm_without(capabilities, &[&["agent", "serve"], &flags[..]].concat());
        let told = text(&served.stderr);
        assert_eq!(served.status.code(), Some(1), "{told}");
        assert!(told.contains(&required.join(" ")) && told.contains(hint), "{told}");
        let judged = mvm_without(capabilities, &[&["doctor", "-o", "json"], &flags[..]].concat());
        let report: Value = serde_json::from_slice(&judged.stdout).unwrap();
        let checks = report["checks"].as_array().unwrap();
        let name = required[0].trim_start_matches('-');
        let check = checks.iter().find(|check| check["name"] == name).unwrap();
        assert_eq!(check["health"], "failed", "{report:#}");
        assert!(check["fix"].as_str().unwrap().contains(hint), "{report:#}");
    }
}

#[test]
fn an_agent_does_not_start_without_a_qemu_that_it_can_use() {
    if !mvm_needs::can_run(&[Need::Root]) {
        return;
    }
    let dir = TempDir::new().unwrap();
    let (data, document) = (dir.path().join("data"), dir.path().join("none.json"));
    for (qemu, why) in [("/no/qemu", "is not a program"), ("/bin/true", "does not say that it is QEMU")] {
        let mut args = vec!["agent", "serve", "--user", "root", "--driver", "qemu", "--qemu", qemu];
        args.extend(["--data-dir", path_text(&data), "--desired", path_text(&document)]);
        args.extend(["--metrics-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0"]);
        let output = mvm(&[&args[..], &NO_BOUNDS].concat(), &[]);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains(why) && told.contains("qemu-system-x86"), "{told}");
    }
}

#[test]
fn doctor_judges_by_the_modes_that_flags_environment_and_settings_name() {
    let dir = TempDir::new().unwrap();
    let config = dir.path().join("config.toml");
    std::fs::write(&config, "[agent]\nnetwork = \"none\"\ncgroups = \"none\"\n").unwrap();
    let data = dir.path().join("data");
    let args = ["doctor", "-o", "json", "--data-dir", path_text(&data), "--metrics-listen", "127.0.0.1:0"];
    let health = |flags: &[&str], environment: &[(&str, &str)]| {
        let output =
            mvm(&[&args[..], &["--listen", "127.0.0.1:0", "--driver", "fake"], flags].concat(), environment);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let failed = report["checks"].as_array().unwrap().iter().any(|check| check["health"] == "failed");
        assert_eq!(output.status.code(), Some(i32::from(failed)), "{report:#}");
        let of = |name: &str| {
            let checks = report["checks"].as_array().unwrap();
            checks
                .iter()
                .find(|check| check["name"] == name)
                .map(|check| check["found"].as_str().unwrap().to_owned())
        };
        ["network", "cgroups", "jail"].map(|name| of(name).is_some_and(|found| found.contains("none")))
    };
    assert_eq!(health(&NO_BOUNDS, &[]), [true; 3]);
    let named = [("MVM_CONFIG", path_text(&config)), ("MVM_AGENT_JAIL", "best-effort")];
    assert_eq!(health(&[], &named), [true, true, false]);
}

#[test]
fn an_unreachable_coordinator_is_told_with_what_to_do() {
    let cluster = Cluster::init(mvm_tests::ClusterSettings::default());
    let told = cluster.mvm_fails(&["node", "list", "--timeout", "3s"], 4);
    assert!(told.contains("127.0.0.1") && told.contains("coordinator"), "{told}");
    let no_operator = mvm(&["node", "list", "--operator-dir", "/nonexistent"], &[]);
    assert_eq!(no_operator.status.code(), Some(1));
    assert!(text(&no_operator.stderr).contains("--operator-dir"), "{}", text(&no_operator.stderr));
}

#[test]
fn all_mistakes_of_a_document_are_told_at_once_before_anything_is_sent() {
    let cluster = Cluster::init(mvm_tests::ClusterSettings::default());
    let document = r#"{"schema_version":1,"node_id":"a_b","tenants":[{"tenant_id":"t","network":{"tenant_net_id":9999,
        "ipv4_subnet":"8.8.8.0/24"},"quotas":{},"pools":[{"pool_id":"p","flake_ref":"builtin:x","profile":"m",
        "instance_resources":{"vcpus":0,"mem_mib":64,"data_disk_mib":0},"desired_counts":{"running":1,"warm":0},"x":1}]}]}"#;
    let file = cluster.file("bad.json", document);
    let told = cluster.mvm_fails(&["push", "-f", path_text(&file)], 1);
    for path in [
        "node_id",
        "tenants[0].network.tenant_net_id",
        "tenants[0].network.ipv4_subnet",
        "tenants[0].quotas.max_vcpus",
        "tenants[0].pools[0].instance_resources.vcpus",
        "tenants[0].pools[0].desired_counts.sleeping",
        "tenants[0].pools[0].x",
    ] {
        assert!(told.contains(path), "{path} is not in:\n{told}");
    }
}
