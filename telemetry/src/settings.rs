//! What `--otlp-*` says: where the collector is, and what is sent to it.

use std::path::{Path, PathBuf};

use http::{HeaderMap, HeaderName, HeaderValue};
use mvm_pki::files::read_private;
use mvm_transport::PostError;

/// Headers of a file: a token and a tenant, and not a page.
const MAX_HEADERS: usize = 32;

#[derive(Debug, Clone)]
pub struct OtlpSettings {
    /// The collector's base URL; spans go to `/v1/traces` below it.
    pub endpoint: String,
    /// `NAME: VALUE` a line, such as a token; only its owner may read it.
    pub headers_file: Option<PathBuf>,
    /// The authority of the collector's certificate; https needs it.
    pub ca_file: Option<PathBuf>,
    /// Of the traces that no caller records already: 0 to 1.
    pub ratio: f64,
    /// Absent: the program's own.
    pub service_name: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum OtlpError {
    #[error("{0} (--otlp-ca)")]
    NoAuthority(PostError),
    #[error(transparent)]
    Post(PostError),
    #[error("could not read {}", .path.display())]
    Read {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
    /// Nothing of the file is repeated: it holds secrets.
    #[error("line {line} of {} must be NAME: VALUE, of at most {MAX_HEADERS} lines", .path.display())]
    Header { path: PathBuf, line: usize },
    #[error("the sampling ratio {0} must be from 0 to 1")]
    Ratio(f64),
}

impl OtlpSettings {
    /// The trace numbers that are recorded are those below this.
    pub(crate) fn sampled_below(&self) -> Result<u64, OtlpError> {
        if !(0.0..=1.0).contains(&self.ratio) {
            return Err(OtlpError::Ratio(self.ratio));
        }
        // A part of all numbers; 1 is all of them, and so is what rounding makes of it.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        Ok((self.ratio * u64::MAX as f64) as u64)
    }

    pub(crate) fn headers(&self) -> Result<HeaderMap, OtlpError> {
        self.headers_file.as_deref().map_or_else(|| Ok(HeaderMap::new()), headers)
    }
}

fn headers(path: &Path) -> Result<HeaderMap, OtlpError> {
    let bytes = read_private(path).map_err(|cause| OtlpError::Read { path: path.to_owned(), cause })?;
    let mut headers = HeaderMap::new();
    for (number, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"#") {
            continue;
        }
        let wrong = || OtlpError::Header { path: path.to_owned(), line: number + 1 };
        let colon = line.iter().position(|byte| *byte == b':').ok_or_else(wrong)?;
        let name = HeaderName::from_bytes(line[..colon].trim_ascii()).map_err(|_| wrong())?;
        let mut value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).map_err(|_| wrong())?;
        value.set_sensitive(true);
        if headers.len() >= MAX_HEADERS {
            return Err(wrong());
        }
        headers.append(name, value);
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn settings(dir: &Path, text: &str, mode: u32) -> OtlpSettings {
        let path = dir.join("headers");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let endpoint = "http://127.0.0.1:4318".to_owned();
        OtlpSettings { endpoint, headers_file: Some(path), ca_file: None, ratio: 1.0, service_name: None }
    }

    #[test]
    fn headers_are_read_line_by_line_and_a_wrong_one_is_named_by_its_number_alone() {
        let dir = tempfile::tempdir().unwrap();
        let read = |text: &str, mode| settings(dir.path(), text, mode).headers();
        let headers = read("# a token\nAuthorization: Bearer hunter2:3\n\nX-Tenant:a\n", 0o600).unwrap();
        assert_eq!(headers["authorization"], "Bearer hunter2:3");
        assert_eq!(headers["x-tenant"], "a");
        assert!(!format!("{headers:?}").contains("hunter2"));
        for (text, line) in [("hunter2", "line 1"), ("a: b\nhunter2 two: c", "line 2"), ("a: \0", "line 1")] {
            let error = read(text, 0o600).unwrap_err().to_string();
            assert!(error.contains(line) && !error.contains("hunter2"), "{error}");
        }
        assert!(matches!(read("a: b", 0o644), Err(OtlpError::Read { .. })), "others may read it");
        assert!(read(&"a: b\n".repeat(MAX_HEADERS + 1), 0o600).is_err());
    }

    #[test]
    fn a_ratio_is_a_part_of_all_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let below = |ratio| OtlpSettings { ratio, ..settings(dir.path(), "", 0o600) }.sampled_below().ok();
        assert_eq!([below(0.0), below(1.0)], [Some(0), Some(u64::MAX)]);
        assert!((1 << 62..=1 << 63).contains(&below(0.5).unwrap()));
        assert_eq!([below(-0.1), below(1.1), below(f64::NAN)], [None; 3]);
    }
}
