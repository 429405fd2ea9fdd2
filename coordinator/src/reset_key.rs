//! The key with which agents learn at once that the coordinator they spoke with was killed. Made at the first start.

use std::io;

use mvm_pki::files::{read_private, write_private};
use mvm_transport::ResetKey;

use crate::error::{BoxError, CoordinatorError};
use crate::paths::DataDir;

/// The key in the data directory, or a new one. To be called while the store's lock is held, so that two processes
/// never make two.
pub(crate) fn load_or_make(data: &DataDir) -> Result<ResetKey, CoordinatorError> {
    try_load_or_make(data).map_err(|cause| CoordinatorError::Load {
        what: "the reset key",
        path: data.reset_key(),
        cause,
    })
}

fn try_load_or_make(data: &DataDir) -> Result<ResetKey, BoxError> {
    match read_private(data.reset_key()) {
        // A damaged key is worth a word, because someone else's hand was in it; losing it costs nothing else.
        Ok(bytes) => ResetKey::from_bytes(&bytes).ok_or_else(|| {
            format!("it is not {} bytes long; delete it and a new one is made", ResetKey::BYTES).into()
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let key = ResetKey::generate()?;
            write_private(data.reset_key(), key.expose())?;
            Ok(key)
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_key_is_made_once_and_only_its_owner_reads_it() {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::new(dir.path());
        let made = load_or_make(&data).unwrap();
        assert_eq!(load_or_make(&data).unwrap().expose(), made.expose());
        let mode = std::fs::metadata(data.reset_key()).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
    }

    #[test]
    fn a_key_that_others_can_read_or_that_is_damaged_is_refused_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::new(dir.path());
        write_private(data.reset_key(), b"short").unwrap();
        let error = load_or_make(&data).unwrap_err();
        assert!(mvm_proto::text::chain(&error).contains("delete it"));
        std::fs::set_permissions(data.reset_key(), std::fs::Permissions::from_mode(0o644)).unwrap();
        let error = load_or_make(&data).unwrap_err();
        assert!(mvm_proto::text::chain(&error).contains("chmod 600"));
    }
}
