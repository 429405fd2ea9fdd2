//! Operators' credentials, made from the files alone: works beside a running coordinator and before the first start.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_pki::files::{create_private_dir, write_atomic};
use mvm_pki::{Anchors, Authority, Credential, Identity, LeafProfile, Role};
use mvm_proto::Timestamp;
use serde::Serialize;

use super::{InitError, issue_local, read_cluster_file};
use crate::offline_notes::note_issued;
use crate::paths::DataDir;
use crate::records::{IssuedOffline, IssuedRecord};
use crate::roots::issuing_root;

/// One command's worth, with room for a slow node.
const BY_HAND_LIFE: Duration = Duration::from_secs(15 * 60);

/// What an operator needs to reach the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OperatorFiles {
    pub identity: String,
    /// The directory of the rest, for `--operator-dir`.
    pub dir: PathBuf,
    /// The root certificates.
    pub ca: PathBuf,
    /// Key and chain; 0600.
    pub credential: PathBuf,
    /// A settings file for `mvm --config`, naming the two.
    pub config: PathBuf,
    pub not_after: Timestamp,
}

/// Where files are written now and where they will lie for good.
pub(super) struct Destination {
    pub(super) write_to: PathBuf,
    pub(super) lies_at: PathBuf,
}

/// Issues an operator's certificate into `out_dir`.
pub fn create_operator(
    data_dir: &Path,
    name: &str,
    out_dir: &Path,
    life: Duration,
    now: Timestamp,
) -> Result<OperatorFiles, InitError> {
    let out = std::path::absolute(out_dir).map_err(InitError::file("resolve", out_dir))?;
    let out = Destination { write_to: out.clone(), lies_at: out };
    issue(&DataDir::new(data_dir), name, &out, life, now)
}

/// A coordinator's credential for one push by hand: short-lived, and made from the files alone, so that it is there
/// however long the coordinator has been down.
pub fn coordinator_credential(data_dir: &Path, now: Timestamp) -> Result<Credential, InitError> {
    let data = DataDir::new(data_dir);
    let cluster = read_cluster_file(&data)?;
    let identity = Identity::new(cluster.cluster, Role::Coordinator, &cluster.name)
        .map_err(|cause| InitError::Name { name: cluster.name, reason: cause.to_string() })?;
    let authority = Authority::load(&data.issuing_ca_dir())
        .map_err(InitError::make("a certificate without the issuing authority"))?;
    let profile = LeafProfile { identity, dns: Vec::new(), ips: Vec::new(), life: BY_HAND_LIFE };
    issue_local(&authority, &profile, now).map_err(InitError::make("the coordinator's certificate"))
}

pub(super) fn issue(
    data: &DataDir,
    name: &str,
    out: &Destination,
    life: Duration,
    now: Timestamp,
) -> Result<OperatorFiles, InitError> {
    let cluster = read_cluster_file(data)?.cluster;
    let identity = Identity::new(cluster, Role::Operator, name)
        .map_err(|cause| InitError::Name { name: name.to_owned(), reason: cause.to_string() })?;
    let authority = Authority::load(&data.issuing_ca_dir())
        .map_err(InitError::make("a certificate without the issuing authority"))?;
    let anchors = Anchors::load(&data.root_ca_cert())
        .map_err(InitError::make("a certificate without the root certificates"))?;
    let profile = LeafProfile { identity: identity.clone(), dns: Vec::new(), ips: Vec::new(), life };
    let credential =
        issue_local(&authority, &profile, now).map_err(InitError::make("the operator's certificate"))?;

    let dir = &out.write_to;
    create_private_dir(dir).map_err(InitError::file("make", dir))?;
    anchors.save(&dir.join("ca.crt")).map_err(InitError::file("write", dir))?;
    // Before the credential is of use to anybody: the coordinator knows each one that it did not issue itself.
    let note = IssuedOffline {
        name: name.to_owned(),
        certificate: IssuedRecord {
            serial: credential.serial_hex().to_owned(),
            fingerprint: credential.fingerprint(),
            issued_at: now,
            not_after: credential.not_after(),
            root: issuing_root(data, &authority, &anchors, now)?,
        },
    };
    let notes = data.operator_notes();
    note_issued(&notes, &note).map_err(InitError::file("write a note to", &notes))?;
    credential.save(&dir.join("operator.pem")).map_err(InitError::file("write", dir))?;
    let config = config_text(&out.lies_at);
    write_atomic(dir.join("config"), config.as_bytes(), 0o600).map_err(InitError::file("write", dir))?;

    Ok(OperatorFiles {
        identity: identity.to_string(),
        dir: out.lies_at.clone(),
        ca: out.lies_at.join("ca.crt"),
        credential: out.lies_at.join("operator.pem"),
        config: out.lies_at.join("config"),
        not_after: credential.not_after(),
    })
}

/// A settings file for this operator; edit the address when the coordinator is elsewhere.
fn config_text(dir: &Path) -> String {
    let dir = dir.display().to_string().replace('\\', "\\\\").replace('"', "\\\"");
    format!("coordinator = \"https://localhost:{}\"\noperator-dir = \"{dir}\"\n", crate::DEFAULT_PORT)
}
