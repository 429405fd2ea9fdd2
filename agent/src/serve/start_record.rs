//! Which process this is, as the coordinator is told: the data directory by a random id, how often an agent was started on
//! it, and a random id of this process. So the coordinator tells an agent that comes back from a second machine that uses
//! the same certificate.

use std::path::Path;

use mvm_pki::files::write_atomic;
use mvm_proto::text::chain;
use mvm_proto::wire::session::v1::AgentStart;
use serde::{Deserialize, Serialize};
use tracing::warn;

/// In the data directory.
const FILE: &str = "start.json";
const MODE: u32 = 0o600;

#[derive(Debug, Default, Serialize, Deserialize)]
struct Record {
    data_dir: String,
    number: u64,
}

/// Counts this start, durably. Call it once per process, after what keeps a second agent off the directory. Without a
/// disk to write to, the agent starts all the same: its coordinator then asks a live session whether it is still there
/// before this one takes its place.
pub(super) fn count(data_dir: &Path) -> AgentStart {
    let path = data_dir.join(FILE);
    let known: Option<Record> =
        std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let mut record = known.unwrap_or_else(|| Record { data_dir: random_id(), number: 0 });
    record.number = record.number.saturating_add(1);
    // Two short fields always serialise.
    let bytes = serde_json::to_vec(&record).unwrap_or_default();
    if let Err(error) = write_atomic(&path, &bytes, MODE) {
        warn!(path = %path.display(), error = %chain(&error), "could not count this start");
    }
    AgentStart { id: random_id(), data_dir: record.data_dir, number: record.number }
}

/// 128 bits in hexadecimal digits.
fn random_id() -> String {
    let mut bytes = [0; 16];
    if mvm_pki::random_bytes(&mut bytes).is_err() {
        bytes = fastrand::u128(..).to_be_bytes();
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_start_on_a_directory_has_the_next_number_and_an_id_of_its_own() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (first, second) = (count(one.path()), count(one.path()));
        assert_eq!((first.number, second.number), (1, 2));
        assert_eq!((&first.data_dir, first.id == second.id), (&second.data_dir, false));
        assert_ne!(count(other.path()).data_dir, first.data_dir);
        std::fs::write(one.path().join(FILE), b"{").unwrap();
        let anew = count(one.path());
        assert_eq!((anew.number, anew.data_dir == first.data_dir), (1, false));
    }
}
