//! What a session needs of a guest's files.

use std::future::Future;

use mvm_proto::InstanceId;
use mvm_proto::guest::{Entry, SetEntry};

use crate::guest::{GuestLinks, LinkError};

/// The files of one guest. All paths are absolute.
pub(crate) trait GuestFiles: Sync {
    fn list(&self, folder: &str) -> impl Future<Output = Result<Vec<Entry>, LinkError>> + Send;

    /// At most `limit` bytes from `offset` on; fewer mean that the file ends there, or that it was enough.
    fn read(
        &self,
        path: &str,
        offset: u64,
        limit: u64,
    ) -> impl Future<Output = Result<Vec<u8>, LinkError>> + Send;

    /// One piece after the other; the last puts the file in place of the old one.
    fn write(
        &self,
        path: &str,
        offset: u64,
        data: &[u8],
        last: bool,
    ) -> impl Future<Output = Result<(), LinkError>> + Send;

    fn set_entry(&self, entry: SetEntry) -> impl Future<Output = Result<(), LinkError>> + Send;
}

/// A real guest's, over its link.
#[derive(Debug)]
pub(crate) struct LinkFiles<'a> {
    pub(crate) links: &'a GuestLinks,
    pub(crate) instance: &'a InstanceId,
}

/// No other user sees a file before it has its own mode.
const MODE_WHILE_WRITTEN: u32 = 0o600;

impl GuestFiles for LinkFiles<'_> {
    async fn list(&self, folder: &str) -> Result<Vec<Entry>, LinkError> {
        self.links.list_whole(self.instance, folder).await
    }

    async fn read(&self, path: &str, offset: u64, limit: u64) -> Result<Vec<u8>, LinkError> {
        self.links.read_piece(self.instance, path, offset, limit).await
    }

    async fn write(&self, path: &str, offset: u64, data: &[u8], last: bool) -> Result<(), LinkError> {
        self.links.write_piece(self.instance, path, offset, data, last, MODE_WHILE_WRITTEN).await
    }

    async fn set_entry(&self, entry: SetEntry) -> Result<(), LinkError> {
        self.links.set_entry(self.instance, entry).await
    }
}
