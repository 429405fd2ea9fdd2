//! A pool: what runs, how many of it in the whole cluster, and where.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::kind::{Column, Scope, Spec};
use super::node::{effect, label_key, label_value};
use super::rollout::{PoolUpdate, RolloutStatus};
use super::{Observed, metadata, secret};
use crate::document::{DesiredCounts, POOL_POLICIES, PoolPolicies, Resources, decode, rules};
use crate::json::Node;
use crate::placement::{Labels, Placement, Spread, Toleration};
use crate::{Digest, FieldError, NodeId, ProfileId, Timestamp};

const IMAGE: &[&str] = &["ref", "digest"];
const RESOURCES: &[&str] = &["vcpus", "mem_mib", "data_disk_mib"];
const COUNTS: &[&str] = &["running", "warm", "sleeping"];
const PLACEMENT: &[&str] =
    &["node_labels", "tolerations", "spread", "affinity", "anti_affinity", "max_per_node", "colocate"];
const TOLERATION: &[&str] = &["key", "value", "effect"];
const SPREAD: &[&str] = &["by", "max_skew"];
const SCALE: &[&str] = &["min", "max", "metric", "target"];
const OWN: [&str; 8] = ["image", "profile", "resources", "counts", "scale", "placement", "secrets", "update"];

/// The most instances of a pool in one phase, over all nodes.
const MAX_COUNT: u32 = 100_000;
const MAX_WISHES: usize = 32;

/// What a pool's instances are, how many there are in the cluster, and where they run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct PoolSpec {
    pub image: PoolImage,
    /// The output of the flake, or the variant of the image.
    #[schemars(default = "default_profile")]
    pub profile: ProfileId,
    pub resources: PoolResources,
    /// Totals over the cluster; placement divides them between nodes.
    #[schemars(default)]
    pub counts: PoolCounts,
    /// How many run, decided from what is measured, in place of `counts.running`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<PoolScale>,
    #[schemars(default)]
    pub placement: Placement,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schemars(schema_with = "secret::names_schema")]
    pub secrets: BTreeSet<String>,
    /// How a new revision is rolled out.
    #[serde(default, skip_serializing_if = "PoolUpdate::is_default")]
    #[schemars(default)]
    pub update: PoolUpdate,
    #[serde(flatten)]
    pub policies: PoolPolicies,
}

/// What instances boot from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct PoolImage {
    /// A Nix flake reference, `path:/DIR` or `builtin:busybox`.
    #[schemars(length(max = 2048), regex(pattern = "^[!-~]+$"))]
    pub r#ref: String,
    /// What `ref` must resolve to; required outside a dev cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
}

/// What each instance gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct PoolResources {
    #[schemars(range(min = 1, max = 32))]
    pub vcpus: u32,
    #[schemars(range(min = 32, max = 65536))]
    pub mem_mib: u64,
    /// 0: no data disk.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_048_576))]
    pub data_disk_mib: u64,
}

impl From<PoolResources> for Resources {
    fn from(resources: PoolResources) -> Self {
        let PoolResources { vcpus, mem_mib, data_disk_mib } = resources;
        Self { vcpus, mem_mib, data_disk_mib }
    }
}

/// How many instances there are in each phase, over all nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct PoolCounts {
    #[schemars(range(min = 0, max = 100_000))]
    pub running: u32,
    #[schemars(range(min = 0, max = 100_000))]
    pub warm: u32,
    #[schemars(range(min = 0, max = 100_000))]
    pub sleeping: u32,
}

/// How many instances run: as many as the measured load takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct PoolScale {
    #[serde(default = "default_min")]
    #[schemars(range(min = 0, max = 100_000))]
    pub min: u32,
    #[schemars(range(min = 1, max = 100_000))]
    pub max: u32,
    pub metric: ScaleMetric,
    /// What one instance takes: so many entries of the queue, so many requests in a second, or so many percent of its
    /// processors.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub target: u32,
}

fn default_min() -> u32 {
    1
}

/// What is measured of a pool's load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScaleMetric {
    /// What waits to be worked on; the program that has the queue tells it.
    QueueDepth,
    /// The processors that its instances use, as their nodes measure them.
    Cpu,
    /// Requests in a second; the program that takes them tells it.
    Requests,
}

