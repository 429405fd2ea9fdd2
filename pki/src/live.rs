//! Credentials and anchors that change under running endpoints.

use std::sync::Arc;

use rustls::client::ResolvesClientCert;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::sync::watch;

use crate::credential::{Anchors, Credential};

/// The credential in use. Clones share it: a swap is seen by every new handshake, and by no live connection.
#[derive(Debug, Clone)]
pub struct LiveCredential {}

impl LiveCredential {
    #[must_use]
    pub fn new(credential: Credential) -> Self {
        let _ = credential;
        todo!()
    }

    pub fn swap(&self, credential: Credential) {
        let _ = credential;
        todo!()
    }

    #[must_use]
    pub fn current(&self) -> Arc<Credential> {
        todo!()
    }

    /// Counts the swaps.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<u64> {
        todo!()
    }
}

impl ResolvesServerCert for LiveCredential {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        todo!()
    }
}

impl ResolvesClientCert for LiveCredential {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        todo!()
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// The anchors in use. Clones share them.
#[derive(Debug, Clone)]
pub struct LiveAnchors {}

impl LiveAnchors {
    #[must_use]
    pub fn new(anchors: Anchors) -> Self {
        let _ = anchors;
        todo!()
    }

    pub fn swap(&self, anchors: Anchors) {
        let _ = anchors;
        todo!()
    }

    #[must_use]
    pub fn current(&self) -> Arc<Anchors> {
        todo!()
    }
}
