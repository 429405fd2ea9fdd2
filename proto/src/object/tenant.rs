//! A tenant: the boundary for quota, network, secrets and audit, over the whole cluster.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Observed;
use super::kind::{Column, Scope, Spec};
use super::pool::PoolImage;
use crate::document::{Egress, Quotas, Subnet, decode};
use crate::json::{MAX_INTEGER, Node};
use crate::{Digest, FieldError};

const TENANT: &[&str] = &["quotas", "pinned", "network", "egress", "images", "on_delete"];
const IMAGES: &[&str] = &["allow"];
/// The most prefixes and digests of images that a tenant names.
const MAX_ALLOWED: usize = 256;
const MAX_ALLOWED_BYTES: usize = 2048;
const NETWORK: &[&str] = &["subnet"];
const QUOTAS: &[&str] = &[
    "max_vcpus",
    "max_mem_mib",
    "max_running",
    "max_warm",
    "max_pools",
    "max_instances_per_pool",
    "max_disk_gib",
];

/// What a tenant may use, and how it is kept apart.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct TenantSpec {
    pub quotas: TenantQuotas,
    /// Instances are never stopped or put to sleep.
    pub pinned: bool,
    pub network: TenantNetwork,
    pub egress: Egress,
    pub images: TenantImages,
    /// What becomes of its sessions and secrets when it is deleted.
    pub on_delete: OnDelete,
}

/// The most that a tenant may use in the whole cluster. All are enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct TenantQuotas {
    /// Over all running instances.
    #[schemars(range(max = 4_294_967_295u32))]
    pub max_vcpus: u32,
    /// Over all running and warm instances.
    #[schemars(range(max = 9_007_199_254_740_991u64))]
    pub max_mem_mib: u64,
    #[schemars(range(max = 4_294_967_295u32))]
    pub max_running: u32,
    #[schemars(range(max = 4_294_967_295u32))]
    pub max_warm: u32,
    #[schemars(range(max = 4_294_967_295u32))]
    pub max_pools: u32,
    /// In any phase.
    #[schemars(range(max = 4_294_967_295u32))]
    pub max_instances_per_pool: u32,
    #[schemars(range(max = 9_007_199_254_740_991u64))]
    pub max_disk_gib: u64,
}

impl Default for TenantQuotas {
    /// A team's first steps: one large machine.
    fn default() -> Self {
        Self {
            max_vcpus: 64,
            max_mem_mib: 131_072,
            max_running: 200,
            max_warm: 200,
            max_pools: 50,
            max_instances_per_pool: 1000,
            max_disk_gib: 1024,
        }
    }
}

impl From<TenantQuotas> for Quotas {
    fn from(quotas: TenantQuotas) -> Self {
        let TenantQuotas {
            max_vcpus,
            max_mem_mib,
            max_running,
            max_warm,
            max_pools,
            max_instances_per_pool,
            max_disk_gib,
        } = quotas;
        Self {
            max_vcpus,
            max_mem_mib,
            max_running,
            max_warm,
            max_pools,
            max_instances_per_pool,
            max_disk_gib,
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct TenantNetwork {
    /// The tenant's one subnet in the cluster. Absent: the coordinator takes a free /20 of 10.240.0.0/12.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subnet: Option<Subnet>,
}

/// Which images the tenant's pools may boot from. A pool is held against it when it is written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct TenantImages {
    /// Digests, and prefixes of references up to one of `/ : @ # ?`. Empty: all images.
    #[schemars(length(max = 256))]
    pub allow: Vec<String>,
}

impl TenantImages {
    /// Whether a pool may boot from this image.
    #[must_use]
    pub fn allows(&self, image: &PoolImage) -> bool {
        let is_end = |rest: &str, entry: &str| {
            const ENDS: [char; 5] = ['/', ':', '@', '#', '?'];
            rest.is_empty() || rest.starts_with(ENDS) || entry.ends_with(ENDS)
        };
        self.allow.is_empty()
            || self.allow.iter().any(|entry| match entry.parse::<Digest>() {
                Ok(digest) => image.digest == Some(digest),
                Err(_) => {
                    let rest = image.r#ref.strip_prefix(entry.as_str());
                    rest.is_some_and(|rest| is_end(rest, entry) && stays_within(entry, rest))
                }
            })
    }
}

/// Whether what follows an entry of the list leads nowhere else: to no other folder by `..`, to no other host by a user's name
/// before it or by a parameter of the query.
fn stays_within(entry: &str, rest: &str) -> bool {
    /// What a query may choose of a source: which version of it, and what in it.
    const CHOICES: [&str; 9] =
        ["rev", "ref", "tag", "dir", "narHash", "lastModified", "revCount", "shallow", "submodules"];
    let plain = rest.to_ascii_lowercase().replace("%2e", ".").replace("%2f", "/");
    if plain.split(['/', '?', '&', '=', ':', '@', '#']).any(|step| step == "..") {
        return false;
    }
    let in_host = entry.split_once("://").is_some_and(|(_, host)| !host.contains('/'));
    if in_host && rest.split(['/', '?', '#']).next().is_some_and(|host| host.contains('@')) {
        return false;
    }
    let query = if entry.contains('?') { Some(rest) } else { rest.split_once('?').map(|(_, query)| query) };
    query.is_none_or(|query| {
        let names = query.split('&').filter_map(|choice| choice.split('=').next());
        names.filter(|name| !name.is_empty()).all(|name| CHOICES.contains(&name))
    })
}

/// What becomes of a deleted tenant's persisted sessions and its secrets on nodes. Instances go with their disks in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnDelete {
    #[default]
    Keep,
    Delete,
}

/// What the server says of a tenant.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TenantObjectStatus {
    #[serde(flatten)]
    pub observed: Observed,
    /// What the coordinator gave it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub net_id: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subnet: Option<Subnet>,
}

