//! Why an image is not there: what was attempted, on what, and a reason for programs.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_proto::Digest;
use mvm_proto::document::SourceError;

#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("there is no image {0} on this node")]
    Missing(Digest),
    #[error("no image key vouches for image {0}")]
    NotVouched(Digest),
    #[error("{reference} is asked for without image_digest, which is needed outside a development cluster")]
    NoDigest { reference: String },
    #[error(
        "image {digest} is not on this node, and no image key vouches for {reference} as its source, so it is not built: \
         build or import it here with `mvm image`, or vouch for the source with `mvm trust vouch --source`"
    )]
    SourceNotVouched { reference: String, digest: Digest },
    #[error("image {digest} is damaged: {fault}; remove it with `mvm image remove` and build it again")]
    Damaged { digest: Digest, fault: String },
    #[error("{reference} is image {found}, and {expected} was asked for")]
    DigestMismatch { reference: String, expected: Digest, found: Digest },
    #[error("{reference}: {fault}")]
    Reference { reference: String, fault: String },
    #[error("{reference}: the reference {rule}")]
    NoSource { reference: String, rule: SourceError },
    #[error("{}: {fault}", path.display())]
    Invalid { path: PathBuf, fault: String },
    #[error("could not {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error(
        "no guest program to put into the image: build it with scripts/build-guest, or name it with --guest or MVM_AGENT_GUEST"
    )]
    NoGuest,
    #[error("{program} is not installed: {advice}")]
    ProgramMissing { program: String, advice: &'static str },
    #[error("could not start {program}")]
    Start {
        program: String,
        #[source]
        cause: io::Error,
    },
    #[error("{program} failed ({status}){output}")]
    Failed { program: String, status: String, output: String },
    #[error("{program} did not end within {limit:?}{output}")]
    TooSlow { program: String, limit: Duration, output: String },
    #[error("could not get the package {package}: {advice}")]
    Package {
        package: String,
        advice: &'static str,
        #[source]
        cause: Box<ImageError>,
    },
    #[error("the build was cancelled")]
    Cancelled,
    #[error("image {digest} is in use by {by}")]
    InUse { digest: Digest, by: String },
    #[error("another program is writing to the image store")]
    Busy,
}

impl ImageError {
    /// A reason in CamelCase, for conditions.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Missing(_) => "ImageMissing",
            Self::NotVouched(_) | Self::NoDigest { .. } => "NotVouched",
            Self::SourceNotVouched { .. } => "SourceNotVouched",
            Self::Damaged { .. } => "ImageDamaged",
            Self::DigestMismatch { .. } => "DigestMismatch",
            Self::NoSource { rule: SourceError::ContainerImage, .. } => "NotSupported",
            Self::Reference { .. } | Self::NoSource { .. } => "InvalidReference",
            Self::Invalid { .. } => "InvalidImage",
            Self::NoGuest => "GuestMissing",
            Self::ProgramMissing { program, .. } if program == "nix" => "NixMissing",
            Self::ProgramMissing { .. } => "ProgramMissing",
            Self::Package { cause, .. } if cause.reason() == "ProgramMissing" => "ProgramMissing",
            Self::Package { .. } => "PackageMissing",
            Self::Io { cause, .. } if out_of_space(cause) => "DiskFull",
            Self::Io { .. } => "StoreFailed",
            Self::Start { .. } | Self::Failed { .. } | Self::TooSlow { .. } => "BuildFailed",
            Self::Cancelled => "Cancelled",
            Self::InUse { .. } => "InUse",
            Self::Busy => "StoreBusy",
        }
    }

    pub(super) fn invalid(path: &Path, fault: impl Into<String>) -> Self {
        Self::Invalid { path: path.to_owned(), fault: fault.into() }
    }
}

fn out_of_space(cause: &io::Error) -> bool {
    matches!(cause.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Names what was attempted on which file.
pub(super) trait OnPath<T> {
    fn on(self, action: &'static str, path: &Path) -> Result<T, ImageError>;
}

impl<T> OnPath<T> for io::Result<T> {
    fn on(self, action: &'static str, path: &Path) -> Result<T, ImageError> {
        self.map_err(|cause| ImageError::Io { action, path: path.to_owned(), cause })
    }
}

impl<T> OnPath<T> for rustix::io::Result<T> {
    fn on(self, action: &'static str, path: &Path) -> Result<T, ImageError> {
        self.map_err(io::Error::from).on(action, path)
    }
}
