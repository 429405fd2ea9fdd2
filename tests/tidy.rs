//! The house rules as tests: who may import whom, what may be in the dependency tree, how sources and manifests look.
//!
//! Each test collects all that breaks its rule and lists it, so that one run shows everything there is to put right.

#![allow(clippy::unwrap_used)] // A test may end at the first surprise.

#[path = "tidy/leaving.rs"]
mod leaving;
#[path = "tidy/licence.rs"]
mod licence;
#[path = "tidy/modules.rs"]
mod modules;
#[path = "tidy/pauses.rs"]
mod pauses;
#[path = "tidy/sources.rs"]
mod sources;
#[path = "tidy/tree.rs"]
mod tree;

use std::collections::{BTreeMap, BTreeSet};

use sources::Source;
use tree::{DenyFile, Kind, Tree, root};

/// Which of our crates each may import. A crate that is not listed here does not exist.
const DIRECTION: [(&str, &[&str]); 18] = [
    ("mvm-proto", &[]),
    ("mvm-planner", &["mvm-proto"]),
    ("mvm-pki", &["mvm-proto"]),
    ("mvm-transport", &["mvm-proto", "mvm-pki"]),
    ("mvm-telemetry", &["mvm-proto", "mvm-pki", "mvm-transport"]),
    ("mvm-store", &[]),
    // It runs inside microVMs, and sees nothing of the world outside but the protocol.
    ("mvm-guest", &["mvm-proto"]),
    // All that needs privileges is in it, and nothing that speaks to a network of ours.
    ("mvm-host", &["mvm-proto"]),
    ("mvm-image", &["mvm-proto", "mvm-pki"]),
    ("mvm-vmm", &["mvm-proto", "mvm-host", "mvm-image", "mvm-pki"]),
    (
        "mvm-agent",
        &[
            "mvm-proto",
            "mvm-host",
            "mvm-image",
            "mvm-vmm",
            "mvm-planner",
            "mvm-pki",
            "mvm-transport",
            "mvm-store",
            "mvm-telemetry",
        ],
    ),
    (
        "mvm-coordinator",
        &["mvm-proto", "mvm-planner", "mvm-pki", "mvm-transport", "mvm-store", "mvm-telemetry"],
    ),
    // What operators and programs call a coordinator with; it shares nothing with the server but the protocol.
    ("mvm-client", &["mvm-proto", "mvm-pki", "mvm-transport"]),
    // The command line puts everything together; tests look at all of it, and benches start what tests start.
    ("mvm", PARTS),
    ("mvm-tests", PARTS),
    ("mvm-benches", PARTS_AND_TESTS),
    ("mvm-examples", &[]),
    // It decides whether tests run; all their crates import it, and it none of ours.
    ("mvm-needs", &[]),
];

const PARTS: &[&str] = &[
    "mvm-proto",
    "mvm-planner",
    "mvm-pki",
    "mvm-transport",
    "mvm-store",
    "mvm-telemetry",
    "mvm-guest",
    "mvm-host",
    "mvm-image",
    "mvm-vmm",
    "mvm-agent",
    "mvm-coordinator",
    "mvm-client",
    "mvm-examples",
    "mvm-needs",
];

const PARTS_AND_TESTS: &[&str] = &[
    "mvm-proto",
    "mvm-planner",
    "mvm-pki",
    "mvm-transport",
    "mvm-store",
    "mvm-telemetry",
    "mvm-guest",
    "mvm-host",
    "mvm-image",
    "mvm-vmm",
    "mvm-agent",
    "mvm-coordinator",
    "mvm-client",
    "mvm-examples",
    "mvm-needs",
    "mvm-tests",
];

/// For tests only: the documents to start from, and what their own test needs.
const ALSO_IN_TESTS: [(&str, &str); 12] = [
    ("mvm-proto", "mvm-examples"),
    ("mvm-planner", "mvm-examples"),
    ("mvm-agent", "mvm-examples"),
    ("mvm-coordinator", "mvm-examples"),
    ("mvm-coordinator", "mvm-client"),
    ("mvm-examples", "mvm-proto"),
    ("mvm-store", "mvm-needs"),
    ("mvm-host", "mvm-needs"),
    ("mvm-image", "mvm-needs"),
    ("mvm-vmm", "mvm-needs"),
    ("mvm-vmm", "mvm-vmm"),
    ("mvm-agent", "mvm-needs"),
];

