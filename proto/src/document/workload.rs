//! What a pool says of the program in its guests: what its end means, and how its health is checked.

use std::ops::RangeInclusive;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::guest;

/// The most bytes of the path that an HTTP check asks for.
pub(super) const MAX_HEALTH_PATH_BYTES: usize = 1024;

/// How long failures of a check mean nothing after the program was started.
pub(super) const START_PERIOD_SECONDS: RangeInclusive<u64> = 0..=3600;
pub(super) const HEALTH_INTERVAL_SECONDS: RangeInclusive<u64> = 1..=3600;
pub(super) const HEALTH_TIMEOUT_SECONDS: RangeInclusive<u64> = 1..=300;
/// The longest that a program may take to be found healthy or not: a step waits for it.
pub(super) const DECIDED_WITHIN_SECONDS: u64 = 7200;
pub(super) const FAILURE_THRESHOLD: RangeInclusive<u32> = 1..=100;

/// Whether the program of a guest is started again when it ended, or fails its health check.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    #[default]
    Always,
    /// Unless it ended with exit code 0.
    OnFailure,
    Never,
}

impl Restart {
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// How the health of the program in a guest is checked. The guest carries the check out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Health {
    #[serde(flatten)]
    pub check: HealthCheck,
    /// How long failures mean nothing after the program was started. The first success ends it.
    #[schemars(default = "default_start_period", range(min = 0, max = 3600))]
    pub start_period_seconds: u64,
    /// From the end of one check to the beginning of the next.
    #[schemars(default = "default_interval", range(min = 1, max = 3600))]
    pub interval_seconds: u64,
    /// A check that takes longer failed.
    #[schemars(default = "default_timeout", range(min = 1, max = 300))]
    pub timeout_seconds: u64,
    /// So many failures in a row make the program unhealthy.
    #[schemars(default = "default_threshold", range(min = 1, max = 100))]
    pub failure_threshold: u32,
}

/// What is tried: exactly one of these.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HealthCheck {
    /// A program that ends with exit code 0.
    Exec(ExecCheck),
    /// A GET that is answered with a status from 200 to 399.
    Http(HttpCheck),
    /// A port that takes a connection.
    Tcp(TcpCheck),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ExecCheck {
    /// The program and its arguments; no shell.
    #[schemars(length(min = 1, max = 64), inner(length(max = 4096), regex(pattern = "^[ -~]+$")))]
    pub command: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct HttpCheck {
    /// On the guest's loopback.
    #[schemars(range(min = 1, max = 65535))]
    pub port: u16,
    #[schemars(default = "default_path", length(max = 1024), regex(pattern = "^/[!-~]*$"))]
    pub path: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct TcpCheck {
    /// On the guest's loopback.
    #[schemars(range(min = 1, max = 65535))]
    pub port: u16,
}

impl Health {
    /// How long a program may take until its guest says that it is healthy, or that it is not.
    #[must_use]
    pub fn decided_within(&self) -> Duration {
        let round = self.interval_seconds + self.timeout_seconds;
        Duration::from_secs(self.start_period_seconds + round * u64::from(self.failure_threshold))
    }
}

impl From<&Health> for guest::Health {
    fn from(health: &Health) -> Self {
        use guest::health::Check;
        let seconds = |seconds: u64| u32::try_from(seconds).unwrap_or(u32::MAX);
        let check = match health.check.clone() {
            HealthCheck::Exec(ExecCheck { command }) => Check::Exec(guest::ExecCheck { command }),
            HealthCheck::Http(HttpCheck { port, path }) => {
                Check::Http(guest::HttpCheck { port: port.into(), path })
            }
            HealthCheck::Tcp(TcpCheck { port }) => Check::Tcp(guest::TcpCheck { port: port.into() }),
        };
        Self {
            check: Some(check),
            start_period_seconds: seconds(health.start_period_seconds),
            interval_seconds: seconds(health.interval_seconds),
            timeout_seconds: seconds(health.timeout_seconds),
            failure_threshold: health.failure_threshold,
        }
    }
}

pub(super) fn default_start_period() -> u64 {
    30
}

pub(super) fn default_interval() -> u64 {
    10
}

pub(super) fn default_timeout() -> u64 {
    5
}

pub(super) fn default_threshold() -> u32 {
    3
}

pub(super) fn default_path() -> String {
    "/".to_owned()
}
