//! From JSON text to an observation: strict, and with everything that is wrong at once, as documents are read.

use std::fmt;

use mvm_proto::document::Resources;
use mvm_proto::json::{Fields, Json, MAX_INTEGER, Node, Report};
use mvm_proto::{FieldError, Phase, WorkloadState};

use crate::workload::Workload;

use super::{Blocked, Capacity, Observation, ObservedInstance};

/// Room for all instances that a node can have, many times over.
pub const MAX_OBSERVATION_BYTES: usize = 64 * 1024 * 1024;

const OBSERVATION: &[&str] = &["capacity", "instances", "blocked", "memory_pressure"];
const CAPACITY: &[&str] = &["vcpus", "mem_mib", "disk_mib", "max_instances"];
const BLOCKED: &[&str] = &["tenant", "pool", "reason"];
const RESOURCES: &[&str] = &["vcpus", "mem_mib", "data_disk_mib"];
const INSTANCE: &[&str] = &[
    "tenant",
    "pool",
    "id",
    "phase",
    "since",
    "revision",
    "resources",
    "last_used_at",
    "idle_since",
    "override_until",
    "claimed",
    "moving",
    "on_demand",
    "home",
    "staging",
    "moving_to",
    "retry_not_before",
    "failures",
    "workload",
    "offset",
];
const WORKLOAD: &[&str] = &["state", "since", "restarts"];

/// Everything wrong with an observation, in the order of its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservationErrors(pub Vec<FieldError>);

impl fmt::Display for ObservationErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the observation has {} error(s)", self.0.len())?;
        for error in &self.0 {
            let path = if error.path.is_empty() { "observation" } else { &error.path };
            write!(f, "\n  {path}: {}, found {}", error.expected, error.found)?;
        }
        Ok(())
    }
}

impl std::error::Error for ObservationErrors {}

impl Observation {
    /// Reads what `mvm agent observe -o json` prints.
    pub fn parse(bytes: &[u8]) -> Result<Self, ObservationErrors> {
        let report = Report::default();
        let json = Json::read(bytes, MAX_OBSERVATION_BYTES, &report);
        let value = json.as_ref().and_then(|json| observation(&Node::root(json, &report)));
        match (value, report.into_errors()) {
            (Some(value), errors) if errors.is_empty() => Ok(value),
            (_, errors) => Err(ObservationErrors(errors)),
        }
    }
}

fn observation(node: &Node<'_, '_>) -> Option<Observation> {
    let fields = node.fields(OBSERVATION)?;
    let capacity = fields.get("capacity", |node| capacity(&node));
    let instances = fields.get("instances", |node| {
        let mut ids = std::collections::BTreeSet::new();
        list(&node, |node| {
            let instance = instance(node)?;
            if ids.insert(instance.id.clone()) {
                Some(instance)
            } else {
                node.refuse_as("must not be repeated", &instance.id)
            }
        })
    });
    let blocked = fields.or("blocked", Vec::new(), |node| list(&node, blocked));
    let memory_pressure = flag(&fields, "memory_pressure");
    Some(Observation {
        capacity: capacity?,
        instances: instances?,
        blocked: blocked?,
        memory_pressure: memory_pressure?,
    })
}

/// Every item, or none when any is wrong; all of them are looked at.
fn list<T>(node: &Node<'_, '_>, mut read: impl FnMut(&Node<'_, '_>) -> Option<T>) -> Option<Vec<T>> {
    let read: Vec<Option<T>> = node.items()?.map(|item| read(&item)).collect();
    read.into_iter().collect()
}

fn capacity(node: &Node<'_, '_>) -> Option<Capacity> {
    let fields = node.fields(CAPACITY)?;
    let vcpus = fields.get("vcpus", |node| node.integer32(0..=u32::MAX));
    let mem_mib = fields.get("mem_mib", |node| node.integer(0..=MAX_INTEGER));
    let disk_mib = fields.get("disk_mib", |node| node.integer(0..=MAX_INTEGER));
    let max_instances = fields.get("max_instances", |node| node.integer32(0..=u32::MAX));
    Some(Capacity { vcpus: vcpus?, mem_mib: mem_mib?, disk_mib: disk_mib?, max_instances: max_instances? })
}

