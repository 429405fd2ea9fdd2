//! Why a coordinator could not start or had to stop.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Why `serve` ended other than by being asked to.
#[derive(Debug, thiserror::Error)]
pub enum CoordinatorError {
    #[error("{} holds no cluster; make one with `mvm coordinator init --data-dir {}`", path.display(), path.display())]
    NotInitialised { path: PathBuf },
    #[error("could not read {what} from {}", path.display())]
    Load {
        what: &'static str,
        path: PathBuf,
        #[source]
        cause: BoxError,
    },
    #[error("could not open the store in {}", path.display())]
    Store {
        path: PathBuf,
        #[source]
        cause: BoxError,
    },
    #[error("could not bind {what} on {address}")]
    Bind {
        what: &'static str,
        address: SocketAddr,
        #[source]
        cause: BoxError,
    },
    #[error("could not set up TLS")]
    Tls(#[source] BoxError),
    #[error("{0}")]
    Settings(String),
    #[error("the {what} ended unexpectedly")]
    Stopped {
        what: &'static str,
        #[source]
        cause: BoxError,
    },
}

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