/// Which folders of the agent each of its folders may import. Whatever is lower knows nothing of what is higher.
const FOLDERS: [(&str, &[&str]); 15] = [
    ("clock", &[]),
    ("crash", &[]),
    ("events", &["clock"]),
    ("secrets", &[]),
    ("instance", &[]),
    ("guest", &["clock"]),
    ("audit", &["clock", "instance"]),
    ("isolation", &["events", "instance"]),
    ("persist", &["clock", "crash", "events", "guest", "instance"]),
    (
        "execute",
        &["audit", "clock", "crash", "events", "guest", "instance", "isolation", "persist", "secrets"],
    ),
    ("metrics", &["execute"]),
    (
        "node",
        &[
            "audit",
            "clock",
            "crash",
            "events",
            "execute",
            "guest",
            "instance",
            "isolation",
            "persist",
            "secrets",
        ],
    ),
    ("upkeep", &["instance", "node", "persist"]),
    ("intake", &["clock", "execute", "guest", "instance", "metrics", "node", "upkeep"]),
    ("serve", &["clock", "intake", "isolation", "metrics", "node", "persist", "upkeep"]),
];

/// Modules that import each other can only be understood together.
const MAX_CYCLE: usize = 3;

/// Libraries that only these may import, so that they can be replaced in one place.
const ONLY_IN: [(&str, &[&str], &str); 11] = [
    ("quinn", &["mvm-transport", "mvm-benches"], "QUIC is transport's; a bench measures it bare"),
    ("quinn-proto", &["mvm-transport"], "QUIC is transport's"),
    ("h3", &["mvm-transport", "mvm-benches"], "HTTP/3 is transport's; a bench measures it bare"),
    ("h3-quinn", &["mvm-transport", "mvm-benches"], "HTTP/3 is transport's; a bench measures it bare"),
    ("sled", &["mvm-store"], "the database is behind the Store trait"),
    (
        "aws-lc-rs",
        &["mvm-pki", "mvm-transport", "mvm-vmm", "mvm-agent", "mvm-coordinator", "mvm-benches"],
        "what encrypts and signs is in few places, and read there",
    ),
    ("rcgen", &["mvm-pki"], "certificates are made in pki"),
    ("x509-parser", &["mvm-pki"], "certificates are read in pki"),
    ("clap", &["mvm", "mvm-benches"], "arguments are read by programs"),
    ("anyhow", &["mvm", "mvm-benches"], "libraries have typed errors"),
    ("tracing-subscriber", &["mvm", "mvm-benches"], "the program decides where logs go; libraries only log"),
];

/// Crates that decide and do nothing else: no runtime, and none of these words in their sources.
const PURE: [&str; 2] = ["mvm-proto", "mvm-planner"];
const IMPURE_LIBRARIES: [&str; 6] = ["tokio", "tokio-util", "futures", "fastrand", "nix", "tempfile"];
const IMPURE_WORDS: [&str; 11] = [
    "async fn",
    "tokio::",
    "std::fs",
    "std::env",
    "std::process",
    "std::thread",
    "TcpStream",
    "UdpSocket",
    "SystemTime::now",
    "Instant::now",
    "OffsetDateTime::now",
];

/// tokio has `test-util` in programs, too, so that libraries are compiled once for them and for tests (Cargo.toml).
const STOPS_THE_CLOCK: [&str; 3] = ["time::pause(", "time::advance(", "start_paused"];

/// A file longer than this is about more than one thing. Most are a fifth of it.
const MAX_LINES: usize = 700;

