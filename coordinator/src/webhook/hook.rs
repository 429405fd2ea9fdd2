//! Posts signed JSON to one URL.
//!
//! ```text
//! X-Mvm-Signature: t=1760000000,v1=<HMAC-SHA256 with the key over "1760000000." and the body, in hexadecimal>
//! ```
//! The receiver compares the signature before it reads the body, and refuses times that are minutes off, so that nothing that
//! was recorded is of use later. An answer is its status alone; nothing of its body is read.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, Uri, header};
use http_body_util::Full;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use mvm_pki::mac::Mac;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::error::BoxError;
use crate::settings::WebhookSettings;

/// For all of it: the connection, the request, the answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
const SIGNATURE: &str = "x-mvm-signature";

#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    #[error("{url} must be http://HOST:PORT/PATH or https://HOST:PORT/PATH")]
    Url { url: String },
    #[error(
        "https needs the certificate of an authority (--demand-webhook-ca): there is no list of public ones here"
    )]
    NoAuthority,
    #[error("could not read {}", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        cause: BoxError,
    },
    #[error("could not reach {host}")]
    Reach {
        host: String,
        #[source]
        cause: BoxError,
    },
    #[error("the answer was {0}")]
    Answer(StatusCode),
    #[error("there was no answer within {} s", ANSWER_WITHIN.as_secs())]
    Silent,
}

/// Where to post, and with which key to sign.
pub(crate) struct Hook {
    uri: Uri,
    host: String,
    port: u16,
    mac: Mac,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl Hook {
    pub(crate) fn new(settings: &WebhookSettings) -> Result<Self, HookError> {
        let url = || HookError::Url { url: settings.url.clone() };
        let uri: Uri = settings.url.parse().map_err(|_| url())?;
        let host = uri.host().ok_or_else(url)?.to_owned();
        let (port, is_tls) = match uri.scheme_str() {
            Some("http") => (80, false),
            Some("https") => (443, true),
            _ => return Err(url()),
        };
        let port = uri.port_u16().unwrap_or(port);
        let key = mvm_pki::files::read_private(&settings.key_file)
            .map_err(|cause| HookError::Read { path: settings.key_file.clone(), cause: cause.into() })?;
        let mac = Mac::new(key.trim_ascii());
        let tls = match (is_tls, &settings.ca_file) {
            (false, _) => None,
            (true, None) => return Err(HookError::NoAuthority),
            (true, Some(file)) => {
                let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
                let name = ServerName::try_from(bare).map_err(|_| url())?;
                Some((TlsConnector::from(Arc::new(trusting(file)?)), name))
            }
        };
        Ok(Self { uri, host, port, mac, tls })
    }

    /// Posts a body that is of this time.
    pub(crate) async fn post(&self, at: i64, body: Vec<u8>) -> Result<(), HookError> {
        let posted = tokio::time::timeout(ANSWER_WITHIN, self.exchange(at, body)).await;
        match posted.map_err(|_| HookError::Silent)?? {
            status if status.is_success() => Ok(()),
            status => Err(HookError::Answer(status)),
        }
    }

    async fn exchange(&self, at: i64, body: Vec<u8>) -> Result<StatusCode, HookError> {
        let reach = |cause: BoxError| HookError::Reach { host: self.host.clone(), cause };
        let signed = self.mac.hex(&[at.to_string().as_bytes(), b".", &body]);
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        let authority = self.uri.authority().map_or(self.host.as_str(), |authority| authority.as_str());
        let request = Request::builder()
            .method(Method::POST)
            .uri(path)
            .header(header::HOST, authority)
            .header(header::CONTENT_TYPE, "application/json")
            .header(SIGNATURE, format!("t={at},v1={signed}"))
            .body(Full::new(Bytes::from(body)))
            .map_err(|cause| reach(cause.into()))?;
        let bare = self.host.trim_start_matches('[').trim_end_matches(']');
        let tcp = TcpStream::connect((bare, self.port)).await.map_err(|cause| reach(cause.into()))?;
        let status = match &self.tls {
            None => send(tcp, request).await,
            Some((tls, name)) => match tls.connect(name.clone(), tcp).await {
                Ok(stream) => send(stream, request).await,
                Err(cause) => Err(cause.into()),
            },
        };
        status.map_err(reach)
    }
}

/// Sends the request and takes the status of its answer. The connection ends with that.
async fn send<S>(stream: S, request: Request<Full<Bytes>>) -> Result<StatusCode, BoxError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let answer = sender.send_request(request);
    tokio::pin!(answer, connection);
    tokio::select! {
        answer = &mut answer => Ok(answer?.status()),
        ended = &mut connection => {
            ended?;
            // What it still delivered before it ended.
            Ok(answer.await?.status())
        }
    }
}

fn trusting(file: &Path) -> Result<ClientConfig, HookError> {
    let read = |cause: BoxError| HookError::Read { path: file.to_owned(), cause };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(file).map_err(|cause| read(cause.into()))? {
        let certificate = certificate.map_err(|cause| read(cause.into()))?;
        roots.add(certificate).map_err(|cause| read(cause.into()))?;
    }
    let builder = ClientConfig::builder_with_provider(mvm_pki::tls::provider())
        .with_safe_default_protocol_versions()
        .map_err(|cause| read(cause.into()))?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hook").field("uri", &self.uri).finish_non_exhaustive()
    }
}
