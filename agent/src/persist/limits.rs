//! Limits on what one session may use of this node and of a store, because sizes and names come from a guest.

use std::time::Duration;

/// Set by the node's operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionLimits {
    /// All files of one session together, each of them by itself, and what one copy sends.
    pub max_bytes: u64,
    /// A copy that takes longer is cut off: the store keeps the session as it was.
    pub copy_within: Duration,
}

impl Default for SessionLimits {
    /// Sixteen gigabytes, and as long as a store takes for them at 20 MB a second.
    fn default() -> Self {
        Self { max_bytes: 16 << 30, copy_within: Duration::from_secs(15 * 60) }
    }
}

/// What the agent remembers of a tenant's sessions between two copies: ten sessions with 30,000 files each. What is not
/// remembered is read again.
pub(super) const MAX_REMEMBERED_BYTES: u64 = 256 * 1024 * 1024;