/// Files that may contain `unsafe`, each with its reason.
const UNSAFE_ALLOWED: [(&str, &str); 9] = [
    ("vmm/src/qemu/tsc.rs", "reading the time stamp counter is an unsafe intrinsic"),
    ("host/src/firewall/sys.rs", "nftnl's traits for expressions and messages are made of raw pointers"),
    (
        "host/src/spawn_into.rs",
        "only a bare clone3 makes a process that starts inside its control group and namespaces",
    ),
    ("host/src/spawn.rs", "what a forked child may do is known to its caller only"),
    ("host/src/spawn/sys.rs", "mount attributes, Landlock, seccomp and execveat are bare calls"),
    ("host/tests/it/sandbox/bare.rs", "what a VMM that was taken over would call has no safe wrapper"),
    ("host/src/links/tun.rs", "TAPs are made and opened by ioctls that no safe wrapper has"),
    (
        "guest/src/exec/terminal.rs",
        "a program begins the session of its terminal between fork and exec, which no safe call of std's does",
    ),
    ("guest/src/reborn/entropy.rs", "two ioctls of the random device that no safe wrapper has"),
];

/// Lists what broke a rule; passes when nothing did.
fn holds(rule: &str, broken: &[String]) {
    assert!(broken.is_empty(), "{rule}:\n  {}", broken.join("\n  "));
}

#[test]
fn our_crates_import_each_other_only_in_the_direction_of_the_table() {
    let table: BTreeMap<_, _> = DIRECTION.into_iter().collect();
    let ours: BTreeSet<_> = table.keys().copied().collect();
    let mut broken = Vec::new();
    for member in &Tree::read().members {
        let Some(allowed) = table.get(member.name.as_str()) else {
            broken.push(format!("{} is not in the table", member.name));
            continue;
        };
        for dependency in member.dependencies.iter().filter(|d| ours.contains(d.name.as_str())) {
            let edge = (member.name.as_str(), dependency.name.as_str());
            let in_tests = dependency.kind == Kind::Dev && ALSO_IN_TESTS.contains(&edge);
            if !allowed.contains(&edge.1) && !in_tests {
                broken.push(format!("{} imports {}", edge.0, edge.1));
            }
        }
    }
    holds("imports against the direction", &broken);
}

#[test]
fn the_agents_folders_import_each_other_only_in_the_direction_of_the_table() {
    let table: BTreeMap<_, _> = FOLDERS.into_iter().collect();
    let mut broken = Vec::new();
    for (folder, imported) in modules::imports(&root().join("agent/src")) {
        let Some(allowed) = table.get(folder.as_str()) else {
            broken.push(format!("{folder} is not in the table"));
            continue;
        };
        let against = imported.iter().filter(|module| !allowed.contains(&module.as_str()));
        broken.extend(against.map(|module| format!("{folder} imports {module}")));
        let unused = allowed.iter().filter(|module| !imported.contains(**module));
        broken.extend(unused.map(|module| format!("{folder} may import {module}, and does not")));
    }
    holds("imports against the direction", &broken);
}

#[test]
fn no_many_modules_of_a_crate_import_each_other() {
    let mut broken = Vec::new();
    for member in &Tree::read().members {
        let graph = modules::imports(&member.folder.join("src"));
        let cycle = modules::largest_cycle(&graph);
        println!("{}: {} modules, the largest cycle has {}", member.name, graph.len(), cycle.len());
        if cycle.len() > MAX_CYCLE {
            broken.push(format!("{}: {cycle:?}", member.name));
        }
    }
    holds("modules that import each other", &broken);
}

#[test]
fn libraries_with_one_home_are_imported_nowhere_else() {
    let mut broken = Vec::new();
    for member in &Tree::read().members {
        for (library, homes, reason) in ONLY_IN {
            let imports = member.dependencies.iter().any(|d| d.name == library && d.kind != Kind::Dev);
            if imports && !homes.contains(&member.name.as_str()) {
                broken.push(format!("{} imports {library}: {reason}", member.name));
            }
        }
    }
    holds("libraries away from home", &broken);
}

