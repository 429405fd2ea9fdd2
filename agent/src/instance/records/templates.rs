//! What is remembered of pools' templates, beside the instances' records and in the same store.

use std::collections::BTreeSet;
use std::sync::Arc;

use mvm_proto::{Digest, InstanceId, PoolId, TenantId};
use mvm_store::Transaction;

use super::{ID_TRIES, Records, StateError};
use crate::instance::template::Template;

pub(super) const PREFIX: &str = "template/";

/// The right to make or change a pool's template.
pub(crate) type Turn = tokio::sync::OwnedMutexGuard<()>;

impl Records {
    #[must_use]
    pub fn template(&self, tenant: &TenantId, pool: &PoolId) -> Option<Template> {
        self.lock().templates.get(&(tenant.clone(), pool.clone())).cloned()
    }

    #[must_use]
    pub fn templates(&self) -> Vec<Template> {
        self.lock().templates.values().cloned().collect()
    }

    /// Whether something on the host by this name is a template's.
    #[must_use]
    pub fn is_template(&self, id: &InstanceId) -> bool {
        self.lock().templates.values().any(|template| template.id == *id)
    }

    /// The images that templates were booted from.
    pub(super) fn template_images(&self) -> BTreeSet<Digest> {
        self.lock().templates.values().filter_map(|template| template.image).collect()
    }

    /// Waits until no other step makes or changes the pool's template.
    pub(crate) async fn template_turn(&self, tenant: &TenantId, pool: &PoolId) -> Turn {
        let turn = {
            let mut inner = self.lock();
            Arc::clone(inner.template_turns.entry((tenant.clone(), pool.clone())).or_default())
        };
        turn.lock_owned().await
    }

    /// An id that no instance and no template has.
    pub(crate) fn template_id(&self) -> Result<InstanceId, StateError> {
        let inner = self.lock();
        let free = |id: &InstanceId| {
            !inner.records.contains_key(id) && inner.templates.values().all(|template| template.id != *id)
        };
        let id = (0..ID_TRIES).map(|_| InstanceId::from_bits(fastrand::u32(..))).find(free);
        id.ok_or(StateError::NoId)
    }

    /// Durable when it returns.
    pub async fn save_template(&self, template: &Template) -> Result<(), StateError> {
        // Ids, numbers and strings always serialise.
        let value = serde_json::to_vec(template).unwrap_or_default();
        let place = (template.tenant.clone(), template.pool.clone());
        self.commit(Transaction::new().put(key(&place), value)).await?;
        self.lock().templates.insert(place, template.clone());
        Ok(())
    }

    pub async fn delete_template(&self, tenant: &TenantId, pool: &PoolId) -> Result<(), StateError> {
        let place = (tenant.clone(), pool.clone());
        self.commit(Transaction::new().delete(key(&place))).await?;
        self.lock().templates.remove(&place);
        Ok(())
    }
}

fn key((tenant, pool): &(TenantId, PoolId)) -> String {
    format!("{PREFIX}{tenant}/{pool}")
}
