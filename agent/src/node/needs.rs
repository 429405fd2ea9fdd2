//! What pools need before any of their instances can start: their image, and their tenant's secrets.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mvm_image::{Images, Resolution};
use mvm_planner::Blocked;
use mvm_proto::document::{ImageSource, Pool, Tenant};
use mvm_proto::status::{Condition, ConditionKind, Event};
use mvm_proto::text::chain;
use mvm_proto::{DesiredState, Digest, PoolId, TenantId, Timestamp};
use tokio::sync::watch;

use crate::instance::PoolSpec;
use crate::secrets::{BundleOf, BundleSet, Secrets, SecretsError};

/// How many pools or tenants a condition names: the others are in their pools' status.
const NAMED: usize = 3;

/// What is on its way.
const BUILDING: &str = "Building";

/// A build that ended without a word is noticed this soon.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Something that is not there.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Missing {
    /// CamelCase, for programs.
    reason: &'static str,
    message: String,
}

#[derive(Debug)]
pub(crate) struct Needs {
    images: Images,
    secrets: Arc<Secrets>,
    artifacts: Vec<Missing>,
    bundles: Vec<Missing>,
    /// The bundles of pools that are not there: a coordinator may have them.
    lacking: BundleSet,
    /// What pools from folders boot from now.
    folder_images: BTreeMap<(TenantId, PoolId), Digest>,
    /// Pools whose image failed, and what was told of it.
    failing: BTreeMap<String, Missing>,
    events: Vec<(&'static str, String, String)>,
    changed: watch::Receiver<u64>,
}

impl Needs {
    pub(crate) fn new(images: Images, secrets: Arc<Secrets>) -> Self {
        let changed = images.changed();
        Self {
            images,
            secrets,
            artifacts: Vec::new(),
            bundles: Vec::new(),
            lacking: BundleSet::new(),
            folder_images: BTreeMap::new(),
            failing: BTreeMap::new(),
            events: Vec::new(),
            changed,
        }
    }

    /// What can't be started now. Begins to get what is missing.
    pub(crate) fn look(&mut self, desired: &DesiredState) -> Vec<Blocked> {
        self.artifacts.clear();
        self.bundles.clear();
        self.lacking.clear();
        self.folder_images.clear();
        let failing = std::mem::take(&mut self.failing);
        let mut blocked = Vec::new();
        for tenant in &desired.tenants {
            self.look_for_secrets(tenant, &mut blocked);
            for pool in &tenant.pools {
                let name = format!("{}/{}", tenant.tenant_id, pool.pool_id);
                let resolved = self.images.resolve(&PoolSpec::image_of(pool));
                let digest = match &resolved {
                    Resolution::Ready(digest) | Resolution::Outdated { digest, .. } => Some(*digest),
                    _ => None,
                };
                if let Some(digest) = digest.filter(|_| pool.image_digest.is_none() && is_folder(pool)) {
                    self.folder_images.insert((tenant.tenant_id.clone(), pool.pool_id.clone()), digest);
                }
                let (reason, why) = match resolved {
                    Resolution::Ready(_) => {
                        if failing.contains_key(&name) {
                            self.events.push(("ImageReady", name, "its image can be had again".to_owned()));
                        }
                        continue;
                    }
                    Resolution::Working { message } => (BUILDING, message),
                    Resolution::Outdated { reason, message, .. }
                    | Resolution::Unavailable { reason, message } => (reason, message),
                };
                let missing = Missing { reason, message: format!("{name}: {why}") };
                self.artifacts.push(missing.clone());
                if reason != BUILDING {
                    if failing.get(&name) != Some(&missing) {
                        self.events.push(("ImageUnavailable", name.clone(), format!("{reason}: {why}")));
                    }
                    self.failing.insert(name, missing);
                }
                if digest.is_some() {
                    continue;
                }
                let pool = Some(pool.pool_id.clone());
                let reason = ConditionKind::ArtifactsReady.blocks(why);
                blocked.push(Blocked { tenant: tenant.tenant_id.clone(), pool, reason });
            }
        }
        blocked
    }

