//! Notices certificates that another process put in place (`mvm agent certs rotate` or `request`) and goes over to
//! them. New handshakes use the new one; no live connection is touched.

use std::time::Duration;

use mvm_pki::{LiveAnchors, LiveCredential};
use mvm_proto::text::chain;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::upkeep::certs::CertsDir;
use crate::upkeep::dir_watch::DirWatch;

/// The files are looked at this often even if no event came.
const LOOK_EVERY: Duration = Duration::from_secs(60);

pub(super) async fn reload_task(
    certs: CertsDir,
    credential: LiveCredential,
    anchors: LiveAnchors,
    stop: CancellationToken,
) {
    let mut changes = DirWatch::around(&certs.node());
    let mut hangups = signal(SignalKind::hangup()).ok();
    let hangup = async |hangups: &mut Option<tokio::signal::unix::Signal>| match hangups {
        Some(signal) => signal.recv().await,
        None => std::future::pending().await,
    };
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = changes.changed() => {}
            _ = hangup(&mut hangups) => info!("asked to reload the certificates"),
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        adopt(&certs, &credential, &anchors);
    }
}

/// Takes what is on disk into use, if it is another certificate of the same identity.
fn adopt(certs: &CertsDir, credential: &LiveCredential, anchors: &LiveAnchors) {
    let found = match certs.load() {
        Ok(found) => found,
        Err(error) => {
            return warn!(error = %chain(&error), "could not use the certificates on disk; the old ones stay");
        }
    };
    if found.anchors != *anchors.current() {
        info!("the trusted roots have changed");
        anchors.swap(found.anchors);
    }
    let current = credential.current();
    if found.credential.serial_hex() == current.serial_hex() {
        return;
    }
    if found.credential.identity() != current.identity() {
        let (found, ours) = (found.credential.identity(), current.identity());
        return warn!(%found, %ours, "the certificate on disk is for another identity; restart the agent to use it");
    }
    info!(serial = found.credential.serial_hex(), not_after = %found.credential.not_after(), "a new certificate is in use");
    credential.swap(found.credential);
}
