//! Points in time, to the millisecond, written as RFC 3339 in UTC. No clock: time arrives from the caller.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Milliseconds since 1970 in UTC, between the years 1970 and 9999.
///
/// Kept as one more than that: an `Option` of it then takes no room of its own, and a node holds many of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Timestamp(NonZeroU64);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be a time as in RFC 3339, for example 2026-01-31T09:30:00Z")]
pub struct TimestampError;

/// The last millisecond that four digits of a year can write.
const MAX_UNIX_MS: i64 = 253_402_300_799_999;

impl Timestamp {
    /// The time this many milliseconds after 1970; clamped to the years that can be written.
    #[must_use]
    pub fn from_unix_ms(ms: i64) -> Self {
        Self(NonZeroU64::MIN.saturating_add(ms.clamp(0, MAX_UNIX_MS).unsigned_abs()))
    }

    #[must_use]
    pub fn unix_ms(self) -> i64 {
        (self.0.get() - 1).cast_signed()
    }

    #[must_use]
    pub fn unix_secs(self) -> i64 {
        self.unix_ms() / 1000
    }

    /// `earlier` to `self`; zero when `earlier` is the later one.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.unix_ms() - earlier.unix_ms()).unwrap_or(0))
    }
}

impl std::ops::Add<Duration> for Timestamp {
    type Output = Self;
    fn add(self, by: Duration) -> Self {
        Self::from_unix_ms(self.unix_ms().saturating_add(i64::try_from(by.as_millis()).unwrap_or(i64::MAX)))
    }
}

impl std::ops::Sub<Duration> for Timestamp {
    type Output = Self;
    fn sub(self, by: Duration) -> Self {
        Self::from_unix_ms(self.unix_ms().saturating_sub(i64::try_from(by.as_millis()).unwrap_or(i64::MAX)))
    }
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        let ms =
            time.duration_since(UNIX_EPOCH).map_or(0, |d| i64::try_from(d.as_millis()).unwrap_or(i64::MAX));
        Self::from_unix_ms(ms)
    }
}

impl From<Timestamp> for SystemTime {
    fn from(time: Timestamp) -> Self {
        UNIX_EPOCH + time.since(Timestamp::from_unix_ms(0))
    }
}

impl FromStr for Timestamp {
    type Err = TimestampError;
    fn from_str(text: &str) -> Result<Self, TimestampError> {
        let parsed = OffsetDateTime::parse(text, &Rfc3339).map_err(|_| TimestampError)?;
        let ms = i64::try_from(parsed.unix_timestamp_nanos() / 1_000_000).map_err(|_| TimestampError)?;
        if (0..=MAX_UNIX_MS).contains(&ms) { Ok(Self::from_unix_ms(ms)) } else { Err(TimestampError) }
    }
}

impl TryFrom<String> for Timestamp {
    type Error = TimestampError;
    fn try_from(text: String) -> Result<Self, TimestampError> {
        text.parse()
    }
}

impl From<Timestamp> for String {
    fn from(time: Timestamp) -> String {
        time.to_string()
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = OffsetDateTime::from_unix_timestamp_nanos(i128::from(self.unix_ms()) * 1_000_000)
            .map_err(|_| fmt::Error)?;
        f.pad(&time.format(&Rfc3339).map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl JsonSchema for Timestamp {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Timestamp".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "date-time" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_with_an_offset_is_the_same_time_in_utc() {
        let time: Timestamp = "2026-01-31T10:30:00.250+01:00".parse().unwrap();
        assert_eq!(time.to_string(), "2026-01-31T09:30:00.25Z");
        assert_eq!(time.to_string().parse(), Ok(time));
    }

    #[test]
    fn every_millisecond_from_the_first_to_the_last_is_kept_as_it_is() {
        for ms in [0, 1, 999, 1_790_000_000_000, MAX_UNIX_MS] {
            assert_eq!(Timestamp::from_unix_ms(ms).unix_ms(), ms);
        }
        assert_eq!(Timestamp::from_unix_ms(-1).unix_ms(), 0);
        assert_eq!(Timestamp::from_unix_ms(i64::MAX).unix_ms(), MAX_UNIX_MS);
        assert_eq!(size_of::<Option<Timestamp>>(), size_of::<Timestamp>());
    }

    #[test]
    fn what_is_not_rfc_3339_is_refused() {
        for bad in
            ["", "2026-01-31", "2026-01-31 09:30:00", "1e9", "1969-12-31T23:59:59Z", "+10000-01-01T00:00:00Z"]
        {
            assert_eq!(bad.parse::<Timestamp>(), Err(TimestampError), "{bad}");
        }
    }
}
