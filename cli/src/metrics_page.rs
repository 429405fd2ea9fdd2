//! `docs/metrics.md`, made of what agent and coordinator tell a scraper.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::monitoring::{self, Alert};

const HEAD: &str = "\
# Metrics

Generated from what `/metrics` tells; a test fails when the two differ.

An agent tells it on `127.0.0.1:9434` (`--metrics-listen`), a coordinator on `127.0.0.1:9433`, as OpenMetrics text. Names are in base
units (seconds, bytes), counters end in `_total`. Labels come from closed sets, or from what the document and the node's own records
name; no peer can make a series by what it sends.
";

const ALERTS_HEAD: &str = "
## Alerts

Rules for Prometheus, their unit tests, a scrape configuration and a Grafana dashboard are in
[`examples/monitoring/`](../examples/monitoring/README.md). Each alert has a runbook.

| alert | severity | says |
|---|---|---|
";

/// One metric of a scrape.
pub(crate) struct Metric<'a> {
    pub(crate) name: String,
    pub(crate) kind: &'a str,
    help: &'a str,
    pub(crate) labels: BTreeSet<&'a str>,
}

pub(crate) fn metrics(scrape: &str) -> Vec<Metric<'_>> {
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
    page += ALERTS_HEAD;
    for Alert { alert, labels, annotations, .. } in monitoring::alerts() {
        // A bar would end the cell.
        let summary = annotations.summary.replace('|', "\\|");
        let _ = writeln!(page, "| [`{alert}`](runbooks/{alert}.md) | {} | {summary} |", labels["severity"]);
    }
    page
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