    /// A tenant's secrets, and those of its pools that have their own.
    fn look_for_secrets(&mut self, tenant: &Tenant, blocked: &mut Vec<Blocked>) {
        let mut lack = |name: String, pool: Option<&Pool>, why: &SecretsError| {
            let why = chain(why);
            self.bundles.push(Missing { reason: "SecretsMissing", message: format!("{name}: {why}") });
            let pool = pool.map(|pool| pool.pool_id.clone());
            let reason = ConditionKind::SecretsReady.blocks(why);
            blocked.push(Blocked { tenant: tenant.tenant_id.clone(), pool, reason });
        };
        for pool in &tenant.pools {
            let of = BundleOf { tenant: &tenant.tenant_id, pool: &pool.pool_id, own: true };
            if let Some(expected) = &pool.secrets_hash
                && let Err(why) = self.secrets.check(of, expected)
            {
                lack(format!("{}/{}", tenant.tenant_id, pool.pool_id), Some(pool), &why);
                self.lacking.insert((tenant.tenant_id.clone(), *expected));
            }
        }
        let Some(expected) = &tenant.secrets_hash else { return };
        let Err(why) = self.secrets.check_tenant(&tenant.tenant_id, expected) else { return };
        let shares = |pool: &&Pool| pool.secrets_hash.is_none();
        if tenant.pools.iter().all(|pool| shares(&pool)) {
            lack(tenant.tenant_id.to_string(), None, &why);
        } else {
            // The others can start.
            for pool in tenant.pools.iter().filter(shares) {
                lack(format!("{}/{}", tenant.tenant_id, pool.pool_id), Some(pool), &why);
            }
        }
    }

    /// The bundles that documents name for pools, and that are not there.
    pub(crate) fn lacking(&self) -> &BundleSet {
        &self.lacking
    }

    /// What pools whose folder may change boot from now.
    pub(crate) fn folder_images(&self) -> BTreeMap<(TenantId, PoolId), Digest> {
        self.folder_images.clone()
    }

    /// What there is to tell since the last call: images that can't be had, once for each reason, and those that came back.
    pub(crate) fn events(&mut self, now: Timestamp) -> Vec<Event> {
        let told = std::mem::take(&mut self.events).into_iter();
        told.map(|(kind, subject, message)| Event {
            at: now.to_string(),
            kind: kind.to_owned(),
            subject,
            message,
        })
        .collect()
    }

    /// Whether something is missing that comes by itself.
    pub(crate) fn is_working(&self) -> bool {
        self.artifacts.iter().any(|missing| missing.reason == BUILDING)
    }

    /// Waits for a word on something that is being built.
    pub(crate) async fn wait(&mut self) {
        // One who builds no more has said all there is to say.
        let _ = tokio::time::timeout(LOOK_AGAIN, self.changed.changed()).await;
    }

    pub(crate) fn conditions(&self, now: Timestamp) -> [Condition; 2] {
        [
            condition(ConditionKind::ArtifactsReady, &self.artifacts, now),
            condition(ConditionKind::SecretsReady, &self.bundles, now),
        ]
    }
}

fn is_folder(pool: &Pool) -> bool {
    matches!(ImageSource::parse(&pool.flake_ref), Ok(ImageSource::Folder(_)))
}

fn condition(kind: ConditionKind, missing: &[Missing], now: Timestamp) -> Condition {
    // One that will not come by itself says more than one that is on its way.
    let worst = missing.iter().find(|missing| missing.reason != BUILDING).or(missing.first());
    let Some(worst) = worst else { return Condition::new(kind, true, "Ready", "", now) };
    let named: Vec<_> = missing.iter().take(NAMED).map(|missing| missing.message.as_str()).collect();
    let more = missing.len().saturating_sub(NAMED);
    let rest = if more > 0 { format!(" (and {more} more)") } else { String::new() };
    Condition::new(kind, false, worst.reason, format!("{}{rest}", named.join("; ")), now)
}
