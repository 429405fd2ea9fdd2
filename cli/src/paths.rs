//! Where things are on this machine unless a setting says otherwise.

use std::path::PathBuf;

/// Where state lives by default: the system's place for root, the user's own otherwise.
pub(crate) fn default_data_dir(part: &str) -> PathBuf {
    if nix::unistd::geteuid().is_root() {
        return PathBuf::from("/var/lib/mvm").join(part);
    }
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let state =
        state.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state")));
    state.unwrap_or_else(|| PathBuf::from(".")).join("mvm").join(part)
}
