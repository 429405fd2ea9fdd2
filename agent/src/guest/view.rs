//! The state of a guest as the agent knows it: its last reports, and the host's measurements.

use std::time::Duration;

use mvm_proto::guest::workload::State as Fares;
use mvm_proto::guest::{
    FEATURE_DETACH, FEATURE_EXEC_USER, FEATURE_HEALTH, FEATURE_PTY, FEATURE_RESTART, FEATURE_WORKLOAD,
    GuestHello, Heartbeat, Readiness, State, Workload,
};
use mvm_proto::text::one_line;
use mvm_proto::{Timestamp, WorkloadState};
use tokio::time::Instant;

use super::idle::Signs;
use super::load::HostLoad;

/// What a guest says of itself is kept to this many bytes.
const MAX_TEXT_BYTES: usize = 256;

/// The newest word of one guest.
#[derive(Debug, Clone, PartialEq)]
pub struct GuestView {
    /// The link stands: both sides greeted each other.
    pub connected: bool,
    /// How often they did.
    pub greetings: u64,
    pub readiness: Readiness,
    /// What it said beside its readiness.
    pub message: String,
    /// The version of the protocol that both speak; 0: none yet.
    pub version: u32,
    /// The guest program's own version.
    pub guest: String,
    pub boot_id: String,
    /// It was told who it is since it booted.
    pub configured: bool,
    /// It can start its workload again, and tells how that fares; it can check its health.
    pub can_restart: bool,
    pub can_check_health: bool,
    /// It can run another workload than its image's.
    pub can_change_workload: bool,
    /// It can give a program a terminal, and run it as one of its users.
    pub has_terminals: bool,
    pub has_users: bool,
    /// It can let a program go on that nothing here reads from.
    pub can_let_go: bool,
    /// How its workload fares, where it tells, and how often it was started since the boot.
    fares: Fares,
    pub run: u32,
    pub last_heartbeat: Option<Timestamp>,
    /// Since when it has nothing to do; absent: it has, or it is not known.
    pub idle_since: Option<Timestamp>,
    /// One-minute load average x 1000.
    pub load_milli: u32,
    /// Of all its processors together, between the last two heartbeats.
    pub cpu_percent: Option<u32>,
    pub mem_total_kib: u64,
    pub mem_available_kib: u64,
    /// Execs and relays under way, as the guest counts them.
    pub open_work: u32,
    /// Execs and relays that this agent began.
    pub asked_work: u32,
    /// Those among them that nothing has moved through for so long that they no longer count as work.
    pub lapsed_work: u32,
    /// Above this share of its processors a guest works.
    pub cpu_idle_percent: u32,
    last_cpu: Option<(u64, u64)>,
    host: HostLoad,
}

impl Default for GuestView {
    fn default() -> Self {
        Self {
            connected: false,
            greetings: 0,
            readiness: Readiness::Unspecified,
            message: String::new(),
            version: 0,
            guest: String::new(),
            boot_id: String::new(),
            configured: false,
            can_restart: false,
            can_check_health: false,
            can_change_workload: false,
            has_terminals: false,
            has_users: false,
            can_let_go: false,
            fares: Fares::None,
            run: 0,
            last_heartbeat: None,
            idle_since: None,
            load_milli: 0,
            cpu_percent: None,
            mem_total_kib: 0,
            mem_available_kib: 0,
            open_work: 0,
            asked_work: 0,
            lapsed_work: 0,
            cpu_idle_percent: 100,
            last_cpu: None,
            host: HostLoad::default(),
        }
    }
}

