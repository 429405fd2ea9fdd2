//! What a pool's instances may do to the node's disk.

use std::ops::RangeInclusive;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Bytes in a second, from 64 KiB to 1 TiB. A VMM whose write waits for its turn can't be ended before that; with less than
/// this a single large one would wait for minutes.
pub const IO_BYTES_PER_SECOND: RangeInclusive<u64> = 65_536..=1 << 40;

/// Operations in a second, from 10 for the same reason to a thousand million, which the kernel's counter can hold.
pub const IO_OPS_PER_SECOND: RangeInclusive<u64> = 10..=1_000_000_000;

/// The most that each instance of a pool may do to the disk that the node keeps instances on. What is absent is not
/// limited; at least one is there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields, extend("minProperties" = 1))]
pub struct IoLimits {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 65_536, max = 1_099_511_627_776u64))]
    pub read_bytes_per_second: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 65_536, max = 1_099_511_627_776u64))]
    pub write_bytes_per_second: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 1_000_000_000))]
    pub read_ops_per_second: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 1_000_000_000))]
    pub write_ops_per_second: Option<u64>,
}

impl IoLimits {
    /// Whether a document could have said so: for who was told by someone else than a document.
    #[must_use]
    pub fn is_sensible(&self) -> bool {
        let bytes = [self.read_bytes_per_second, self.write_bytes_per_second];
        let ops = [self.read_ops_per_second, self.write_ops_per_second];
        let within = |limits: [Option<u64>; 2], range: RangeInclusive<u64>| {
            limits.into_iter().flatten().all(|limit| range.contains(&limit))
        };
        *self != Self::default() && within(bytes, IO_BYTES_PER_SECOND) && within(ops, IO_OPS_PER_SECOND)
    }
}
