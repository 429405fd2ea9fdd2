//! Where a test makes a driver's process end; see [`mvm_host::crash`].

/// Points that only a snapshot in files passes, while it is compressed. The tests with microVMs end an agent at each,
/// three times.
pub const OF_SNAPSHOTS: &[&str] = &["pack.written", "pack.named", "pack.noted", "pack.done"];

pub(crate) fn point(name: &'static str) {
    mvm_host::crash::point(&[OF_SNAPSHOTS], name);
}