impl Spec for TenantSpec {
    const NAME: &'static str = "Tenant";
    const PLURAL: &'static str = "tenants";
    const SHORT: &'static str = "tn";
    const SCOPE: Scope = Scope::Cluster;
    const ABOUT: &'static str = "Quotas for the whole cluster, a network, and defaults.";
    const COLUMNS: &'static [Column] = &[
        Column::new("VCPUS", "spec.quotas.max_vcpus"),
        Column::new("MEM_MIB", "spec.quotas.max_mem_mib"),
        Column::new("RUNNING", "spec.quotas.max_running"),
        Column::new("SUBNET", "status.subnet"),
        Column::wide("NET_ID", "status.net_id"),
        Column::wide("EGRESS", "spec.egress.mode"),
    ];
    const FINALIZERS: &'static [&'static str] = &["instances"];
    type Status = TenantObjectStatus;

    fn read(node: &Node<'_, '_>) -> Option<Self> {
        let fields = node.fields(TENANT)?;
        let quotas = fields.or("quotas", TenantQuotas::default(), |node| quotas(&node));
        let pinned = fields.or("pinned", false, |node| node.boolean());
        let network = fields.or("network", TenantNetwork::default(), |node| {
            let subnet = node.fields(NETWORK)?.maybe("subnet", |node| node.parse());
            Some(TenantNetwork { subnet: subnet? })
        });
        let egress = fields.or("egress", Egress::default(), |node| decode::egress(&node));
        let images = fields.or("images", TenantImages::default(), |node| {
            let allow = node.fields(IMAGES)?.or("allow", Vec::new(), |node| allowed_images(&node));
            Some(TenantImages { allow: allow? })
        });
        let choices = [("keep", OnDelete::Keep), ("delete", OnDelete::Delete)];
        let on_delete = fields.or("on_delete", OnDelete::default(), |node| node.choice(&choices));
        Some(Self {
            quotas: quotas?,
            pinned: pinned?,
            network: network?,
            egress: egress?,
            images: images?,
            on_delete: on_delete?,
        })
    }

    fn refused_changes(&self, next: &Self) -> Vec<FieldError> {
        match (self.network.subnet, next.network.subnet) {
            (Some(from), to) if to != Some(from) => vec![FieldError {
                path: "spec.network.subnet".to_owned(),
                expected: format!("must stay {from}: instances have addresses in it"),
                found: to.map_or_else(|| "nothing".to_owned(), |to| to.to_string()),
            }],
            _ => Vec::new(),
        }
    }
}

fn allowed_images(node: &Node<'_, '_>) -> Option<Vec<String>> {
    if node.len() > MAX_ALLOWED {
        return node.refuse(format_args!("must be at most {MAX_ALLOWED} entries"));
    }
    decode::all(node, |_, item| {
        let text = item.text()?;
        let is_printable = text.bytes().all(|byte| byte.is_ascii_graphic());
        if text.is_empty() || text.len() > MAX_ALLOWED_BYTES || !is_printable {
            return item.refuse(format_args!(
                "must be a digest or the beginning of a reference: 1 to {MAX_ALLOWED_BYTES} printable characters without spaces"
            ));
        }
        Some(text.to_owned())
    })
}

fn quotas(node: &Node<'_, '_>) -> Option<TenantQuotas> {
    let fields = node.fields(QUOTAS)?;
    let default = TenantQuotas::default();
    let small = |name, default| fields.or(name, default, |node| node.integer32(0..=u32::MAX));
    let large = |name, default| fields.or(name, default, |node| node.integer(0..=MAX_INTEGER));
    let max_vcpus = small("max_vcpus", default.max_vcpus);
    let max_mem_mib = large("max_mem_mib", default.max_mem_mib);
    let max_running = small("max_running", default.max_running);
    let max_warm = small("max_warm", default.max_warm);
    let max_pools = small("max_pools", default.max_pools);
    let max_instances_per_pool = small("max_instances_per_pool", default.max_instances_per_pool);
    let max_disk_gib = large("max_disk_gib", default.max_disk_gib);
    Some(TenantQuotas {
        max_vcpus: max_vcpus?,
        max_mem_mib: max_mem_mib?,
        max_running: max_running?,
        max_warm: max_warm?,
        max_pools: max_pools?,
        max_instances_per_pool: max_instances_per_pool?,
        max_disk_gib: max_disk_gib?,
    })
}
