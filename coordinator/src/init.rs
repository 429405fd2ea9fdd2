//! Makes a cluster: authorities, signing keys, the first trust root, the coordinator's and the first operator's
//! credentials.
//!
//! Everything is written to a directory beside the target which is then renamed, so that a cluster is there whole or
//! not at all, and an existing one is never touched. Runs once, offline, without a coordinator.

mod operator;
mod report;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use mvm_pki::files::{create_private_dir, write_atomic};
use mvm_pki::trust::{PIN_FILE, ROOT_METADATA_LIFE, RoleSpec, RootSpec};
use mvm_pki::{
    Authority, Credential, CsrNames, Identity, ImagesMetadata, LeafKey, LeafProfile, Role, RootAuthority,
    RootMetadata, SigningKey, TrustStore,
};
use mvm_proto::{ClusterId, Digest, Timestamp};
use operator::Destination;
use serde::{Deserialize, Serialize};

use crate::error::BoxError;
use crate::paths::DataDir;
use crate::secrets::SecretKeys;
use crate::settings::OPERATOR_LIFE;
pub use operator::{OperatorFiles, coordinator_credential, create_operator};
pub use report::{InitReport, OfflineKey};

/// The format of `cluster.json`.
const CLUSTER_FORMAT: u32 = 1;

/// The name of the first operator.
const FIRST_OPERATOR: &str = "admin";

#[derive(Debug, Clone)]
pub struct InitSettings {
    pub data_dir: PathBuf,
    pub cluster: ClusterId,
    /// The coordinator's own name, in its identity.
    pub name: String,
    /// A dev cluster: the coordinator holds every signing key and image digests are not required.
    pub dev: bool,
    /// Names of the coordinator's certificate besides localhost, the loopback addresses and the host's name.
    pub dns: Vec<String>,
    pub ips: Vec<IpAddr>,
    /// Where the keys that belong offline go at once; `None`: into the data directory, to be taken away later.
    pub root_key_dir: Option<PathBuf>,
}

impl InitSettings {
    #[must_use]
    pub fn new(data_dir: impl Into<PathBuf>, cluster: ClusterId) -> Self {
        Self {
            data_dir: data_dir.into(),
            cluster,
            name: "coordinator".to_owned(),
            dev: false,
            dns: Vec::new(),
            ips: Vec::new(),
            root_key_dir: None,
        }
    }
}

/// `cluster.json`: what a data directory is. Holds no secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterFile {
    pub format: u32,
    pub cluster: ClusterId,
    pub name: String,
    pub dev: bool,
    pub created_at: Timestamp,
    pub dns: Vec<String>,
    pub ips: Vec<IpAddr>,
}

#[derive(Debug, thiserror::Error)]
pub enum InitError {
    #[error("{} already holds a cluster; choose another directory", path.display())]
    Exists { path: PathBuf },
    #[error("{} is not empty and holds no cluster; choose an empty directory", path.display())]
    NotEmpty { path: PathBuf },
    #[error("{} holds no cluster; make one with `mvm coordinator init`", path.display())]
    NotInitialised { path: PathBuf },
    #[error("{name:?} is not a valid name: {reason}")]
    Name { name: String, reason: String },
    #[error(
        "the root {fingerprint} is not trusted yet; add it first and let every node renew its certificate"
    )]
    UntrustedRoot { fingerprint: Digest },
    #[error(
        "no other trusted root endorses {fingerprint}, so nodes would not believe it; run `mvm coordinator root add` \
         with its folder and, by --signed-by, the folder of a root that they trust"
    )]
    UnendorsedRoot { fingerprint: Digest },
    #[error("the root {fingerprint} is in use by the issuing authority; switch to another root first")]
    RootInUse { fingerprint: Digest },
    #[error("could not {action} {}", path.display())]
    File {
        action: &'static str,
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("could not make {what}")]
    Make {
        what: &'static str,
        #[source]
        cause: BoxError,
    },
}

impl InitError {
    pub(crate) fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |cause| Self::File { action, path: path.to_owned(), cause }
    }

    pub(crate) fn make<E: Into<BoxError>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |cause| Self::Make { what, cause: cause.into() }
    }
}

/// Makes the cluster, or says why not. An existing cluster is always refused.
pub fn init(settings: &InitSettings, now: Timestamp) -> Result<InitReport, InitError> {
    let identity = Identity::new(settings.cluster.clone(), Role::Coordinator, &settings.name)
        .map_err(|cause| InitError::Name { name: settings.name.clone(), reason: cause.to_string() })?;
    let target =
        std::path::absolute(&settings.data_dir).map_err(InitError::file("resolve", &settings.data_dir))?;
    refuse_existing(&target)?;

    let staging = staging_beside(&target)?;
    let data = DataDir::new(&target);
    let built = build(&DataDir::new(&staging), &data, settings, &identity, now)
        .and_then(|built| move_into_place(&staging, &target).map(|()| built));
    match built {
        Ok(built) => Ok(report::report(settings, &data, &identity, built)),
        Err(error) => {
            let _ = std::fs::remove_dir_all(&staging);
            Err(error)
        }
    }
}

