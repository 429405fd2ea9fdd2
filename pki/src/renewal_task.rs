//! Renews a certificate in the background.

use std::future::Future;
use std::io;

use tokio_util::sync::CancellationToken;

use crate::credential::{Anchors, Credential, CsrNames, LeafKey};
use crate::live::{LiveAnchors, LiveCredential};

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What an authority answers to a renewal.
#[derive(Debug, Clone)]
pub struct Renewed {
    pub chain_pem: String,
    /// The roots to trust from now on; `None` leaves them.
    pub roots_pem: Option<String>,
}

/// Asks whoever can renew this process's certificate.
pub trait Renew: Send + Sync + 'static {
    /// Trades a certificate request for a new chain. `key` is the request's; it must not leave the process.
    fn renew(
        &self,
        key: &LeafKey,
        csr_der: Vec<u8>,
    ) -> impl Future<Output = Result<Renewed, BoxError>> + Send;
}

/// Keeps `live` renewed until `shutdown`. A new certificate is saved before it is used.
pub async fn renewal_task<R: Renew>(
    live: LiveCredential,
    anchors: LiveAnchors,
    save: impl Fn(&Credential, &Anchors) -> io::Result<()> + Send + Sync,
    renew: R,
    names: CsrNames,
    shutdown: CancellationToken,
) {
    let _ = (live, anchors, save, renew, names, shutdown);
    todo!()
}
