//! What one node does next.

use mvm_proto::{DesiredState, Timestamp};

use crate::observation::Observation;
use crate::plan::NodePlan;

/// The steps that bring `observed` closer to `desired`; empty when they already agree.
#[must_use]
pub fn plan_node(desired: &DesiredState, observed: &Observation, now: Timestamp) -> NodePlan {
    let _ = (desired, observed, now);
    todo!()
}