fn refuse_existing(target: &Path) -> Result<(), InitError> {
    if DataDir::new(target).cluster_file().exists() {
        return Err(InitError::Exists { path: target.to_owned() });
    }
    match std::fs::read_dir(target).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => Err(InitError::NotEmpty { path: target.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(cause) => Err(InitError::File { action: "read", path: target.to_owned(), cause }),
    }
}

/// A new directory on the same file system, so that the final rename is one atomic step.
fn staging_beside(target: &Path) -> Result<PathBuf, InitError> {
    let parent = target.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(parent).map_err(InitError::file("make", parent))?;
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let staging = parent.join(format!(".{name}.init-{}-{:08x}", std::process::id(), fastrand::u32(..)));
    create_private_dir(&staging).map_err(InitError::file("make", &staging))?;
    Ok(staging)
}

/// What the report needs besides the paths that never vary.
struct Built {
    root_fingerprint: Digest,
    trust_digest: Digest,
    offline: Vec<OfflineKey>,
    offline_pin: PathBuf,
    operator: OperatorFiles,
}

/// Fills `data`, which will be renamed to `place`.
fn build(
    data: &DataDir,
    place: &DataDir,
    settings: &InitSettings,
    identity: &Identity,
    now: Timestamp,
) -> Result<Built, InitError> {
    for dir in [data.root_ca_dir(), data.issuing_ca_dir(), data.signing_dir(), data.store_dir()] {
        create_private_dir(&dir).map_err(InitError::file("make", &dir))?;
    }
    let offline_dir = settings.root_key_dir.as_deref();
    if let Some(dir) = offline_dir {
        refuse_existing_keys(dir)?;
        create_private_dir(dir).map_err(InitError::file("make", dir))?;
    }

    let root =
        RootAuthority::create(&settings.cluster, now).map_err(InitError::make("the root authority"))?;
    let root_dir = offline_dir.map_or_else(|| data.root_ca_dir(), Path::to_owned);
    root.save(&root_dir).map_err(InitError::make("the root authority's files"))?;
    let anchors = root.anchors();
    let anchors_path = data.root_ca_cert();
    anchors.save(&anchors_path).map_err(InitError::file("write", &anchors_path))?;
    let issuing = root.create_issuing(now).map_err(InitError::make("the issuing authority"))?;
    issuing.save(&data.issuing_ca_dir()).map_err(InitError::make("the issuing authority's files"))?;

    SecretKeys::make_file(data).map_err(InitError::make("the key of Secrets"))?;
    let names = leaf_names(&settings.dns, &settings.ips);
    let profile = LeafProfile {
        identity: identity.clone(),
        dns: names.dns.clone(),
        ips: names.ips.clone(),
        life: mvm_pki::LEAF_LIFE,
    };
    let leaf =
        issue_local(&issuing, &profile, now).map_err(InitError::make("the coordinator's certificate"))?;
    leaf.save(&data.leaf()).map_err(InitError::file("write", &data.leaf()))?;

    let keys_dir = offline_dir.map_or_else(|| data.signing_dir(), Path::to_owned);
    let trust = make_trust(data, &keys_dir, settings, now)?;

    let file = ClusterFile {
        format: CLUSTER_FORMAT,
        cluster: settings.cluster.clone(),
        name: settings.name.clone(),
        dev: settings.dev,
        created_at: now,
        dns: names.dns,
        ips: names.ips,
    };
    let json = serde_json::to_vec_pretty(&file).map_err(InitError::make("cluster.json"))?;
    let path = data.cluster_file();
    write_atomic(&path, &json, 0o600).map_err(InitError::file("write", &path))?;

    let operator_dir = Destination { write_to: data.operator_dir(), lies_at: place.operator_dir() };
    let operator = operator::issue(data, FIRST_OPERATOR, &operator_dir, OPERATOR_LIFE, now)?;
    // What offline keys sign is signed on top of a pin, so that a coordinator can't choose it.
    for dir in [&data.operator_dir(), &keys_dir] {
        trust.save(&dir.join(PIN_FILE)).map_err(InitError::make("the pinned trust"))?;
    }
    let (root_dir, keys_dir) = offline_dir
        .map_or((place.root_ca_dir(), place.signing_dir()), |dir| (dir.to_owned(), dir.to_owned()));
    let offline = vec![
        OfflineKey { what: "root certificate authority", path: root_dir.join("ca.key") },
        OfflineKey { what: "trust root signing key", path: keys_dir.join("root.key") },
        OfflineKey { what: "image signing key", path: keys_dir.join("image.key") },
    ];
    Ok(Built {
        root_fingerprint: root.fingerprint(),
        trust_digest: trust.root_digest(),
        offline,
        offline_pin: keys_dir.join(PIN_FILE),
        operator,
    })
}

fn refuse_existing_keys(dir: &Path) -> Result<(), InitError> {
    match ["ca.key", "root.key", "image.key", PIN_FILE].iter().any(|name| dir.join(name).exists()) {
        true => Err(InitError::Exists { path: dir.to_owned() }),
        false => Ok(()),
    }
}

/// The signing keys, the first root that names them, and an image statement that vouches for nothing yet.
fn make_trust(
    data: &DataDir,
    keys_dir: &Path,
    settings: &InitSettings,
    now: Timestamp,
) -> Result<TrustStore, InitError> {
    let new_key = || SigningKey::generate().map_err(InitError::make("a signing key"));
    let (root, director, image) = (new_key()?, new_key()?, new_key()?);
    let save =
        |key: &SigningKey, path: &Path| key.to_file(path).map_err(InitError::make("a signing key's file"));
    save(&root, &keys_dir.join("root.key"))?;
    save(&image, &keys_dir.join("image.key"))?;
    save(&director, &data.director_key())?;

    let role = |key: &SigningKey| RoleSpec { keys: vec![key.public()], threshold: 1, expires_at: None };
    let spec = RootSpec {
        cluster: settings.cluster.clone(),
        expires_at: now + ROOT_METADATA_LIFE,
        dev: settings.dev,
        resets_high_water: false,
        root: role(&root),
        director: role(&director),
        image: role(&image),
    };
    let first = RootMetadata::first(&spec, now).map_err(InitError::make("the trust root"))?;
    let mut trust = TrustStore::pin(first.seal(&[&root]), now).map_err(InitError::make("the trust root"))?;
    let images = ImagesMetadata {
        cluster: settings.cluster.clone(),
        version: 1,
        issued_at: now,
        expires_at: now + ROOT_METADATA_LIFE,
        digests: Vec::new(),
        sources: Vec::new(),
    };
    trust.advance_images(images.seal(&[&image]), now).map_err(InitError::make("the image statement"))?;
    trust.save(&data.trust_file()).map_err(InitError::make("the trust file"))?;
    Ok(trust)
}

/// Renames the finished directory to its place.
fn move_into_place(staging: &Path, target: &Path) -> Result<(), InitError> {
    // Renaming onto an empty directory replaces it; onto one that filled up meanwhile it fails, as it should.
    std::fs::rename(staging, target).map_err(InitError::file("move the new cluster to", target))?;
    let parent = target.parent().unwrap_or(Path::new("/"));
    std::fs::File::open(parent).and_then(|dir| dir.sync_all()).map_err(InitError::file("sync", parent))
}

/// The asked names and those that every coordinator answers to.
fn leaf_names(dns: &[String], ips: &[IpAddr]) -> CsrNames {
    let mut names = CsrNames { dns: vec!["localhost".to_owned()], ips: Vec::new() };
    let hostname = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    for name in hostname.iter().filter(|name| is_dns_name(name)).chain(dns) {
        if !names.dns.contains(name) {
            names.dns.push(name.clone());
        }
    }
    for ip in [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()].iter().chain(ips) {
        if !names.ips.contains(ip) {
            names.ips.push(*ip);
        }
    }
    names
}

pub(crate) fn is_dns_name(name: &str) -> bool {
    let label = |label: &str| {
        let inside = label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        (1..=63).contains(&label.len()) && inside && !label.starts_with('-') && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// A credential from the authority on this machine, for a process beside it.
pub(crate) fn issue_local(
    authority: &Authority,
    profile: &LeafProfile,
    now: Timestamp,
) -> Result<Credential, BoxError> {
    let key = LeafKey::generate()?;
    let names = CsrNames { dns: profile.dns.clone(), ips: profile.ips.clone() };
    let issued = authority.issue(&key.csr_der(&names)?, profile, now)?;
    Ok(Credential::new(key, issued.chain)?)
}

/// Reads `cluster.json`; its absence means that `init` never finished here.
pub(crate) fn read_cluster_file(data: &DataDir) -> Result<ClusterFile, InitError> {
    let path = data.cluster_file();
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(InitError::NotInitialised { path: data.path().to_owned() });
        }
        Err(cause) => return Err(InitError::File { action: "read", path, cause }),
    };
    let file: ClusterFile = serde_json::from_slice(&bytes).map_err(|cause| InitError::File {
        action: "understand",
        path: path.clone(),
        cause: io::Error::new(io::ErrorKind::InvalidData, cause),
    })?;
    if file.format == CLUSTER_FORMAT {
        return Ok(file);
    }
    let reason = format!("format {} is not known to this version", file.format);
    Err(InitError::File { action: "understand", path, cause: io::Error::other(reason) })
}
