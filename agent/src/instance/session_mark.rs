//! What a record says of its instance's session.

use serde::{Deserialize, Serialize};

/// What an instance's record says of its session. Absent there: it has content of its own and no session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionMark {
    /// It never worked: whatever session it gets becomes its content.
    Fresh,
    /// This one is its own, and was not brought back to the last file yet.
    Taken { slot: u32 },
    /// This one is its own.
    Bound { slot: u32 },
}

impl SessionMark {
    pub(crate) fn slot(self) -> Option<u32> {
        match self {
            Self::Fresh => None,
            Self::Taken { slot } | Self::Bound { slot } => Some(slot),
        }
    }
}
