//! `docs/metrics.md`, made of what agent and coordinator tell a scraper.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use mvm_proto::status::ConditionKind;

const HEAD: &str = "\
# Metrics

Generated from what `/metrics` tells; a test fails when the two differ.

An agent tells it on `127.0.0.1:9434` (`--metrics-listen`), a coordinator on `127.0.0.1:9433`, as OpenMetrics text. Names are in base
units (seconds, bytes), counters end in `_total`. Labels come from closed sets, or from what the document and the node's own records
name; no peer can make a series by what it sends.
";

/// An example rule: its expression, for how long that must hold, and what it means.
struct Alert {
    name: &'static str,
    expression: &'static str,
    wait: &'static str,
    summary: &'static str,
}

const ALERTS: [Alert; 10] = [
    Alert {
        name: "MvmExpiresSoon",
        expression: "mvm_agent_expiry_timestamp_seconds{of=~\"certificate|document\"} - time() < 4 * 3600",
        wait: "15m",
        summary: "{{ $labels.of }} was not renewed: it lives a day and is renewed at half of it. Is the coordinator reachable?",
    },
    Alert {
        name: "MvmAuthorityExpiresSoon",
        expression: "mvm_coordinator_expiry_timestamp_seconds{of!=\"certificate\"} - time() < 30 * 86400",
        wait: "1h",
        summary: "{{ $labels.of }} ends within 30 days and is replaced by hand (docs/operations.md)",
    },
    Alert {
        name: "MvmOperatorsExpire",
        expression: "max(mvm_coordinator_operator_expiry_timestamp_seconds) - time() < 86400",
        wait: "15m",
        summary: "within a day no operator can operate the cluster: mvm renews the certificate of one that is used, and mvm coordinator operator create makes another",
    },
    Alert {
        name: "MvmNodeDisconnected",
        expression: "mvm_agent_session_connected == 0",
        wait: "10m",
        summary: "the node takes no new documents; what runs goes on",
    },
    Alert {
        name: "MvmNotConverged",
        expression: "mvm_agent_condition{type=\"Converged\"} == 0",
        wait: "15m",
        summary: "the node does not run what its document says: mvm node get says why",
    },
    Alert {
        name: "MvmConditionFails",
        expression: "mvm_agent_condition{type=~\"DiskWritable|DriverReady|NetworkReady|VmsAccountedFor|WorkloadsRunning\"} == 0",
        wait: "5m",
        summary: "{{ $labels.type }} does not hold: mvm node get says why",
    },
    Alert {
        name: "MvmPoolShort",
        expression: "mvm_agent_pool_desired_instances - on (instance, tenant, pool, state) mvm_agent_pool_instances > 0",
        wait: "15m",
        summary: "{{ $labels.tenant }}/{{ $labels.pool }} lacks {{ $labels.state }} instances",
    },
    Alert {
        name: "MvmMemoryOvercommitted",
        expression: "mvm_agent_allocated_memory_bytes > mvm_agent_machine_memory_bytes",
        wait: "5m",
        summary: "instances may together use more memory than the machine has",
    },
    Alert {
        name: "MvmDiskNearlyAllocated",
        expression: "mvm_agent_allocated_disk_bytes > 0.9 * mvm_agent_capacity_disk_bytes",
        wait: "15m",
        summary: "soon nothing can be made or put to sleep on this node",
    },
    Alert {
        name: "MvmDocumentsRefused",
        expression: "increase(mvm_coordinator_documents_refused_total[15m]) > 0",
        wait: "0m",
        summary: "an agent refused a document: mvm node get says why",
    },
];

/// One metric of a scrape.
struct Metric<'a> {
    name: String,
    kind: &'a str,
    help: &'a str,
    labels: BTreeSet<&'a str>,
}

