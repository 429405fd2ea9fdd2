//! What may hold of a node: the kinds of its conditions, and how one is made and read.

use crate::Timestamp;
use crate::named::named;
use crate::wire::node::v1::Condition;

named! {
    /// What a condition is about. Metrics have a series for each of these and for nothing else, so that no node can add
    /// series; a condition of a newer peer has no kind here, and is shown as it says.
    pub enum ConditionKind {
        /// The images of all pools can be had.
        ArtifactsReady = "ArtifactsReady",
        Converged = "Converged",
        DesiredStateCurrent = "DesiredStateCurrent",
        DiskWritable = "DiskWritable",
        /// Tenants that may reach the internet have a resolver for names.
        DnsReady = "DnsReady",
        DriverReady = "DriverReady",
        /// An image key vouches for the images of all instances.
        ImagesVouched = "ImagesVouched",
        /// The description of the node was not cut.
        InfoComplete = "InfoComplete",
        /// The cgroups are as they should be.
        LimitsHeld = "LimitsHeld",
        /// The kernel does not report that processes wait for memory.
        MemoryAvailable = "MemoryAvailable",
        NetworkReady = "NetworkReady",
        PrivilegesDropped = "PrivilegesDropped",
        /// What `/health` answers.
        Ready = "Ready",
        SecretsReady = "SecretsReady",
        SessionConnected = "SessionConnected",
        /// The guest sessions are copied as often as their pools ask for.
        SessionsPersisted = "SessionsPersisted",
        /// The status of the node was not cut.
        StatusComplete = "StatusComplete",
        /// Nothing is left of tenants that were removed with their data.
        TenantsRemoved = "TenantsRemoved",
        /// Every VM of this machine has a record.
        VmsAccountedFor = "VmsAccountedFor",
        WorkloadsRunning = "WorkloadsRunning",
    }
}

named! {
    /// Whether a condition holds.
    pub enum ConditionStatus {
        True = "True",
        False = "False",
        Unknown = "Unknown",
    }
}

/// Stands between a condition and the cause in the reason of a step that waits for it.
const FAILS: &str = "=False: ";

impl ConditionKind {
    /// Why a step is not taken that waits for this condition.
    #[must_use]
    pub fn blocks(self, cause: impl std::fmt::Display) -> String {
        format!("{self}{FAILS}{cause}")
    }
}

/// The cause in a reason that [`ConditionKind::blocks`] made; any other reason is its own cause.
#[must_use]
pub fn cause_of(reason: &str) -> &str {
    reason.rsplit_once(FAILS).map_or(reason, |(_, cause)| cause)
}

impl Condition {
    #[must_use]
    pub fn new(
        kind: ConditionKind,
        holds: bool,
        reason: &str,
        message: impl Into<String>,
        since: Timestamp,
    ) -> Self {
        let status = if holds { ConditionStatus::True } else { ConditionStatus::False };
        Self {
            r#type: kind.to_string(),
            status: status.to_string(),
            reason: reason.to_owned(),
            message: message.into(),
            since: since.to_string(),
        }
    }

    /// What it is about; nothing for what only a newer peer knows.
    #[must_use]
    pub fn kind(&self) -> Option<ConditionKind> {
        self.r#type.parse().ok()
    }

    #[must_use]
    pub fn is(&self, kind: ConditionKind) -> bool {
        self.r#type == kind.as_str()
    }

    #[must_use]
    pub fn holds(&self) -> bool {
        self.status == ConditionStatus::True.as_str()
    }

    /// It is known not to hold.
    #[must_use]
    pub fn fails(&self) -> bool {
        self.status == ConditionStatus::False.as_str()
    }
}

/// Puts `condition` in its place by type; `since` stays when the status did not change.
pub fn set_condition(conditions: &mut Vec<Condition>, mut condition: Condition) {
    match conditions.iter_mut().find(|old| old.r#type == condition.r#type) {
        Some(old) => {
            if old.status == condition.status {
                condition.since.clone_from(&old.since);
            }
            *old = condition;
        }
        None => conditions.push(condition),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch() -> Timestamp {
        Timestamp::from_unix_ms(0)
    }

    #[test]
    fn a_condition_that_did_not_change_keeps_its_time() {
        let at = Timestamp::from_unix_ms;
        let converged = ConditionKind::Converged;
        let mut conditions = vec![Condition::new(converged, true, "Done", "", at(1_000))];
        set_condition(&mut conditions, Condition::new(converged, true, "Done", "again", at(5_000)));
        assert_eq!((conditions.len(), conditions[0].since.as_str()), (1, "1970-01-01T00:00:01Z"));
        set_condition(&mut conditions, Condition::new(converged, false, "Working", "", at(9_000)));
        assert_eq!(conditions[0].since, "1970-01-01T00:00:09Z");
    }

    #[test]
    fn a_condition_is_serialised_under_the_name_that_peers_know() {
        let told =
            serde_json::to_value(Condition::new(ConditionKind::LimitsHeld, false, "Failed", "x", epoch()));
        let expected = serde_json::json!({
            "type": "LimitsHeld", "status": "False", "reason": "Failed", "message": "x",
            "since": "1970-01-01T00:00:00Z",
        });
        assert_eq!(told.unwrap(), expected);
        let names = ConditionKind::ALL.map(ConditionKind::as_str);
        assert!(names.is_sorted_by(|a, b| a < b), "metrics are listed in this order: {names:?}");
    }

    #[test]
    fn a_condition_that_only_a_newer_peer_knows_has_no_kind() {
        let known = Condition::new(ConditionKind::Ready, true, "AllWell", "", epoch());
        let newer = Condition { r#type: "MoonFull".into(), status: "Waxing".into(), ..known.clone() };
        assert_eq!((known.kind(), known.holds()), (Some(ConditionKind::Ready), true));
        assert_eq!((newer.kind(), newer.holds(), newer.fails()), (None, false, false));
        let mut conditions = vec![known.clone()];
        set_condition(&mut conditions, newer.clone());
        assert_eq!(conditions, [known, newer]);
    }

    #[test]
    fn the_cause_of_a_blocked_step_is_read_back_from_its_reason() {
        let reason = ConditionKind::ArtifactsReady.blocks("no file `kernel`");
        assert_eq!(reason, "ArtifactsReady=False: no file `kernel`");
        assert_eq!(
            (cause_of(&reason), cause_of("max_running is 1")),
            ("no file `kernel`", "max_running is 1")
        );
    }
}
