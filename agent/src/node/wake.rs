//! A request's way to an instance that rests. A thousand requests for one instance are one wake.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use mvm_proto::status::WakeTiming;
use mvm_proto::{InstanceId, ManualAction};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::execute::Stopwatch;
use crate::execute::timing::millis;
use crate::node::actions::By;
use crate::node::actor::{Actor, Place};
use crate::node::error::ActionError;

/// How a wake ends for all who wait for it.
type Woken = Result<WakeTiming, Arc<ActionError>>;

/// The wakes that are under way, each for all who ask meanwhile.
#[derive(Debug, Clone, Default)]
pub(crate) struct UnderWay(Arc<Mutex<BTreeMap<InstanceId, Shared<BoxFuture<'static, Woken>>>>>);

/// Takes a wake off the list when it is over, however it ended.
struct Listed(UnderWay, InstanceId);

impl Drop for Listed {
    fn drop(&mut self) {
        self.0.0.lock().remove(&self.1);
    }
}

impl Actor {
    /// Brings an instance up, or joins the wake that is under way.
    pub(crate) async fn wake(&self, place: &Place) -> Woken {
        // Before it joins another: whose instance it is, is asked for each request.
        self.find(place)?;
        let asked_at = Instant::now();
        let (wake, joined) = {
            let mut under_way = self.under_way.0.lock();
            match under_way.get(&place.instance) {
                Some(other) => (other.clone(), true),
                None => {
                    let wake = self.begin_wake(place.clone());
                    under_way.insert(place.instance.clone(), wake.clone());
                    (wake, false)
                }
            }
        };
        let timing = wake.await?;
        Ok(if joined { joined_at(timing, asked_at) } else { timing })
    }

    fn begin_wake(&self, place: Place) -> Shared<BoxFuture<'static, Woken>> {
        let (this, listed) = (self.clone(), Listed(self.under_way.clone(), place.instance.clone()));
        let (watch, up) = Stopwatch::watched();
        // Continues even when the caller goes away, so that no wake is left half done.
        let task = tokio::spawn(async move {
            let _listed = listed;
            this.carry_out(&place, ManualAction::Wake, &By::Request, watch).await
        });
        let wake = async move {
            match up.await {
                Ok(timing) => Ok(timing),
                Err(_) => match task.await {
                    Ok(done) => Ok(done?.wake.unwrap_or_default()),
                    Err(cause) => Err(Arc::new(ActionError::Aborted { action: ManualAction::Wake, cause })),
                },
            }
        };
        wake.boxed().shared()
    }

    /// Waits for the wake of this instance that is under way; absent: there is none, or it failed.
    pub(crate) async fn join_wake(&self, id: &InstanceId) -> Option<WakeTiming> {
        let asked_at = Instant::now();
        let other = self.under_way.0.lock().get(id).cloned()?;
        other.await.ok().map(|timing| joined_at(timing, asked_at))
    }
}

/// Another's wake, for one who came while it was under way.
fn joined_at(timing: WakeTiming, asked_at: Instant) -> WakeTiming {
    WakeTiming { joined: true, waited_ms: millis(asked_at.elapsed()), ..timing }
}