fn metrics(scrape: &str) -> Vec<Metric<'_>> {
    let mut found: Vec<Metric<'_>> = Vec::new();
    for line in scrape.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("HELP"), Some(name), help) => {
                let (help, labels) = (help.unwrap_or_default().trim_end_matches('.'), BTreeSet::new());
                found.push(Metric { name: name.to_owned(), kind: "", help, labels });
            }
            (Some("#"), Some("TYPE"), Some(_), Some(kind)) => found.last_mut().unwrap().kind = kind,
            (Some("#"), ..) => {}
            _ => found.last_mut().unwrap().labels.extend(labels(line)),
        }
    }
    for metric in &mut found {
        match metric.kind {
            "counter" => metric.name += "_total",
            "info" => metric.name += "_info",
            _ => {}
        }
    }
    found
}

/// The names of a sample's labels, without what only a histogram's buckets have.
fn labels(sample: &str) -> Vec<&str> {
    let inside = sample.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}'));
    let pairs = inside.map(|(inside, _)| inside.split("\",")).into_iter().flatten();
    pairs.filter_map(|pair| Some(pair.split_once('=')?.0)).filter(|label| *label != "le").collect()
}

fn page() -> String {
    let mut page = HEAD.to_owned();
    let scrapes = [
        ("An agent's", mvm_agent::metrics::example()),
        ("A coordinator's", mvm_coordinator::metrics_example()),
    ];
    for (title, scrape) in scrapes {
        let _ = write!(page, "\n## {title}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n");
        for Metric { name, kind, help, labels } in metrics(&scrape) {
            let labels: Vec<_> = labels.into_iter().map(|label| format!("`{label}`")).collect();
            let _ = writeln!(page, "| `{name}` | {kind} | {} | {help} |", labels.join(" "));
        }
    }
    page += "\n## Alerts to start from\n\n```yaml\ngroups:\n  - name: mvm\n    rules:\n";
    for Alert { name, expression, wait, summary } in ALERTS {
        let _ = write!(
            page,
            "      - alert: {name}\n        expr: {expression}\n        for: {wait}\n        annotations:\n          summary: \"{summary}\"\n"
        );
    }
    page + "```\n"
}

#[test]
fn the_documentation_page_is_made_of_what_is_told() {
    let made = page();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let found = std::fs::read_to_string(format!("{root}/docs/metrics.md")).unwrap_or_default();
    if found != made {
        std::fs::write(format!("{root}/target/metrics.md"), &made).unwrap();
        assert_eq!(found, made, "copy target/metrics.md to docs/metrics.md");
    }
}

#[test]
fn every_alert_asks_for_metrics_that_there_are() {
    let scrapes = [mvm_agent::metrics::example(), mvm_coordinator::metrics_example()];
    let names: BTreeSet<String> =
        scrapes.iter().flat_map(|scrape| metrics(scrape)).map(|metric| metric.name).collect();
    for alert in ALERTS {
        let words = alert.expression.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        let asked: Vec<_> = words.filter(|word| word.starts_with("mvm_")).collect();
        assert!(
            !asked.is_empty() && asked.iter().all(|name| names.contains(*name)),
            "{}: {asked:?}",
            alert.name
        );
    }
}

#[test]
fn every_alert_asks_for_conditions_that_there_are() {
    let of_types = |alert: &Alert| alert.expression.split_once("{type=").map(|(_, rest)| rest);
    let asked: Vec<&str> = ALERTS.iter().filter_map(of_types).collect();
    assert_eq!(asked.len(), 2);
    for types in asked {
        let names = types.trim_start_matches('~').trim_start_matches('"').split('"').next().unwrap();
        for name in names.split('|') {
            assert!(name.parse::<ConditionKind>().is_ok(), "{name} is no condition");
        }
    }
}

#[test]
fn names_follow_the_conventions_of_prometheus() {
    for scrape in [mvm_agent::metrics::example(), mvm_coordinator::metrics_example()] {
        for metric in metrics(&scrape) {
            let name = &metric.name;
            assert!(name.starts_with("mvm_") || name.starts_with("process_"), "{name}");
            assert_eq!(name.ends_with("_total"), metric.kind == "counter", "{name}");
            for unit in ["_ms", "_millis", "_mib", "_kib", "_percent", "_minutes"] {
                assert!(!name.contains(unit), "{name} is not in a base unit");
            }
            assert!(!metric.help.is_empty(), "{name}");
            assert!(metric.kind != "histogram" || name.ends_with("_seconds"), "{name}");
        }
    }
}
