//! Replacing the root certificate and the issuing authority, from the files alone.
//!
//! Three steps with time between them, so that no one is ever shown a certificate that they can't check: [`add_root`]
//! makes everybody trust the new root beside the old; [`switch_issuing`] issues under it; [`retire_root`] ends trust in
//! the old. Agents take the list of roots with every renewal, so one life of a certificate between two steps is enough. A
//! running coordinator reads the files when it starts again.
//!
//! Agents and operators trust a new root only if one that they trust endorses it ([`mvm_pki::endorsement`]), so
//! [`add_root`] needs the key of a present root beside the new one's.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_pki::endorsement::{self, Endorsements};
use mvm_pki::files::create_private_dir;
use mvm_pki::tls::verify_issued;
use mvm_pki::{Anchors, Authority, Identity, LeafProfile, Role, RootAuthority};
use mvm_proto::{Digest, Timestamp};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use serde::Serialize;

use crate::init::{InitError, issue_local, read_cluster_file};
use crate::paths::DataDir;

/// One root that the cluster trusts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TrustedRoot {
    pub fingerprint: Digest,
    /// The present issuing authority was signed by it.
    pub issuing: bool,
}

/// The roots that the cluster trusts now, the one that tokens pin first.
pub fn trusted_roots(data_dir: &Path, now: Timestamp) -> Result<Vec<TrustedRoot>, InitError> {
    let data = DataDir::new(data_dir);
    let anchors = load_anchors(&data)?;
    let issuing = Authority::load(&data.issuing_ca_dir()).map_err(InitError::make("the list of roots"))?;
    let issuing = issuing_root(&data, &issuing, &anchors, now)?;
    let of = |fingerprint| TrustedRoot { fingerprint, issuing: issuing == Some(fingerprint) };
    Ok(anchors.fingerprints().into_iter().map(of).collect())
}

/// The one of these roots that certificates of `issuing` lead to.
pub(crate) fn issuing_root(
    data: &DataDir,
    issuing: &Authority,
    anchors: &Anchors,
    now: Timestamp,
) -> Result<Option<Digest>, InitError> {
    for root in anchors.certificates() {
        let alone = Anchors::new(vec![root.clone()]).map_err(InitError::make("the list of roots"))?;
        if issues_under(data, issuing, &alone, now)? {
            return Ok(alone.fingerprints().first().copied());
        }
    }
    Ok(None)
}

/// Makes a new root in `key_dir` and trusts it beside those there are. The root whose key is in `signed_by` (absent: in
/// the data directory) endorses it, and it endorses that one. A root in `key_dir` that is trusted already is endorsed
/// again.
pub fn add_root(
    data_dir: &Path,
    key_dir: &Path,
    signed_by: Option<&Path>,
    now: Timestamp,
) -> Result<Digest, InitError> {
    let data = DataDir::new(data_dir);
    let cluster = read_cluster_file(&data)?.cluster;
    let mut anchors = load_anchors(&data)?;
    let present_dir = signed_by.map_or_else(|| data.root_ca_dir(), Path::to_owned);
    let present = RootAuthority::load(&present_dir)
        .map_err(InitError::make("a root that the others trust, without the key of one of them"))?;
    if !anchors.contains(&present.fingerprint()) {
        return Err(InitError::UntrustedRoot { fingerprint: present.fingerprint() });
    }
    let root = if key_dir.join("ca.key").exists() {
        let root = RootAuthority::load(key_dir).map_err(InitError::make("the root authority"))?;
        if !anchors.contains(&root.fingerprint()) || root.fingerprint() == present.fingerprint() {
            return Err(InitError::Exists { path: key_dir.to_owned() });
        }
        root
    } else {
        let root = RootAuthority::create(&cluster, now).map_err(InitError::make("the root authority"))?;
        create_private_dir(key_dir).map_err(InitError::file("make", key_dir))?;
        root.save(key_dir).map_err(InitError::make("the root authority's files"))?;
        root
    };
    endorse(&data, &present, &root, now)?;
    anchors.add(root.certificate().clone()).map_err(InitError::make("the list of roots"))?;
    save_anchors(&data, &anchors)?;
    Ok(root.fingerprint())
}

/// Each of the two endorses the other: nodes that trust the present root take the new one, and a node that joins by
/// the new one takes the present one for as long as it is listed.
fn endorse(
    data: &DataDir,
    present: &RootAuthority,
    new: &RootAuthority,
    now: Timestamp,
) -> Result<(), InitError> {
    let path = data.endorsements();
    let mut endorsements = Endorsements::load(&path).map_err(InitError::make("an endorsement"))?;
    for (by, of) in [(present, new), (new, present)] {
        let endorsement = by.endorse(of.certificate(), now).map_err(InitError::make("an endorsement"))?;
        endorsements.add(endorsement);
    }
    endorsements.save(&path).map_err(InitError::file("write", &path))
}

