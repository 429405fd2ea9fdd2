//! A stream's way to an instance: held, so that no policy puts it to rest meanwhile, and woken where it may be.
//!
//! The hold is taken before the instance is looked at, under the lock that steps take their leases with
//! ([`instance::records`](crate::instance::records)). What is putting the instance to rest at that moment is called off, or
//! waited for and undone by the wake.

use std::sync::Arc;
use std::time::Duration;

use crate::instance::records::{Hold, Usable};
use crate::node::actor::Place;
use crate::node::error::ActionError;
use crate::node::handle::NodeHandle;

/// How long a hold lasts without bytes: as long as its pool lets an instance idle, within these bounds. Below the first a
/// person who thinks would lose a shell; above the second a stream that was forgotten would keep an instance up for ever.
const SHORTEST_WINDOW: Duration = Duration::from_secs(10);
const LONGEST_WINDOW: Duration = Duration::from_secs(24 * 3600);

/// An instance that runs, for as long as this is kept.
#[derive(Debug)]
pub struct Held {
    pub hold: Hold,
    /// It had to be woken.
    pub woken: bool,
}

impl NodeHandle {
    /// Holds an instance for a stream. One that is not running is woken if that is allowed, and refused otherwise.
    pub async fn hold(&self, place: &Place, may_wake: bool) -> Result<Held, Arc<ActionError>> {
        self.shared.actor.find(place)?;
        let held = self.records().hold(&place.instance);
        let (hold, usable) = held.ok_or_else(|| ActionError::Unknown(place.clone()))?;
        match usable {
            Usable::Now => Ok(Held { hold, woken: false }),
            Usable::Not(phase) if !may_wake => {
                Err(Arc::new(ActionError::Asleep { instance: place.instance.clone(), phase }))
            }
            Usable::Not(_) => {
                self.wake(&place.tenant, &place.pool, &place.instance).await?;
                Ok(Held { hold, woken: true })
            }
        }
    }

    /// How long a hold on an instance of this pool lasts without bytes.
    #[must_use]
    pub fn hold_window(&self, place: &Place) -> Duration {
        let current_document = self.desired();
        let pool = current_document.as_ref().and_then(|current| {
            let mut pools = current.desired.pools();
            pools.find(|(tenant, pool)| (&tenant.tenant_id, &pool.pool_id) == (&place.tenant, &place.pool))
        });
        let policy = pool.map(|(_, pool)| pool.sleep_policy).unwrap_or_default();
        Duration::from_secs(policy.warm_after_seconds).clamp(SHORTEST_WINDOW, LONGEST_WINDOW)
    }
}
