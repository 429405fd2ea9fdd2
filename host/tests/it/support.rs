//! What several of these need: networks of a test's own, and the end of what a test started.

pub(crate) mod ending;
#[cfg(feature = "network")]
pub(crate) mod netns;