/// Makes a new issuing authority under the root in `root_dir`, which must be trusted already. New tokens pin that root.
pub fn switch_issuing(data_dir: &Path, root_dir: &Path, now: Timestamp) -> Result<Digest, InitError> {
    let data = DataDir::new(data_dir);
    let anchors = load_anchors(&data)?;
    let root = RootAuthority::load(root_dir)
        .map_err(InitError::make("an issuing authority without its root's key"))?;
    let fingerprint = root.fingerprint();
    if !anchors.contains(&fingerprint) {
        return Err(InitError::UntrustedRoot { fingerprint });
    }
    check_endorsed(&data, &anchors, &root, now)?;
    let next = data.issuing_ca_dir().with_extension("next");
    create_private_dir(&next).map_err(InitError::file("make", &next))?;
    let issuing = root.create_issuing(now).map_err(InitError::make("the issuing authority"))?;
    issuing.save(&next).map_err(InitError::make("the issuing authority's files"))?;
    exchange(&next, &data.issuing_ca_dir())?;
    std::fs::remove_dir_all(&next).map_err(InitError::file("remove", &next))?;

    let (own, others): (Vec<_>, Vec<_>) =
        anchors.certificates().iter().cloned().partition(|root_der| root_der == root.certificate());
    let first = Anchors::new(own.into_iter().chain(others).collect())
        .map_err(InitError::make("the list of roots"))?;
    save_anchors(&data, &first)?;
    Ok(fingerprint)
}

/// Nodes that trust the other roots alone must come to trust this one before anything is issued under it.
fn check_endorsed(
    data: &DataDir,
    anchors: &Anchors,
    root: &RootAuthority,
    now: Timestamp,
) -> Result<(), InitError> {
    let mut others = anchors.clone();
    if others.retire(&root.fingerprint()).is_err() {
        // It is the only one.
        return Ok(());
    }
    let endorsements =
        Endorsements::load(&data.endorsements()).map_err(InitError::make("an issuing authority"))?;
    match endorsement::follow(&others, &root.anchors(), &endorsements, now) {
        Ok(_) => Ok(()),
        Err(_) => Err(InitError::UnendorsedRoot { fingerprint: root.fingerprint() }),
    }
}

/// Trusts a root no longer. The one that the present issuing authority stands on can't go.
pub fn retire_root(data_dir: &Path, fingerprint: &Digest, now: Timestamp) -> Result<(), InitError> {
    let data = DataDir::new(data_dir);
    let mut anchors = load_anchors(&data)?;
    anchors.retire(fingerprint).map_err(InitError::make("a shorter list of roots"))?;
    let issuing =
        Authority::load(&data.issuing_ca_dir()).map_err(InitError::make("a shorter list of roots"))?;
    if !issues_under(&data, &issuing, &anchors, now)? {
        return Err(InitError::RootInUse { fingerprint: *fingerprint });
    }
    save_anchors(&data, &anchors)
}

/// Whether what `issuing` issues now can be checked with `anchors`: tested with a certificate that is thrown away.
fn issues_under(
    data: &DataDir,
    issuing: &Authority,
    anchors: &Anchors,
    now: Timestamp,
) -> Result<bool, InitError> {
    let cluster = read_cluster_file(data)?.cluster;
    let identity = Identity::new(cluster, Role::Operator, "probe")
        .map_err(|cause| InitError::Name { name: "probe".to_owned(), reason: cause.to_string() })?;
    let profile = LeafProfile { identity, dns: Vec::new(), ips: Vec::new(), life: Duration::from_secs(60) };
    let credential = issue_local(issuing, &profile, now).map_err(InitError::make("a certificate to try"))?;
    Ok(verify_issued(anchors, &credential).is_ok())
}

fn load_anchors(data: &DataDir) -> Result<Anchors, InitError> {
    Anchors::load(&data.root_ca_cert()).map_err(InitError::make("a list of roots without the present one"))
}

/// The cluster's list, and the first operator's copy of it.
fn save_anchors(data: &DataDir, anchors: &Anchors) -> Result<(), InitError> {
    let copies = [data.root_ca_cert(), data.operator_dir().join("ca.crt")];
    for path in copies.iter().filter(|path| path.parent().is_some_and(Path::exists)) {
        anchors.save(path).map_err(InitError::file("write", path))?;
    }
    Ok(())
}

/// Swaps two directories in one step: a crash leaves one authority or the other, never half of each.
fn exchange(a: &PathBuf, b: &PathBuf) -> Result<(), InitError> {
    renameat2(AT_FDCWD, a, AT_FDCWD, b, RenameFlags::RENAME_EXCHANGE).map_err(|errno| InitError::File {
        action: "exchange",
        path: b.clone(),
        cause: errno.into(),
    })
}
