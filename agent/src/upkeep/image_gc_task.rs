//! Removes images that nothing needs any more.
//!
//! One task, woken by time alone. What instances need is asked for freshly each time; what stays besides is
//! [`KeepRules`]' to say.

use std::sync::Arc;
use std::time::Duration;

use mvm_image::{Images, KeepRules};
use mvm_proto::text::chain;
use tokio_util::sync::CancellationToken;

use crate::instance::records::Records;

/// Images grow old over days.
const EVERY: Duration = Duration::from_secs(3600);

pub(crate) async fn image_gc_task(images: Images, records: Arc<Records>, shutdown: CancellationToken) {
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(EVERY) => {}
        }
        let (images, needed) = (images.clone(), records.images());
        // Reads and removes large files.
        let collected =
            tokio::task::spawn_blocking(move || images.collect(&needed, &KeepRules::default())).await;
        match collected {
            Ok(Ok(collected)) => {
                for (digest, bytes) in collected.removed {
                    tracing::info!(%digest, bytes, "removed an image that nothing needs");
                }
            }
            Ok(Err(error)) => tracing::warn!(error = %chain(&error), "could not remove unused images"),
            Err(error) => tracing::error!(%error, "removing unused images panicked"),
        }
    }
}