#[test]
fn what_decides_has_no_runtime_no_clock_and_no_files() {
    let mut broken = Vec::new();
    for member in Tree::read().members.iter().filter(|member| PURE.contains(&member.name.as_str())) {
        for dependency in member.dependencies.iter().filter(|d| d.kind == Kind::Normal) {
            if IMPURE_LIBRARIES.contains(&dependency.name.as_str()) {
                broken.push(format!("{} imports {}", member.name, dependency.name));
            }
        }
        for source in sources::under(&member.folder.join("src")) {
            for (line, text) in source.shipped_lines() {
                for word in IMPURE_WORDS.iter().filter(|word| text.contains(**word)) {
                    broken.push(format!("{}:{line}: {word}", source.name));
                }
            }
        }
    }
    holds("effects in crates that only decide", &broken);
}

#[test]
fn every_dependency_comes_from_the_registry_with_a_version_through_the_workspace() {
    let tree = Tree::read();
    let mut broken = tree.sources_outside_the_registry();
    for member in &tree.members {
        for dependency in &member.dependencies {
            if dependency.from_registry && dependency.requirement == "*" {
                broken.push(format!("{} takes any version of {}", member.name, dependency.name));
            }
        }
        broken.extend(sources::manifest_faults(&member.folder.join("Cargo.toml")));
    }
    holds("dependencies", &broken);
}

#[test]
fn every_licence_in_the_tree_is_on_the_list() {
    let deny = DenyFile::read();
    let mut broken = Vec::new();
    for package in Tree::read().packages {
        match package.licence.as_deref().map(|text| licence::allows(text, &deny.licences)) {
            Some(Ok(true)) => {}
            Some(Ok(false)) => {
                broken.push(format!("{package}: {}", package.licence.as_deref().unwrap_or("")));
            }
            Some(Err(fault)) => broken.push(format!("{package}: {fault}")),
            None => broken.push(format!("{package}: no licence")),
        }
    }
    holds("licences that deny.toml does not allow", &broken);
}

#[test]
fn no_banned_crate_and_no_unexplained_second_version_is_in_the_tree() {
    let (deny, tree) = (DenyFile::read(), Tree::read());
    let mut broken = Vec::new();
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in &tree.packages {
        versions.entry(&package.name).or_default().push(&package.version);
        if let Some(ban) = deny.banned.iter().find(|ban| ban.name == package.name) {
            broken.extend(ban.broken_by().iter().map(|by| format!("{package} is banned, and {by} has it")));
        }
    }
    for (name, versions) in versions {
        let explained = |version: &&&str| {
            let skipped = |skip: &String| {
                skip.split_once('@').is_some_and(|(n, v)| n == name && version.starts_with(&format!("{v}.")))
            };
            deny.skipped.iter().any(skipped)
        };
        let unexplained: Vec<_> = versions.iter().filter(|version| !explained(version)).collect();
        if unexplained.len() > 1 {
            broken.push(format!(
                "{name}: {versions:?}; name the one held back under `skip` in deny.toml, or unite them"
            ));
        }
    }
    for skip in &deny.skipped {
        let (name, version) = skip.split_once('@').unwrap_or((skip, ""));
        let used = |p: &tree::Package| p.name == name && p.version.starts_with(&format!("{version}."));
        if !tree.packages.iter().any(used) {
            broken.push(format!("{skip} is gone: take it off the `skip` list in deny.toml"));
        }
    }
    holds("bans", &broken);
}

#[test]
fn every_source_opens_by_saying_what_it_is() {
    let broken: Vec<_> = sources::ours()
        .iter()
        .filter(|source| !source.text.trim_start().starts_with("//!"))
        .map(|source| source.name.clone())
        .collect();
    holds("sources without a `//!` header", &broken);
}

#[test]
fn no_source_is_longer_than_one_subject_needs() {
    let long = |source: &Source| {
        let lines = source.text.lines().count();
        (lines > MAX_LINES).then(|| format!("{}: {lines} lines, the limit is {MAX_LINES}", source.name))
    };
    holds("long sources", &sources::ours().iter().filter_map(long).collect::<Vec<_>>());
}

