//! Tests of `examples/monitoring`: every alert and panel asks for what agent and coordinator tell, every alert has a unit
//! test and a runbook, and every command of a runbook exists.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::CommandFactory as _;
use clap::error::ErrorKind;
use mvm_needs::Need;
use mvm_proto::status::ConditionKind;
use serde::Deserialize;
use serde_json::Value;

use crate::args::Cli;
use crate::metrics_page::metrics;

/// Labels that Prometheus itself gives to what it scrapes.
const OF_SCRAPES: [&str; 2] = ["instance", "job"];

/// A rule of `alerts.yaml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Alert {
    pub(crate) alert: String,
    expr: String,
    #[allow(dead_code, reason = "promtool reads it")]
    r#for: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) annotations: Annotations,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Annotations {
    pub(crate) summary: String,
    runbook: String,
}

#[derive(Debug, Deserialize)]
struct Rules {
    groups: Vec<Group>,
}

#[derive(Debug, Deserialize)]
struct Group {
    rules: Vec<Alert>,
}

#[derive(Debug, Deserialize)]
struct RuleTests {
    tests: Vec<RuleTest>,
}

#[derive(Debug, Deserialize)]
struct RuleTest {
    alert_rule_test: Vec<Expected>,
}

#[derive(Debug, Deserialize)]
struct Expected {
    alertname: String,
    exp_alerts: Vec<Value>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn example(name: &str) -> PathBuf {
    root().join("examples/monitoring").join(name)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub(crate) fn alerts() -> Vec<Alert> {
    let rules: Rules = serde_yaml_ng::from_str(&read(&example("alerts.yaml"))).unwrap();
    rules.groups.into_iter().flat_map(|group| group.rules).collect()
}

/// Every name that a query can ask for, with its labels.
fn told() -> BTreeMap<String, BTreeSet<String>> {
    let mut told = BTreeMap::new();
    for scrape in [mvm_agent::metrics::example(), mvm_coordinator::metrics_example()] {
        for metric in metrics(&scrape) {
            let labels: BTreeSet<String> = metric.labels.iter().map(|label| (*label).to_owned()).collect();
            let parts: &[&str] =
                if metric.kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
            for part in parts {
                told.insert(format!("{}{part}", metric.name), labels.clone());
            }
        }
    }
    told
}

/// The metrics that an expression names, each with the matchers in its braces.
fn asked(expression: &str) -> Vec<(&str, &str)> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut rest = expression;
    while let Some(start) = rest.find(is_name) {
        rest = &rest[start..];
        let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        rest = after;
        let matchers = rest.strip_prefix('{').and_then(|inside| inside.split_once('}'));
        if let Some((_, after)) = matchers {
            rest = after;
        }
        if word.starts_with("mvm_") || word.starts_with("process_") || word == "up" {
            found.push((word, matchers.map_or("", |(inside, _)| inside)));
        }
    }
    found
}

/// `label="value"`, also with another operator, in a metric's braces.
fn matchers(inside: &str) -> impl Iterator<Item = (&str, &str)> {
    inside.split("\",").filter(|matcher| !matcher.is_empty()).map(|matcher| {
        let (label, value) = matcher.split_once('"').expect("a matcher has a quoted value");
        (label.trim_end_matches(['=', '~', '!']).trim(), value.trim_end_matches('"'))
    })
}

/// What is wrong with a query, if anything.
fn faults(of: &str, expression: &str) -> Vec<String> {
    let told = told();
    let asked = asked(expression);
    let mut faults: Vec<String> = Vec::new();
    if asked.is_empty() {
        faults.push(format!("{of} asks for no metric: {expression}"));
    }
    for (name, inside) in asked {
        let up = BTreeSet::new();
        let Some(labels) = (if name == "up" { Some(&up) } else { told.get(name) }) else {
            faults.push(format!("{of} asks for {name}, which is not told"));
            continue;
        };
        for (label, value) in matchers(inside) {
            if !labels.contains(label) && !OF_SCRAPES.contains(&label) {
                faults.push(format!("{of}: {name} has no label {label}"));
            }
            let kinds = value.split('|').filter(|_| label == "type");
            faults.extend(
                kinds
                    .filter(|kind| kind.parse::<ConditionKind>().is_err())
                    .map(|kind| format!("{of}: {kind} is no condition")),
            );
        }
    }
    faults
}

/// Every query of the dashboard, with the title of its panel.
fn queries() -> Vec<(String, String)> {
    let dashboard: Value = serde_json::from_str(&read(&example("dashboard.json"))).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let drawn = panels.iter().filter(|panel| panel["type"] != "row");
    let of_panel = |panel: &Value| {
        let title = panel["title"].as_str().unwrap().to_owned();
        let targets = panel["targets"].as_array().unwrap().clone();
        assert!(!targets.is_empty(), "{title} draws nothing");
        targets.into_iter().map(move |target| (title.clone(), target["expr"].as_str().unwrap().to_owned()))
    };
    drawn.flat_map(of_panel).collect()
}

fn nothing(wrong: &[String]) {
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn promtool(args: &[&str]) {
    let output = Command::new(mvm_needs::promtool()).args(args).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "promtool {args:?}:\n{}", String::from_utf8_lossy(&said));
}

#[test]
fn every_alert_asks_for_metrics_labels_and_conditions_that_there_are() {
    nothing(&alerts().iter().flat_map(|alert| faults(&alert.alert, &alert.expr)).collect::<Vec<_>>());
}

#[test]
fn every_panel_asks_for_metrics_labels_and_conditions_that_there_are() {
    nothing(&queries().iter().flat_map(|(title, query)| faults(title, query)).collect::<Vec<_>>());
}

#[test]
fn a_query_for_what_is_not_told_is_found() {
    assert_eq!(
        faults("a", "rate(mvm_nothing_total[5m])"),
        ["a asks for mvm_nothing_total, which is not told"]
    );
    let wrong_label = "mvm_agent_condition{job=\"x\",kind=\"Ready\"} == 0";
    assert_eq!(faults("a", wrong_label), ["a: mvm_agent_condition has no label kind"]);
    let wrong_kind = "mvm_agent_condition{type=~\"Ready|Reddy\"}";
    assert_eq!(faults("a", wrong_kind), ["a: Reddy is no condition"]);
    assert_eq!(faults("a", "vector(1)").len(), 1);
}

#[test]
fn every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_stays_quiet() {
    let tests: RuleTests = serde_yaml_ng::from_str(&read(&example("alerts_test.yaml"))).unwrap();
    let expected: Vec<Expected> = tests.tests.into_iter().flat_map(|test| test.alert_rule_test).collect();
    let tried = |fires: bool| -> BTreeSet<&str> {
        let of_kind = expected.iter().filter(|expected| expected.exp_alerts.is_empty() != fires);
        of_kind.map(|expected| expected.alertname.as_str()).collect()
    };
    let alerts = alerts();
    let names: BTreeSet<&str> = alerts.iter().map(|alert| alert.alert.as_str()).collect();
    assert_eq!((tried(true), tried(false)), (names.clone(), names));
}

#[test]
fn promtool_accepts_the_rules_their_tests_the_scrapes_and_every_query_of_the_dashboard() {
    if !mvm_needs::can_run(&[Need::Promtool]) {
        return;
    }
    let path = |name: &str| example(name).to_str().unwrap().to_owned();
    promtool(&["check", "rules", &path("alerts.yaml")]);
    promtool(&["test", "rules", &path("alerts_test.yaml")]);
    promtool(&["check", "config", &path("prometheus.yaml")]);
    // It reads queries as those of rules that record something.
    let rules: Vec<Value> = (0..)
        .zip(queries())
        .map(|(n, (_, query))| serde_json::json!({ "record": format!("panel:{n}"), "expr": query.replace("$node", ".*") }))
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("queries.json");
    let all = serde_json::json!({ "groups": [{ "name": "dashboard", "rules": rules }] });
    std::fs::write(&file, all.to_string()).unwrap();
    promtool(&["check", "rules", file.to_str().unwrap()]);
}

#[test]
fn the_jobs_that_alerts_name_are_those_of_the_scrape_configuration() {
    let scrapes: Value = serde_yaml_ng::from_str(&read(&example("prometheus.yaml"))).unwrap();
    let jobs: BTreeSet<&str> = scrapes["scrape_configs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|job| job["job_name"].as_str().unwrap())
        .collect();
    let alerts = alerts();
    let asked: BTreeSet<&str> = alerts
        .iter()
        .flat_map(|alert| asked(&alert.expr))
        .flat_map(|(_, inside)| matchers(inside))
        .filter_map(|(label, value)| (label == "job").then_some(value))
        .collect();
    assert_eq!(asked, jobs);
}

#[test]
fn every_alert_has_a_runbook_and_every_runbook_an_alert() {
    let pages = std::fs::read_dir(root().join("docs/runbooks")).unwrap();
    let pages: BTreeSet<String> =
        pages.map(|page| page.unwrap().file_name().into_string().unwrap()).collect();
    let alerts = alerts();
    assert_eq!(pages, alerts.iter().map(|alert| format!("{}.md", alert.alert)).collect());
    for Alert { alert, annotations, labels, .. } in alerts {
        assert_eq!(annotations.runbook, format!("docs/runbooks/{alert}.md"));
        assert!(["page", "ticket"].contains(&labels["severity"].as_str()), "{alert}");
        let page = read(&root().join(&annotations.runbook));
        for part in [&format!("# {alert}\n"), "## Look at\n", "## Do\n"] {
            assert!(page.contains(part), "{alert} has no {part}");
        }
    }
}

/// The commands in a page: all of its code spans that begin with `mvm`.
fn commands(page: &str) -> impl Iterator<Item = Vec<&str>> {
    page.split('`').skip(1).step_by(2).flat_map(|span| span.split("; ")).filter_map(|command| {
        let words: Vec<&str> = command.split_whitespace().collect();
        (words.first() == Some(&"mvm")).then_some(words)
    })
}

#[test]
fn every_command_of_a_runbook_exists() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    for alert in alerts() {
        let page = read(&root().join(alert.annotations.runbook));
        for words in commands(&page) {
            seen += 1;
            let unknown = |kind| {
                matches!(
                    kind,
                    ErrorKind::InvalidSubcommand | ErrorKind::UnknownArgument | ErrorKind::InvalidValue
                )
            };
            // What a sentence leaves out, such as the file that a command reads, is no mistake.
            if let Err(error) = Cli::command().try_get_matches_from(&words)
                && unknown(error.kind())
            {
                wrong.push(format!("{}: {}: {}", alert.alert, words.join(" "), error.kind()));
            }
        }
    }
    assert!(seen > 50, "only {seen} commands were found");
    nothing(&wrong);
}
