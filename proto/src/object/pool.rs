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
use crate::{Digest, FieldError, NodeId, ProfileId};

const IMAGE: &[&str] = &["ref", "digest"];
const RESOURCES: &[&str] = &["vcpus", "mem_mib", "data_disk_mib"];
const COUNTS: &[&str] = &["running", "warm", "sleeping"];
const PLACEMENT: &[&str] =
    &["node_labels", "tolerations", "spread", "affinity", "anti_affinity", "max_per_node", "colocate"];
const TOLERATION: &[&str] = &["key", "value", "effect"];
const SPREAD: &[&str] = &["by", "max_skew"];
const OWN: [&str; 7] = ["image", "profile", "resources", "counts", "placement", "secrets", "update"];

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
        let placement = fields.or("placement", Placement::default(), |node| placement(&node));
        let secrets = fields.or("secrets", BTreeSet::new(), |node| secret::names(&node));
        let update = fields.or("update", PoolUpdate::default(), |node| PoolUpdate::read(&node));
        let policies = decode::policies(&fields);
        Some(Self {
            image: image?,
            profile: profile?,
            resources: resources?,
            counts: counts?,
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