fn blocked(node: &Node<'_, '_>) -> Option<Blocked> {
    let fields = node.fields(BLOCKED)?;
    let tenant = fields.get("tenant", |node| node.parse());
    let pool = fields.maybe("pool", |node| node.parse());
    let reason = fields.get("reason", |node| node.text().map(ToOwned::to_owned));
    Some(Blocked { tenant: tenant?, pool: pool?, reason: reason? })
}

fn instance(node: &Node<'_, '_>) -> Option<ObservedInstance> {
    let fields = node.fields(INSTANCE)?;
    let tenant = fields.get("tenant", |node| node.parse());
    let pool = fields.get("pool", |node| node.parse());
    let id = fields.get("id", |node| node.parse());
    let phase = fields.get("phase", |node| phase_of(&node));
    let since = fields.get("since", |node| node.parse());
    let revision = fields.get("revision", |node| node.parse());
    let resources = fields.get("resources", |node| resources(&node));
    let last_used_at = fields.maybe("last_used_at", |node| node.parse());
    let idle_since = fields.maybe("idle_since", |node| node.parse());
    let override_until = fields.maybe("override_until", |node| node.parse());
    let claimed = flag(&fields, "claimed");
    let moving = flag(&fields, "moving");
    let on_demand = flag(&fields, "on_demand");
    let home = fields.maybe("home", |node| phase_of(&node));
    let staging = fields.maybe("staging", |node| phase_of(&node));
    let moving_to = fields.maybe("moving_to", |node| phase_of(&node));
    let retry_not_before = fields.maybe("retry_not_before", |node| node.parse());
    let failures = fields.or("failures", 0, |node| node.integer32(0..=u32::MAX));
    let workload = fields.maybe("workload", |node| workload(&node).map(Box::new));
    let offset = fields.maybe("offset", |node| node.integer32(0..=u32::from(u16::MAX)));
    Some(ObservedInstance {
        tenant: tenant?,
        pool: pool?,
        id: id?,
        phase: phase?,
        since: since?,
        revision: revision?,
        resources: resources?,
        last_used_at: last_used_at?,
        idle_since: idle_since?,
        override_until: override_until?,
        claimed: claimed?,
        moving: moving?,
        on_demand: on_demand?,
        home: home?,
        staging: staging?,
        moving_to: moving_to?,
        retry_not_before: retry_not_before?,
        failures: failures?,
        workload: workload?,
        offset: offset?,
    })
}

fn workload(node: &Node<'_, '_>) -> Option<Workload> {
    let fields = node.fields(WORKLOAD)?;
    let states = WorkloadState::ALL.map(|state| (state.as_str(), state));
    let state = fields.get("state", |node| node.choice(&states));
    let since = fields.get("since", |node| node.parse());
    let restarts = fields.or("restarts", 0, |node| node.integer32(0..=u32::MAX));
    Some(Workload { state: state?, since: since?, restarts: restarts? })
}

fn flag(fields: &Fields<'_, '_>, name: &'static str) -> Option<bool> {
    fields.or(name, false, |node| node.boolean())
}

fn phase_of(node: &Node<'_, '_>) -> Option<Phase> {
    node.choice(&Phase::ALL.map(|phase| (phase.as_str(), phase)))
}

fn resources(node: &Node<'_, '_>) -> Option<Resources> {
    let fields = node.fields(RESOURCES)?;
    let vcpus = fields.get("vcpus", |node| node.integer32(1..=32));
    let mem_mib = fields.get("mem_mib", |node| node.integer(32..=65_536));
    let data_disk_mib = fields.get("data_disk_mib", |node| node.integer(0..=1_048_576));
    Some(Resources { vcpus: vcpus?, mem_mib: mem_mib?, data_disk_mib: data_disk_mib? })
}
