//! Posts bodies over HTTP/1.1 or HTTPS to one URL of an operator's: a program that is told the demand, a collector of traces.
//!
//! Each post has a connection of its own and a deadline for all of it. Of an answer the status is looked at, and so much of
//! its body as the caller asks for.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// For all of it: the connection, the request, the answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub enum PostError {
    #[error("{url} must be http://HOST:PORT/PATH or https://HOST:PORT/PATH")]
    Url { url: String },
    #[error("the URL to post to has a user or a password in it, which would be in a header and in logs")]
    Credentials,
    #[error("https needs the certificate of an authority: there is no list of public ones here")]
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
    #[error("there was no answer within {} s", ANSWER_WITHIN.as_secs())]
    Silent,
}

/// What came back.
#[derive(Debug)]
pub struct Posted {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// Empty where it is longer than was asked for.
    pub body: Bytes,
}

/// Where to post.
pub struct Poster {
    uri: Uri,
    host: String,
    port: u16,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

impl Poster {
    /// `ca_file`: the authority of the certificate, which https needs.
    pub fn new(url: &str, ca_file: Option<&Path>) -> Result<Self, PostError> {
        let wrong = || PostError::Url { url: url.to_owned() };
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(PostError::Credentials);
        }
        let host = uri.host().ok_or_else(wrong)?.to_owned();
        let (port, is_tls) = match uri.scheme_str() {
            Some("http") => (80, false),
            Some("https") => (443, true),
            _ => return Err(wrong()),
        };
        let port = uri.port_u16().unwrap_or(port);
        let tls = match (is_tls, ca_file) {
            (false, _) => None,
            (true, None) => return Err(PostError::NoAuthority),
            (true, Some(file)) => {
                let name = ServerName::try_from(bare(&host).to_owned()).map_err(|_| wrong())?;
                Some((TlsConnector::from(Arc::new(trusting(file)?)), name))
            }
        };
        Ok(Self { uri, host, port, tls })
    }

    /// Posts a body with these headers, below the URL's own path, and reads at most `answer_bytes` of the answer.
    pub async fn post(
        &self,
        below: &str,
        headers: &HeaderMap,
        body: Vec<u8>,
        answer_bytes: usize,
    ) -> Result<Posted, PostError> {
        let exchange = Box::pin(self.exchange(below, headers, body, answer_bytes));
        tokio::time::timeout(ANSWER_WITHIN, exchange).await.map_err(|_| PostError::Silent)?
    }

    async fn exchange(
        &self,
        below: &str,
        headers: &HeaderMap,
        body: Vec<u8>,
        answer_bytes: usize,
    ) -> Result<Posted, PostError> {
        let reach = |cause: BoxError| PostError::Reach { host: self.host.clone(), cause };
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        let path = match below {
            "" => path.to_owned(),
            below => format!("{}{below}", path.trim_end_matches('/')),
        };
        let authority = self.uri.authority().map_or(self.host.as_str(), |authority| authority.as_str());
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(path)
            .body(Full::new(Bytes::from(body)))
            .map_err(|cause| reach(cause.into()))?;
        request.headers_mut().extend(headers.clone());
        let authority = HeaderValue::from_str(authority).map_err(|cause| reach(cause.into()))?;
        request.headers_mut().insert(header::HOST, authority);
        let tcp =
            TcpStream::connect((bare(&self.host), self.port)).await.map_err(|cause| reach(cause.into()))?;
        let posted = match &self.tls {
            None => send(tcp, request, answer_bytes).await,
            Some((tls, name)) => match tls.connect(name.clone(), tcp).await {
                Ok(stream) => send(stream, request, answer_bytes).await,
                Err(cause) => Err(cause.into()),
            },
        };
        posted.map_err(reach)
    }
}

/// A host without the brackets that a URL puts around IPv6 addresses.
fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Sends the request and takes its answer. The connection ends with that.
async fn send<S>(stream: S, request: Request<Full<Bytes>>, answer_bytes: usize) -> Result<Posted, BoxError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let answer = async {
        let (head, body) = sender.send_request(request).await?.into_parts();
        let body = match answer_bytes {
            0 => Bytes::new(),
            most => Limited::new(body, most).collect().await.map(|body| body.to_bytes()).unwrap_or_default(),
        };
        Ok(Posted { status: head.status, headers: head.headers, body })
    };
    tokio::pin!(answer, connection);
    tokio::select! {
        answer = &mut answer => answer,
        ended = &mut connection => {
            ended?;
            // What it still delivered before it ended.
            answer.await
        }
    }
}

fn trusting(file: &Path) -> Result<ClientConfig, PostError> {
    let read = |cause: BoxError| PostError::Read { path: file.to_owned(), cause };
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

impl std::fmt::Debug for Poster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Poster").field("uri", &self.uri).finish_non_exhaustive()
    }
}
