//! A node: what placement may do with it. Made by enrolment; users change it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::kind::{Column, Scope, Spec};
use super::{Observed, metadata};
use crate::document::{Resources, decode};
use crate::json::{Json, Node, Number};
use crate::placement::{Labels, Taint, TaintEffect};

const NODE: &[&str] = &["labels", "taints", "cordoned", "drain", "overcommit", "managed_by"];
const TAINT: &[&str] = &["key", "value", "effect"];
const OVERCOMMIT: &[&str] = &["vcpus", "mem"];
const MAX_TAINTS: usize = 32;

/// Which documents a node gets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ManagedBy {
    /// Rendered from the declared objects.
    #[default]
    Objects,
    /// As `mvm push` sends them; nothing is placed here.
    Push,
}

impl ManagedBy {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Objects => "objects",
            Self::Push => "push",
        }
    }
}

/// How placement treats a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct NodeSpec {
    /// What pools select nodes by, beside the labels of the metadata.
    pub labels: Labels,
    pub taints: Vec<Taint>,
    /// Takes nothing new.
    pub cordoned: bool,
    /// Takes nothing new, and all that it has goes to other nodes.
    pub drain: bool,
    pub overcommit: Overcommit,
    pub managed_by: ManagedBy,
}

/// How many times what a node has may be promised.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct Overcommit {
    #[schemars(range(min = 0.1, max = 100.0))]
    pub vcpus: f64,
    #[schemars(range(min = 0.1, max = 100.0))]
    pub mem: f64,
}

impl Default for Overcommit {
    fn default() -> Self {
        Self { vcpus: 4.0, mem: 1.0 }
    }
}

/// What the server says of a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NodeObjectStatus {
    #[serde(flatten)]
    pub observed: Observed,
    /// In one word: `Ready`, `NotReady`, `Unknown`.
    pub state: String,
    /// What its instances may have in all, without overcommit.
    pub capacity: NodeResources,
    /// What is placed on it.
    pub allocated: NodeResources,
    pub driver: String,
    pub accelerator: String,
    /// Of the agent.
    pub version: String,
    pub kernel: String,
    pub arch: String,
    /// Images of declared pools that are on it, by their digests.
    pub images: Vec<String>,
    /// How far its drain is; absent: it is not drained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain: Option<DrainStatus>,
}

/// How far a node's drain is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DrainStatus {
    /// Gone from here since the coordinator began with it, or since its last start.
    pub gone: u32,
    /// Instances, and places of counts, that are here or on their way.
    pub left: u32,
    /// Those that are left, and the last that have gone; 256 at most.
    pub instances: Vec<DrainedInstance>,
}

/// What becomes of an instance, or of several that are alike.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DrainedInstance {
    /// tenant/pool/instance, or tenant/pool of those that are alike.
    pub name: String,
    pub count: u32,
    /// `moving`, `moved`, `replacing`, `replaced`, `waits`, `stays`.
    pub state: String,
    /// Where it goes, or went.
    pub to: String,
    /// What it waits for, or why it stays.
    pub reason: String,
}

/// Sums over a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NodeResources {
    pub vcpus: u32,
    pub mem_mib: u64,
    pub disk_mib: u64,
    pub instances: u32,
}

impl Spec for NodeSpec {
    const NAME: &'static str = "Node";
    const PLURAL: &'static str = "nodes";
    const SHORT: &'static str = "no";
    const SCOPE: Scope = Scope::Cluster;
    const ABOUT: &'static str = "How placement treats an enrolled node: labels, taints, overcommit.";
    const COLUMNS: &'static [Column] = &[
        Column::new("STATUS", "status.state"),
        Column::new("CORDONED", "spec.cordoned"),
        Column::new("MANAGED_BY", "spec.managed_by"),
        Column::new("VCPUS", "status.capacity.vcpus"),
        Column::new("MEM_MIB", "status.capacity.mem_mib"),
        Column::new("INSTANCES", "status.allocated.instances"),
        Column::wide("DRIVER", "status.driver"),
        Column::wide("ACCELERATOR", "status.accelerator"),
        Column::wide("VERSION", "status.version"),
    ];
    type Status = NodeObjectStatus;

    fn read(node: &Node<'_, '_>) -> Option<Self> {
        let fields = node.fields(NODE)?;
        let labels = fields.or("labels", Labels::new(), |node| metadata::labels(&node));
        let taints = fields.or("taints", Vec::new(), |node| {
            if node.len() > MAX_TAINTS {
                return node.refuse(format_args!("must be at most {MAX_TAINTS} taints"));
            }
            decode::all(&node, |_, item| taint(&item))
        });
        let cordoned = fields.or("cordoned", false, |node| node.boolean());
        let drain = fields.or("drain", false, |node| node.boolean());
        let overcommit = fields.or("overcommit", Overcommit::default(), |node| {
            let (fields, default) = (node.fields(OVERCOMMIT)?, Overcommit::default());
            let vcpus = fields.or("vcpus", default.vcpus, |node| factor(&node));
            let mem = fields.or("mem", default.mem, |node| factor(&node));
            Some(Overcommit { vcpus: vcpus?, mem: mem? })
        });
        let choices = [("objects", ManagedBy::Objects), ("push", ManagedBy::Push)];
        let managed_by = fields.or("managed_by", ManagedBy::default(), |node| node.choice(&choices));
        Some(Self {
            labels: labels?,
            taints: taints?,
            cordoned: cordoned?,
            drain: drain?,
            overcommit: overcommit?,
            managed_by: managed_by?,
        })
    }
}

fn taint(node: &Node<'_, '_>) -> Option<Taint> {
    let fields = node.fields(TAINT)?;
    let key = fields.get("key", |node| label_key(&node));
    let value = fields.or("value", String::new(), |node| label_value(&node));
    let effect = fields.get("effect", |node| effect(&node));
    Some(Taint { key: key?, value: value?, effect: effect? })
}

pub(super) fn effect(node: &Node<'_, '_>) -> Option<TaintEffect> {
    node.choice(&[("no_place", TaintEffect::NoPlace), ("drain", TaintEffect::Drain)])
}

pub(super) fn label_key(node: &Node<'_, '_>) -> Option<String> {
    let text = node.text()?;
    metadata::check_label_key(text).map_or_else(|rule| node.refuse(rule), |()| Some(text.to_owned()))
}

pub(super) fn label_value(node: &Node<'_, '_>) -> Option<String> {
    let text = node.text()?;
    metadata::check_label_value(text).map_or_else(|rule| node.refuse(rule), |()| Some(text.to_owned()))
}

/// A factor of overcommit; it is reckoned with in thousandths.
fn factor(node: &Node<'_, '_>) -> Option<f64> {
    #[allow(clippy::cast_precision_loss, reason = "what is out of range is refused")]
    let factor = match node.value() {
        Json::Number(Number::Unsigned(value)) => *value as f64,
        Json::Number(Number::Float(value)) => *value,
        _ => return node.refuse("must be a number, 0.1 to 100"),
    };
    if (0.1..=100.0).contains(&factor) { Some(factor) } else { node.refuse("must be 0.1 to 100") }
}

impl NodeResources {
    /// One more instance.
    pub fn add(&mut self, resources: &Resources, count: u32) {
        self.vcpus = self.vcpus.saturating_add(resources.vcpus.saturating_mul(count));
        self.mem_mib = self.mem_mib.saturating_add(resources.mem_mib.saturating_mul(u64::from(count)));
        self.disk_mib =
            self.disk_mib.saturating_add(resources.data_disk_mib.saturating_mul(u64::from(count)));
        self.instances = self.instances.saturating_add(count);
    }
}
