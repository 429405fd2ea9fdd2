//! Posts signed JSON to one URL.
//!
//! ```text
//! X-Mvm-Signature: t=1760000000,v1=<HMAC-SHA256 with the key over "1760000000." and the body, in hexadecimal>
//! ```
//! The receiver compares the signature before it reads the body, and refuses times that are minutes off, so that nothing that
//! was recorded is of use later. An answer is its status alone; nothing of its body is read.

use std::path::PathBuf;

use http::{HeaderMap, HeaderValue, StatusCode, header};
use mvm_pki::mac::Mac;
use mvm_transport::{PostError, Poster};

use crate::error::BoxError;
use crate::settings::WebhookSettings;

const SIGNATURE: &str = "x-mvm-signature";

#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    #[error("could not read {}", .path.display())]
    Key {
        path: PathBuf,
        #[source]
        cause: BoxError,
    },
    #[error("{0} (--demand-webhook-ca)")]
    NoAuthority(PostError),
    #[error(transparent)]
    Post(PostError),
    #[error("the answer was {0}")]
    Answer(StatusCode),
}

/// Where to post, and with which key to sign.
#[derive(Debug)]
pub(crate) struct Hook {
    poster: Poster,
    mac: Mac,
}

impl Hook {
    pub(crate) fn new(settings: &WebhookSettings) -> Result<Self, HookError> {
        let poster = Poster::new(&settings.url, settings.ca_file.as_deref());
        let poster = poster.map_err(|error| match error {
            error @ PostError::NoAuthority => HookError::NoAuthority(error),
            error => HookError::Post(error),
        })?;
        let key = mvm_pki::files::read_private(&settings.key_file)
            .map_err(|cause| HookError::Key { path: settings.key_file.clone(), cause: cause.into() })?;
        Ok(Self { poster, mac: Mac::new(key.trim_ascii()) })
    }

    /// Posts a body that is of this time.
    pub(crate) async fn post(&self, at: i64, body: Vec<u8>) -> Result<(), HookError> {
        let signed = self.mac.hex(&[at.to_string().as_bytes(), b".", &body]);
        let signature = format!("t={at},v1={signed}");
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        // Digits and letters always make a value.
        if let Ok(signature) = HeaderValue::from_str(&signature) {
            headers.insert(SIGNATURE, signature);
        }
        match self.poster.post("", &headers, body, 0).await.map_err(HookError::Post)?.status {
            status if status.is_success() => Ok(()),
            status => Err(HookError::Answer(status)),
        }
    }
}