impl ScaleMetric {
    pub const ALL: [(&'static str, Self); 3] =
        [("queue_depth", Self::QueueDepth), ("cpu", Self::Cpu), ("requests", Self::Requests)];

    /// Whether a caller of the API tells it, and no node.
    #[must_use]
    pub fn is_told(self) -> bool {
        self != Self::Cpu
    }
}

/// How many instances of a pool run that is scaled, and why.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PoolScaleStatus {
    pub running: u32,
    /// The measurement that it was decided from last, of the whole pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_at: Option<Timestamp>,
    /// `Steady`, `Grew`, `Shrank`, `Waiting`, `NoMeasurement` or `Bounds`.
    pub reason: String,
}

impl From<PoolCounts> for DesiredCounts {
    fn from(counts: PoolCounts) -> Self {
        let PoolCounts { running, warm, sleeping } = counts;
        Self { running, warm, sleeping }
    }
}

impl From<DesiredCounts> for PoolCounts {
    fn from(counts: DesiredCounts) -> Self {
        let DesiredCounts { running, warm, sleeping } = counts;
        Self { running, warm, sleeping }
    }
}

/// The profile of a pool that does not say: the output that Nix takes by default.
fn default_profile() -> ProfileId {
    "default".parse().unwrap_or_else(|_| unreachable!("it is a name"))
}

/// What the server says of a pool.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PoolObjectStatus {
    #[serde(flatten)]
    pub observed: Observed,
    /// What nodes said of it last, summed.
    pub counts: PoolCounts,
    /// Running of wanted: `3/4`.
    pub ready: String,
    /// Of the warm ones, those that can be claimed at once.
    pub claimable: u32,
    /// Of all, those of an older revision of the pool.
    pub outdated: u32,
    pub placed: Vec<NodeCounts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unplaced: Option<UnplacedCounts>,
    /// How far its revision is rolled out; absent before a coordinator looked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStatus>,
    /// Of a pool with `scale`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale: Option<PoolScaleStatus>,
}

/// How many instances a node is to have, and has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodeCounts {
    pub node: NodeId,
    pub wanted: PoolCounts,
    /// What the node said last; absent as long as it said nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actual: Option<PoolCounts>,
}

/// What no node takes, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UnplacedCounts {
    pub counts: PoolCounts,
    pub reason: String,
}

