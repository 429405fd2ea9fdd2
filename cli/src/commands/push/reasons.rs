//! Why a node has not converged, from its own status: each cause once.

use mvm_proto::status::{ConditionKind, NodeStatus, cause_of};

/// As many as fit a screen; `mvm node get` has them all.
const MAX_REASONS: usize = 20;

/// A condition that does not hold because its operator left it out: no cause of anything.
const LEFT_OUT: &str = "Disabled";
/// Sums up the others, and is told where there are none.
const SUM: ConditionKind = ConditionKind::Converged;

/// Conditions that do not hold, then steps that were not taken for another reason.
pub(super) fn reasons(status: &NodeStatus) -> Vec<String> {
    let (mut told, mut causes) = (Vec::new(), Vec::new());
    let failing = status.conditions.iter().filter(|c| !c.holds() && c.reason != LEFT_OUT);
    let (sum, failing): (Vec<_>, Vec<_>) = failing.partition(|condition| condition.is(SUM));
    for condition in failing {
        told.push(format!(
            "{}={}: {} {}",
            condition.r#type, condition.status, condition.reason, condition.message
        ));
        causes.push(condition.message.clone());
    }
    for pool in &status.pools {
        for why in &pool.deferred {
            // A step that waits for a condition says so, and repeats what that says.
            let cause = cause_of(why);
            if !causes.iter().any(|known| known.contains(cause)) {
                told.push(format!("{}/{}: {why}", pool.tenant_id, pool.pool_id));
                causes.push(cause.to_owned());
            }
        }
    }
    if told.is_empty() {
        told.extend(sum.iter().map(|c| format!("{}={}: {} {}", c.r#type, c.status, c.reason, c.message)));
    }
    told.truncate(MAX_REASONS);
    told
}

#[cfg(test)]
mod tests {
    use mvm_proto::status::{Condition, PoolStatus};

    use super::*;

    fn condition(kind: ConditionKind, reason: &str, message: &str) -> Condition {
        Condition::new(kind, false, reason, message, mvm_proto::Timestamp::from_unix_ms(0))
    }

    fn pool(id: &str, why: &[&str]) -> PoolStatus {
        PoolStatus {
            tenant_id: "acme".to_owned(),
            pool_id: id.to_owned(),
            deferred: why.iter().map(ToString::to_string).collect(),
            ..PoolStatus::default()
        }
    }

    #[test]
    fn each_cause_is_told_once_however_many_steps_wait_for_it() {
        let status = NodeStatus {
            conditions: vec![
                condition(
                    ConditionKind::Converged,
                    "Deferred",
                    "acme/web create x2: ArtifactsReady=False: no file `kernel`",
                ),
                condition(ConditionKind::ArtifactsReady, "InvalidImage", "acme/web: no file `kernel`"),
                condition(ConditionKind::LimitsHeld, "Disabled", "--cgroups none"),
            ],
            pools: vec![
                pool(
                    "web",
                    &["create x2: ArtifactsReady=False: no file `kernel`", "create: max_running is 1"],
                ),
                pool("db", &["create: ArtifactsReady=False: no file `kernel`"]),
            ],
            ..NodeStatus::default()
        };
        assert_eq!(
            reasons(&status),
            [
                "ArtifactsReady=False: InvalidImage acme/web: no file `kernel`",
                "acme/web: create: max_running is 1"
            ]
        );
    }

    #[test]
    fn a_node_that_only_works_says_that() {
        let conditions = vec![condition(ConditionKind::Converged, "Working", "2 step(s) planned")];
        let status = NodeStatus { conditions, ..NodeStatus::default() };
        assert_eq!(reasons(&status), ["Converged=False: Working 2 step(s) planned"]);
    }
}
