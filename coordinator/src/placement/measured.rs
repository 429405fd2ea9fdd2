//! What callers measure of the load of pools that are scaled. It is kept in memory: the next measurement replaces it.

use mvm_planner::fleet::scale::Load;
use mvm_proto::object::{PoolScaleStatus, kind_named};
use mvm_proto::{Problem, TenantId};

use crate::objects::{self, Caller, may_tell_load};
use crate::refuse;
use crate::state::State;
use crate::world::pool_key;

/// The largest measurement: no queue is longer.
const MAX_LOAD: f64 = 1e12;

/// Takes a measurement, and says what was decided last. The next decision comes within seconds.
pub(crate) async fn measured(
    state: &State,
    caller: &Caller,
    tenant: &TenantId,
    name: &str,
    value: f64,
) -> Result<PoolScaleStatus, Problem> {
    let kind = kind_named("pools").map_err(refuse::bad_request)?;
    may_tell_load(caller, kind, tenant, name)?;
    if !(0.0..=MAX_LOAD).contains(&value) {
        return Err(refuse::bad_request(format!("value must be 0 to {MAX_LOAD}")));
    }
    let object = objects::get(&state.store, caller, kind, Some(tenant), name).await?;
    let Some(key) = pool_key(&object) else { return Err(refuse::no_object(kind, Some(tenant), name)) };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is 0 to 10^15")]
    let load = Load { milli: (value * 1000.0).round() as u64, at: state.steady.now() };
    let mut world = state.world.lock();
    if !world.measured(&key, load) {
        let detail = format!("{tenant}/{name} is not scaled by what callers measure");
        let advice = "Declare `scale` with the metric queue_depth or requests; nodes measure cpu themselves.";
        return Err(Problem::new(409, "not_scaled", detail, advice));
    }
    Ok(world.scales.status(&key).unwrap_or_default())
}