impl GuestView {
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.signs().is_ready()
    }

    /// How its workload fares; absent: it is not known, or not decided yet.
    #[must_use]
    pub fn workload(&self) -> Option<WorkloadState> {
        match (self.readiness, self.fares) {
            _ if !self.connected => None,
            (Readiness::Failed, Fares::Completed) => Some(WorkloadState::Completed),
            (Readiness::Failed, Fares::Unhealthy) => Some(WorkloadState::Unhealthy),
            (Readiness::Failed, _) => Some(WorkloadState::Failed),
            (Readiness::Ready | Readiness::Idle | Readiness::Busy, _) => Some(WorkloadState::Running),
            (Readiness::Starting | Readiness::Unspecified, _) => None,
        }
    }

    /// Its workload is ready, or has failed to be.
    pub(super) fn is_decided(&self) -> bool {
        self.is_ready() || self.readiness == Readiness::Failed
    }

    /// Whether it works: it says so, something was asked of it, or the host sees it work.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.signs().is_busy()
    }

    /// Whether it has work other than the agent's own requests.
    pub(super) fn has_work(&self) -> bool {
        self.signs().has_work()
    }

    /// Since when it has nothing to do, unless it has not been heard of for long.
    #[must_use]
    pub fn idle_at(&self, now: Timestamp) -> Option<Timestamp> {
        self.idle_since.and_then(|_| self.signs().idle_since(self.idle_since, now))
    }

    /// Of all its processors together, as the host measured it lately.
    pub(crate) fn used_percent(&self) -> Option<u32> {
        self.host.cpu_percent().and_then(|percent| u32::try_from(percent).ok())
    }

    fn signs(&self) -> Signs {
        Signs {
            connected: self.connected,
            says: self.readiness,
            last_heartbeat: self.last_heartbeat,
            has_open_work: self.open_work > self.lapsed_work || self.asked_work > 0,
            moves_bytes: self.host.moves_bytes,
            guest_cpu_percent: self.cpu_percent.map(u64::from),
            host_cpu_percent: self.host.cpu_percent(),
            cpu_idle_percent: self.cpu_idle_percent,
        }
    }

    pub(super) fn hear_vmm_cpu(&mut self, taken: Duration, vcpus: u32, at: Instant, now: Timestamp) {
        self.host.hear_cpu(taken, vcpus, at);
        self.settle(now);
    }

    pub(super) fn hear_bytes(&mut self, total: u64, at: Instant, now: Timestamp) {
        self.host.hear_bytes(total, at);
        self.settle(now);
    }

    /// Its VM runs again after a pause: a request resumed it, and the counters of before do not apply.
    pub(super) fn resumed(&mut self, now: Timestamp) {
        (self.idle_since, self.cpu_percent, self.last_cpu) = (None, None, None);
        self.host = HostLoad::default();
        self.settle(now);
    }

    pub(super) fn greet(&mut self, hello: &GuestHello, now: Timestamp) {
        self.connected = true;
        self.greetings += 1;
        self.version = hello.version;
        self.guest = shortened(&hello.guest);
        self.boot_id = shortened(&hello.boot_id);
        self.configured = hello.configured;
        self.readiness = hello.readiness();
        let names = |feature: &str| hello.features.iter().any(|name| name == feature);
        (self.can_restart, self.can_check_health) = (names(FEATURE_RESTART), names(FEATURE_HEALTH));
        self.can_change_workload = names(FEATURE_WORKLOAD);
        (self.has_terminals, self.has_users) = (names(FEATURE_PTY), names(FEATURE_EXEC_USER));
        self.can_let_go = names(FEATURE_DETACH);
        self.hear_workload(hello.workload.as_ref());
        self.message.clear();
        self.settle(now);
    }

    pub(super) fn hear_state(&mut self, state: &State, now: Timestamp) {
        self.readiness = state.readiness();
        self.message = shortened(&state.message);
        self.hear_workload(state.workload.as_ref());
        self.settle(now);
    }

    fn hear_workload(&mut self, workload: Option<&Workload>) {
        (self.fares, self.run) = workload.map_or((Fares::None, 0), |told| (told.state(), told.run));
    }

    pub(super) fn hear_heartbeat(&mut self, beat: &Heartbeat, now: Timestamp) {
        self.last_heartbeat = Some(now);
        self.load_milli = beat.load_milli;
        self.mem_total_kib = beat.mem_total_kib;
        self.mem_available_kib = beat.mem_available_kib;
        self.open_work = beat.open_work;
        if beat.readiness() != Readiness::Unspecified {
            self.readiness = beat.readiness();
        }
        self.cpu_percent = self.last_cpu.and_then(|(uptime, busy)| {
            let passed = beat.uptime_ms.checked_sub(uptime).filter(|passed| *passed > 0)?;
            let share = beat.cpu_busy_ms.saturating_sub(busy).saturating_mul(100) / passed;
            Some(u32::try_from(share).unwrap_or(u32::MAX))
        });
        self.last_cpu = Some((beat.uptime_ms, beat.cpu_busy_ms));
        self.settle(now);
    }

    /// Begins or ends the idle time.
    pub(super) fn settle(&mut self, now: Timestamp) {
        self.idle_since = self.signs().idle_since(self.idle_since, now);
    }

    /// What a planner would decide by; anything else is only for people.
    pub(super) fn matters(&self) -> impl PartialEq + use<> {
        (self.connected, self.readiness, self.is_busy(), self.idle_since, self.fares, self.run)
    }
}