impl Spec for PoolSpec {
    const NAME: &'static str = "Pool";
    const PLURAL: &'static str = "pools";
    const SHORT: &'static str = "pl";
    const SCOPE: Scope = Scope::Tenant;
    const ABOUT: &'static str = "What runs, how many of it, where, and by which policies.";
    const COLUMNS: &'static [Column] = &[
        Column::new("READY", "status.ready"),
        Column::new("WARM", "status.counts.warm"),
        Column::new("SLEEPING", "status.counts.sleeping"),
        Column::new("NODES", "status.placed"),
        Column::new("UNPLACED", "status.unplaced.counts.running"),
        Column::wide("IMAGE", "spec.image.ref"),
        Column::wide("VCPUS", "spec.resources.vcpus"),
        Column::wide("MEM_MIB", "spec.resources.mem_mib"),
    ];
    const FINALIZERS: &'static [&'static str] = &["instances"];
    type Status = PoolObjectStatus;

    fn read(node: &Node<'_, '_>) -> Option<Self> {
        let known: Vec<&str> = OWN.iter().chain(&POOL_POLICIES).copied().collect();
        let fields = node.fields(&known)?;
        let image = fields.get("image", |node| {
            let fields = node.fields(IMAGE)?;
            let reference = fields.get("ref", |node| rules::image_reference(&node));
            let digest = fields.maybe("digest", |node| node.parse());
            Some(PoolImage { r#ref: reference?, digest: digest? })
        });
        let profile = fields.or("profile", default_profile(), |node| node.parse());
        let resources = fields.get("resources", |node| {
            let fields = node.fields(RESOURCES)?;
            let vcpus = fields.get("vcpus", |node| node.integer32(1..=32));
            let mem_mib = fields.get("mem_mib", |node| node.integer(32..=65_536));
            let data_disk_mib = fields.or("data_disk_mib", 0, |node| node.integer(0..=1_048_576));
            Some(PoolResources { vcpus: vcpus?, mem_mib: mem_mib?, data_disk_mib: data_disk_mib? })
        });
        let counts = fields.or("counts", PoolCounts::default(), |node| {
            let fields = node.fields(COUNTS)?;
            let count = |name| fields.or(name, 0, |node| node.integer32(0..=MAX_COUNT));
            let (running, warm, sleeping) = (count("running"), count("warm"), count("sleeping"));
            Some(PoolCounts { running: running?, warm: warm?, sleeping: sleeping? })
        });
        let scale = fields.maybe("scale", |node| scale(&node));
        if let (Some(Some(_)), Some(counts)) = (&scale, &counts)
            && counts.running > 0
        {
            fields.maybe("counts", |node| {
                let counts = node.fields(COUNTS)?;
                counts.maybe("running", |node| {
                    node.refuse::<()>(format_args!(
                        "must be absent or 0 beside `scale`, which says how many run"
                    ))
                })
            });
        }
        let placement = fields.or("placement", Placement::default(), |node| placement(&node));
        let secrets = fields.or("secrets", BTreeSet::new(), |node| secret::names(&node));
        let update = fields.or("update", PoolUpdate::default(), |node| PoolUpdate::read(&node));
        let policies = decode::policies(&fields);
        Some(Self {
            image: image?,
            profile: profile?,
            resources: resources?,
            counts: counts?,
            scale: scale?,
            placement: placement?,
            secrets: secrets?,
            update: update?,
            policies: policies?,
        })
    }

    fn refused_changes(&self, next: &Self) -> Vec<FieldError> {
        // A data disk can't shrink under what is on it; a larger one is made at the next replacement.
        let (from, to) = (self.resources.data_disk_mib, next.resources.data_disk_mib);
        if to >= from || to == 0 {
            return Vec::new();
        }
        vec![FieldError {
            path: "spec.resources.data_disk_mib".to_owned(),
            expected: format!("must be at least {from}, as it was, or 0: disks can't shrink"),
            found: to.to_string(),
        }]
    }
}

fn scale(node: &Node<'_, '_>) -> Option<PoolScale> {
    let fields = node.fields(SCALE)?;
    let min = fields.or("min", default_min(), |node| node.integer32(0..=MAX_COUNT));
    let max = fields.get("max", |node| {
        let max = node.integer32(1..=MAX_COUNT)?;
        if min.is_some_and(|min| min > max) {
            return node.refuse(format_args!("must be at least `min`"));
        }
        Some(max)
    });
    let metric = fields.get("metric", |node| node.choice(&ScaleMetric::ALL));
    let target = fields.get("target", |node| node.integer32(1..=1_000_000));
    if metric == Some(ScaleMetric::Cpu) && min == Some(0) {
        // An instance that is not there uses no processors.
        return fields.get("min", |node| node.refuse(format_args!("must be at least 1 with the metric cpu")));
    }
    Some(PoolScale { min: min?, max: max?, metric: metric?, target: target? })
}

fn placement(node: &Node<'_, '_>) -> Option<Placement> {
    let fields = node.fields(PLACEMENT)?;
    let node_labels = fields.or("node_labels", Labels::new(), |node| metadata::labels(&node));
    let tolerations = fields.or("tolerations", Vec::new(), |node| bounded(&node, |item| toleration(&item)));
    let spread = fields.maybe("spread", |node| {
        let fields = node.fields(SPREAD)?;
        let by = fields.or("by", "node".to_owned(), |node| label_key(&node));
        let max_skew = fields.or("max_skew", 1, |node| node.integer32(1..=1000));
        Some(Spread { by: by?, max_skew: max_skew? })
    });
    let affinity = fields.or("affinity", Vec::new(), |node| bounded(&node, |item| item.parse()));
    let anti_affinity = fields.or("anti_affinity", Vec::new(), |node| bounded(&node, |item| item.parse()));
    let max_per_node = fields.maybe("max_per_node", |node| node.integer32(1..=1000));
    let colocate = fields.maybe("colocate", |node| label_value(&node));
    Some(Placement {
        node_labels: node_labels?,
        tolerations: tolerations?,
        spread: spread?,
        affinity: affinity?,
        anti_affinity: anti_affinity?,
        max_per_node: max_per_node?,
        colocate: colocate?,
    })
}

fn bounded<'a, T>(node: &Node<'_, 'a>, read: impl Fn(Node<'_, 'a>) -> Option<T>) -> Option<Vec<T>> {
    if node.len() > MAX_WISHES {
        return node.refuse(format_args!("must be at most {MAX_WISHES} entries"));
    }
    decode::all(node, |_, item| read(item))
}

fn toleration(node: &Node<'_, '_>) -> Option<Toleration> {
    let fields = node.fields(TOLERATION)?;
    let key = fields.get("key", |node| label_key(&node));
    let value = fields.maybe("value", |node| label_value(&node));
    let effect = fields.maybe("effect", |node| effect(&node));
    Some(Toleration { key: key?, value: value?, effect: effect? })
}
