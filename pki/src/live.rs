//! Credentials and anchors that change under running endpoints.
//!
//! Every TLS configuration holds clones of these. A swap is seen by the next handshake; live connections, whose
//! handshakes are over, do not notice. Reading takes no lock.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::client::ResolvesClientCert;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::TrustAnchor;
use tokio::sync::watch;

use crate::credential::{Anchors, Credential};

/// The credential in use. Clones share it.
#[derive(Clone)]
pub struct LiveCredential {
    shared: Arc<SharedCredential>,
}

struct SharedCredential {
    current: ArcSwap<Credential>,
    swaps: watch::Sender<u64>,
}

impl LiveCredential {
    #[must_use]
    pub fn new(credential: Credential) -> Self {
        let shared =
            SharedCredential { current: ArcSwap::from_pointee(credential), swaps: watch::Sender::new(0) };
        Self { shared: Arc::new(shared) }
    }

    /// Uses `credential` from the next handshake on.
    pub fn swap(&self, credential: Credential) {
        self.shared.current.store(Arc::new(credential));
        self.shared.swaps.send_modify(|count| *count += 1);
    }

    #[must_use]
    pub fn current(&self) -> Arc<Credential> {
        self.shared.current.load_full()
    }

    /// Counts the swaps, for tasks that wait for the next one.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.shared.swaps.subscribe()
    }
}

impl fmt::Debug for LiveCredential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LiveCredential").field(&self.current()).finish()
    }
}

impl ResolvesServerCert for LiveCredential {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.shared.current.load().certified().clone())
    }
}

impl ResolvesClientCert for LiveCredential {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.shared.current.load().certified().clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// The anchors in use. Clones share them.
#[derive(Clone)]
pub struct LiveAnchors {
    shared: Arc<ArcSwap<Prepared>>,
}

/// Anchors, parsed once per swap and not once per handshake.
pub(crate) struct Prepared {
    anchors: Arc<Anchors>,
    pub(crate) trusted: Vec<TrustAnchor<'static>>,
}

impl Prepared {
    pub(crate) fn new(anchors: Anchors) -> Self {
        // `Anchors` takes no root that can't be parsed.
        let parse = |root| webpki::anchor_from_trusted_cert(root).map(|anchor| anchor.to_owned()).ok();
        let trusted = anchors.certificates().iter().filter_map(parse).collect();
        Self { anchors: Arc::new(anchors), trusted }
    }
}

impl LiveAnchors {
    #[must_use]
    pub fn new(anchors: Anchors) -> Self {
        Self { shared: Arc::new(ArcSwap::from_pointee(Prepared::new(anchors))) }
    }

    /// Trusts `anchors`, and only these, from the next handshake on.
    pub fn swap(&self, anchors: Anchors) {
        self.shared.store(Arc::new(Prepared::new(anchors)));
    }

    #[must_use]
    pub fn current(&self) -> Arc<Anchors> {
        self.shared.load().anchors.clone()
    }

    pub(crate) fn prepared(&self) -> arc_swap::Guard<Arc<Prepared>> {
        self.shared.load()
    }
}

impl fmt::Debug for LiveAnchors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LiveAnchors").field(&self.current().fingerprints()).finish()
    }
}