#[test]
fn nothing_is_left_unfinished_or_switched_off() {
    // Put together here, so that this file does not break its own rule. A test that another starts as its child
    // process is not switched off, and says so: `#[ignore = "... child ..."]`.
    let words = ["to\u{64}o!(", "unimpl\u{65}mented!(", "d\u{62}g!(", "#[ign\u{6f}re"];
    let mut broken = sources::lines_with(&sources::ours(), &words);
    broken.retain(|line| !(line.contains(words[3]) && line.contains("child")));
    holds("unfinished", &broken);
}

#[test]
fn tests_wait_for_conditions_and_never_just_sleep() {
    let mut broken = Vec::new();
    for source in sources::ours() {
        let pauses = source.pauses().into_iter();
        broken.extend(pauses.map(|(line, why)| format!("{}:{line}: {why}", source.name)));
    }
    holds("pauses in tests: use paused time, poll in a `wait_until`, or wait for what comes after", &broken);
}

#[test]
fn only_tests_stop_the_clock() {
    let shipped = |source: &Source| {
        let stops = |text: &str| STOPS_THE_CLOCK.iter().any(|word| text.contains(word));
        let lines = source.shipped_lines().into_iter().filter(|(_, text)| stops(text));
        lines.map(|(line, text)| format!("{}:{line}: {}", source.name, text.trim())).collect::<Vec<_>>()
    };
    holds("a paused clock in a program", &sources::ours().iter().flat_map(shipped).collect::<Vec<_>>());
}

#[test]
fn only_one_function_decides_whether_a_test_runs() {
    let mut broken = Vec::new();
    for source in sources::ours() {
        let left = source.left_tests().into_iter();
        broken.extend(left.map(|(line, why)| format!("{}:{line}: {why}", source.name)));
    }
    holds("tests left without testing: ask `mvm_needs::can_run` and return", &broken);
}

#[test]
fn unsafe_code_is_where_the_list_says_and_nowhere_else() {
    let words = ["unsa\u{66}e {", "unsa\u{66}e fn", "unsa\u{66}e impl", "allow(unsa\u{66}e_code)"];
    let elsewhere: Vec<_> = sources::ours()
        .into_iter()
        .filter(|source| !UNSAFE_ALLOWED.iter().any(|(name, _)| *name == source.name))
        .collect();
    holds("unsafe code outside the list", &sources::lines_with(&elsewhere, &words));
}

#[test]
fn nothing_depends_on_where_the_repository_lies() {
    holds("paths of one machine", &sources::machine_paths());
}

#[test]
fn only_one_file_of_the_command_line_writes_to_its_standard_streams() {
    // Peers choose much of what is printed; that file escapes it.
    let words =
        ["comfy_table", "stdout()", "stderr()", "io::stdout", "io::stderr", "/dev/stdout", "/dev/tty"];
    let mut elsewhere = sources::under(&tree::root().join("cli/src"));
    elsewhere.retain(|source| source.name != "cli/src/output.rs");
    assert!(elsewhere.len() > 10, "the command line has moved");
    let mut broken = sources::lines_with(&elsewhere, &words);
    elsewhere.retain(|source| !source.name.starts_with("cli/src/commands/exec/"));
    let commands = elsewhere;
    broken.extend(sources::lines_with(&commands, &["of_command("]));
    holds("output that goes around cli/src/output.rs", &broken);
}

#[test]
fn headers_and_messages_use_plain_words() {
    // The rest of `docs/words.md` is for reviewers. The Unix account is a name.
    let words = ["whoever", "nobody", "somebody", "the house"];
    let mut broken = Vec::new();
    for source in sources::ours().iter().filter(|source| source.name.contains("/src/")) {
        let headers = (1..).zip(source.text.lines()).filter(|(_, text)| text.starts_with("//!"));
        let messages = source.shipped_lines().into_iter().filter(|(_, text)| text.contains('"'));
        for (line, text) in headers.chain(messages) {
            let lower = text.to_lowercase().replace("nobody:", "");
            if words.iter().any(|word| lower.contains(word)) {
                broken.push(format!("{}:{line}: {}", source.name, text.trim()));
            }
        }
    }
    holds("riddles: say which process, request or person it is (docs/words.md)", &broken);
}