/// The beginning of what a guest said, safe in a status, an event or a log.
pub(super) fn shortened(text: &str) -> String {
    one_line(text, MAX_TEXT_BYTES)
}

#[cfg(test)]
mod tests {
    use mvm_proto::guest::Failure;

    use super::super::error::LinkError;
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_ms(1_000_000 + seconds * 1000)
    }

    fn ready() -> GuestView {
        let mut view = GuestView::default();
        let hello = GuestHello { version: 2, readiness: Readiness::Ready.into(), ..GuestHello::default() };
        view.greet(&hello, at(0));
        view
    }

    #[test]
    fn a_guest_is_idle_from_when_it_last_had_something_to_do() {
        let mut view = ready();
        assert_eq!(view.idle_at(at(5)), Some(at(0)));
        view.hear_state(
            &State { readiness: Readiness::Busy.into(), message: String::new(), workload: None },
            at(10),
        );
        assert_eq!((view.is_busy(), view.idle_at(at(11))), (true, None));
        view.hear_state(
            &State { readiness: Readiness::Idle.into(), message: String::new(), workload: None },
            at(20),
        );
        view.hear_state(
            &State { readiness: Readiness::Ready.into(), message: String::new(), workload: None },
            at(25),
        );
        assert_eq!(view.idle_at(at(30)), Some(at(20)));
    }

    #[test]
    fn processors_and_open_work_keep_a_guest_from_being_idle() {
        let mut view = ready();
        view.cpu_idle_percent = 5;
        let beat = |uptime_ms, cpu_busy_ms, open_work| Heartbeat {
            uptime_ms,
            cpu_busy_ms,
            open_work,
            ..Heartbeat::default()
        };
        view.hear_heartbeat(&beat(10_000, 100, 0), at(10));
        view.hear_heartbeat(&beat(20_000, 1_100, 0), at(20));
        assert_eq!((view.cpu_percent, view.idle_at(at(20))), (Some(10), None));
        view.hear_heartbeat(&beat(30_000, 1_200, 0), at(30));
        assert_eq!(view.idle_at(at(30)), Some(at(30)));
        view.hear_heartbeat(&beat(40_000, 1_200, 1), at(40));
        assert_eq!(view.idle_at(at(40)), None);
        view.hear_heartbeat(&beat(50_000, 1_200, 0), at(50));
        assert_eq!(view.idle_at(at(60)), Some(at(50)));
        assert_eq!(view.idle_at(at(500)), None, "not heard of for long");
    }

    #[test]
    fn what_a_guest_says_is_kept_short_and_on_one_line() {
        let hostile = "\x1b]0;owned\x07\r\nok\u{202e}\u{9b}2J";
        let shown = r"\x1b]0;owned\x07\r\nok\u{202e}\x9b2J";
        let mut view = GuestView::default();
        let hello =
            GuestHello { guest: hostile.to_owned(), boot_id: "é".repeat(1000), ..GuestHello::default() };
        view.greet(&hello, at(0));
        view.hear_state(
            &State { readiness: Readiness::Ready.into(), message: hostile.to_owned(), workload: None },
            at(0),
        );
        assert_eq!((view.guest.as_str(), view.message.as_str()), (shown, shown));
        assert!(view.boot_id.len() <= MAX_TEXT_BYTES && view.boot_id.ends_with("é..."));
        let refused = LinkError::from(Failure { code: hostile.to_owned(), message: hostile.to_owned() });
        assert_eq!(refused.to_string(), format!("the guest refused ({shown}): {shown}"));
    }
}
