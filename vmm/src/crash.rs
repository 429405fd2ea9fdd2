//! Points at which tests end the agent inside a driver; see [`mvm_host::crash`].

/// Passed while a snapshot is compressed. The tests with microVMs end an agent at each,
/// three times.
pub const OF_SNAPSHOTS: &[&str] = &["pack.written", "pack.named", "pack.noted", "pack.done"];

pub(crate) fn point(name: &'static str) {
    mvm_host::crash::point(&[OF_SNAPSHOTS], name);
}
