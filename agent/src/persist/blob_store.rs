//! Blob stores for sessions: a folder of this machine, or an S3 bucket. Every call takes effect as a whole or not at all.

mod folder;

use std::future::Future;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt;
use mvm_host::{Dir, OpenHow};
use mvm_proto::Timestamp;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;
use object_store::{
    ClientOptions, Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, RetryConfig,
};
use zeroize::Zeroizing;

/// A bucket that does not answer is tried again by the next copy: waiting for it longer would only hold this one up.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
const RETRIES: usize = 3;
const RETRY_WITHIN: Duration = Duration::from_secs(15);

/// No file of credentials is longer.
const MAX_CREDENTIALS_BYTES: u64 = 64 * 1024;

/// What a bucket's credentials must have at least.
const NEEDED: [(AmazonS3ConfigKey, &str); 2] = [
    (AmazonS3ConfigKey::AccessKeyId, "AWS_ACCESS_KEY_ID"),
    (AmazonS3ConfigKey::SecretAccessKey, "AWS_SECRET_ACCESS_KEY"),
];

#[derive(Debug, thiserror::Error)]
pub enum BlobStoreError {
    #[error("{0} is not a session store: it must be `local`, `file:///FOLDER` or `s3://BUCKET[/PREFIX]`")]
    Unknown(String),
    #[error(
        "{} is not below {}: start the agent with --sessions-dir at or above it",
        folder.display(),
        allowed.display()
    )]
    NotAllowed { folder: PathBuf, allowed: PathBuf },
    #[error("could not create the folder {}", path.display())]
    Folder {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("could not read the credentials {}", path.display())]
    Credentials {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{name} is in neither {} nor the agent's environment", path.display())]
    NoCredentials { name: &'static str, path: PathBuf },
    #[error("line {line} of {} is not NAME=VALUE with a name that S3 clients know", path.display())]
    BadCredentials { path: PathBuf, line: usize },
    #[error("the store did not do what it was asked")]
    Store(#[from] Error),
    #[error("could not read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{} is a link, which is not followed: remove it", path.display())]
    Link { path: PathBuf },
    #[error("{key} in the store is longer than {limit} bytes")]
    TooLong { key: String, limit: u64 },
    #[cfg(test)]
    #[error("the test broke it")]
    Broken,
}

/// An object as a listing shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listed {
    /// As it is asked for.
    pub(crate) key: String,
    pub(crate) written_at: Timestamp,
    pub(crate) bytes: u64,
}

/// A place for objects, each whole or not there. Keys are made of ids and digests, so none leads out of the place.
pub(crate) trait BlobStore: Clone + Send + Sync + 'static {
    fn put(&self, key: &str, bytes: Bytes) -> impl Future<Output = Result<(), BlobStoreError>> + Send;

    /// Puts it there unless something already is. Says whether it did; of many who try at once, one does.
    fn put_new(&self, key: &str, bytes: Bytes) -> impl Future<Output = Result<bool, BlobStoreError>> + Send;

    fn get(
        &self,
        key: &str,
        limit: u64,
    ) -> impl Future<Output = Result<Option<Bytes>, BlobStoreError>> + Send;

    /// Everything whose key begins with these whole steps.
    fn list(&self, below: &str) -> impl Future<Output = Result<Vec<Listed>, BlobStoreError>> + Send;

    /// What is not there is as good as deleted.
    fn delete(&self, key: &str) -> impl Future<Output = Result<(), BlobStoreError>> + Send;
}

/// Which place a document means.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Folder(PathBuf),
    Bucket { name: String, prefix: String },
}

/// `store` as a document has it. Folders must lie below `sessions_dir`: a document can't have the agent write
/// anywhere else on its machine.
fn place(store: &str, sessions_dir: &Path) -> Result<Place, BlobStoreError> {
    if store == "local" {
        return Ok(Place::Folder(sessions_dir.to_owned()));
    }
    if let Some(folder) = store.strip_prefix("file://") {
        let folder = PathBuf::from(folder);
        let plain = folder.is_absolute() && !store.split('/').any(|step| step == "..");
        return match plain && folder.starts_with(sessions_dir) {
            true => Ok(Place::Folder(folder)),
            false => Err(BlobStoreError::NotAllowed { folder, allowed: sessions_dir.to_owned() }),
        };
    }
    let rest = store.strip_prefix("s3://").filter(|rest| !rest.is_empty());
    let rest = rest.ok_or_else(|| BlobStoreError::Unknown(store.to_owned()))?;
    let (name, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    Ok(Place::Bucket { name: name.to_owned(), prefix: prefix.trim_end_matches('/').to_owned() })
}

/// A folder or a bucket, through the one interface that both have.
#[derive(Debug, Clone)]
pub(crate) struct ObjectBlobStore {
    store: Arc<dyn ObjectStore>,
    prefix: String,
    /// Absent: it is not on this machine.
    folder: Option<PathBuf>,
}

impl ObjectBlobStore {
    /// Opens the place that a document means. Nothing is asked of a bucket yet.
    pub(crate) fn open(store: &str, sessions_dir: &Path, secrets_dir: &Path) -> Result<Self, BlobStoreError> {
        match place(store, sessions_dir)? {
            Place::Folder(path) => {
                let failed = |cause| BlobStoreError::Folder { path: path.clone(), cause };
                std::fs::create_dir_all(&path).map_err(failed)?;
                // A session that a node says is kept survives a power cut.
                let folder = LocalFileSystem::new_with_prefix(&path)?.with_fsync(true);
                Ok(Self { store: Arc::new(folder), prefix: String::new(), folder: Some(path) })
            }
            Place::Bucket { name, prefix } => {
                let path = secrets_dir.join(credentials_file(&name));
                let options =
                    ClientOptions::new().with_connect_timeout(CONNECT_WITHIN).with_timeout(ANSWER_WITHIN);
                let mut builder = AmazonS3Builder::from_env().with_client_options(options);
                if let Some(text) = read_credentials(secrets_dir, &name)? {
                    for (key, value) in settings_of(&text)
                        .map_err(|line| BlobStoreError::BadCredentials { path: path.clone(), line })?
                    {
                        builder = builder.with_config(key, value);
                    }
                }
                for (key, name) in NEEDED {
                    // Without them the machine's own identity would be asked for over the network.
                    if builder.get_config_value(&key).is_none() {
                        return Err(BlobStoreError::NoCredentials { name, path });
                    }
                }
                let retry = RetryConfig {
                    max_retries: RETRIES,
                    retry_timeout: RETRY_WITHIN,
                    ..RetryConfig::default()
                };
                let bucket = builder.with_bucket_name(name).with_retry(retry).build()?;
                Ok(Self { store: Arc::new(bucket), prefix, folder: None })
            }
        }
    }

    /// Where it is on this machine's disk.
    pub(crate) fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Removes the empty folders at and below a key, where there are folders. Content is never touched.
    pub(crate) fn remove_empty_folders(&self, below: &str) {
        if let Some(folder) = self.folder.as_deref().filter(|folder| check_links(folder, below).is_ok()) {
            folder::remove_empty(&folder.join(below));
        }
    }

    /// What lies below a key, where there are folders, and is none of ours: links, pipes, names that no key has.
    pub(crate) fn foreign(&self, below: &str) -> Result<Vec<PathBuf>, BlobStoreError> {
        match &self.folder {
            Some(folder) => Ok(folder::walk(folder, below)?.foreign),
            None => Ok(Vec::new()),
        }
    }

    /// A folder of this machine may be one that others write to, too, or that is shared with other machines: a link in it must not
    /// lead an agent to files elsewhere. **Not covered:** a link that is put there after this.
    fn check_links(&self, key: &str) -> Result<(), BlobStoreError> {
        self.folder.as_deref().map_or(Ok(()), |folder| check_links(folder, key))
    }

    fn key(&self, key: &str) -> Result<Key, BlobStoreError> {
        let whole = if self.prefix.is_empty() { key.to_owned() } else { format!("{}/{key}", self.prefix) };
        Key::parse(whole).map_err(|error| BlobStoreError::Store(error.into()))
    }
}

/// Fails where a step of the key is a link.
fn check_links(folder: &Path, key: &str) -> Result<(), BlobStoreError> {
    let mut path = folder.to_owned();
    for step in key.split('/').filter(|step| !step.is_empty()) {
        path.push(step);
        match path.symlink_metadata() {
            Ok(found) if found.is_symlink() => return Err(BlobStoreError::Link { path }),
            Ok(_) => {}
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(cause) => return Err(BlobStoreError::Read { path, cause }),
        }
    }
    Ok(())
}

/// Beside the tenants' bundles; no tenant's id has a dot.
fn credentials_file(bucket: &str) -> String {
    format!("s3.{bucket}")
}

fn read_credentials(secrets_dir: &Path, bucket: &str) -> Result<Option<Zeroizing<String>>, BlobStoreError> {
    let name = credentials_file(bucket);
    let read = || -> io::Result<Zeroizing<String>> {
        let mut file = Dir::open_root(secrets_dir)?.open_file(name.as_str(), OpenHow::Read)?;
        let length = file.metadata()?.len();
        if length > MAX_CREDENTIALS_BYTES {
            return Err(io::Error::other(format!("longer than {MAX_CREDENTIALS_BYTES} bytes")));
        }
        let mut text = Zeroizing::new(String::with_capacity(usize::try_from(length).unwrap_or(0)));
        file.read_to_string(&mut text)?;
        Ok(text)
    };
    match read() {
        Ok(text) => Ok(Some(text)),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(BlobStoreError::Credentials { path: secrets_dir.join(name), cause }),
    }
}

/// NAME=VALUE per line, with the names that other S3 clients read from their environment. Else the number of the line.
fn settings_of(text: &str) -> Result<Vec<(AmazonS3ConfigKey, String)>, usize> {
    let mut settings = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, value) = line.split_once('=').ok_or(at + 1)?;
        let key = name.trim().to_ascii_lowercase().parse().map_err(|_| at + 1)?;
        settings.push((key, value.trim().to_owned()));
    }
    Ok(settings)
}

impl BlobStore for ObjectBlobStore {
    async fn put(&self, key: &str, bytes: Bytes) -> Result<(), BlobStoreError> {
        self.check_links(key)?;
        self.store.put_opts(&self.key(key)?, PutPayload::from(bytes), PutOptions::default()).await?;
        Ok(())
    }

    async fn put_new(&self, key: &str, bytes: Bytes) -> Result<bool, BlobStoreError> {
        self.check_links(key)?;
        let options = PutOptions::from(PutMode::Create);
        match self.store.put_opts(&self.key(key)?, PutPayload::from(bytes), options).await {
            Ok(_) => Ok(true),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    async fn get(&self, key: &str, limit: u64) -> Result<Option<Bytes>, BlobStoreError> {
        self.check_links(key)?;
        let found = match self.store.get(&self.key(key)?).await {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if found.meta.size > limit {
            return Err(BlobStoreError::TooLong { key: key.to_owned(), limit });
        }
        Ok(Some(found.bytes().await?))
    }

    async fn list(&self, below: &str) -> Result<Vec<Listed>, BlobStoreError> {
        // The library follows links.
        if let Some(folder) = self.folder.clone() {
            let (below, path) = (self.key(below)?.to_string(), folder.clone());
            let walked = tokio::task::spawn_blocking(move || folder::walk(&folder, &below)).await;
            let failed = |cause| BlobStoreError::Read { path, cause: io::Error::other(cause) };
            return Ok(walked.map_err(failed)??.listed);
        }
        let skipped = if self.prefix.is_empty() { 0 } else { self.prefix.len() + 1 };
        let found: Vec<_> = self.store.list(Some(&self.key(below)?)).try_collect().await?;
        let listed = found.into_iter().filter_map(|meta| {
            let key = meta.location.as_ref().get(skipped..)?.to_owned();
            let written_at = Timestamp::from_unix_ms(meta.last_modified.timestamp_millis());
            Some(Listed { key, written_at, bytes: meta.size })
        });
        Ok(listed.collect())
    }

    async fn delete(&self, key: &str) -> Result<(), BlobStoreError> {
        self.check_links(key)?;
        match self.store.delete(&self.key(key)?).await {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_names_folders_below_the_agents_own_and_buckets() {
        let dir = Path::new("/var/lib/sessions");
        let folder = |path: &str| Place::Folder(PathBuf::from(path));
        assert_eq!(place("local", dir).unwrap(), folder("/var/lib/sessions"));
        assert_eq!(
            place("file:///var/lib/sessions/shared", dir).unwrap(),
            folder("/var/lib/sessions/shared")
        );
        let bucket = |prefix: &str| Place::Bucket { name: "acme".to_owned(), prefix: prefix.to_owned() };
        assert_eq!(place("s3://acme", dir).unwrap(), bucket(""));
        assert_eq!(place("s3://acme/a/b/", dir).unwrap(), bucket("a/b"));
        for bad in
            ["file:///etc", "file:///var/lib/sessions/../x", "file:///var/lib/sessions-2", "file://host/x"]
        {
            assert!(matches!(place(bad, dir), Err(BlobStoreError::NotAllowed { .. })), "{bad}");
        }
        for bad in ["", "s3://", "ftp://x", "/var/lib/sessions"] {
            assert!(matches!(place(bad, dir), Err(BlobStoreError::Unknown(_))), "{bad}");
        }
    }

    #[test]
    fn credentials_are_lines_of_names_that_are_known() {
        let text = "# ours\nAWS_ACCESS_KEY_ID = id\n\nAWS_SECRET_ACCESS_KEY=a=b\n";
        let id = (AmazonS3ConfigKey::AccessKeyId, "id".to_owned());
        let secret = (AmazonS3ConfigKey::SecretAccessKey, "a=b".to_owned());
        assert_eq!(settings_of(text), Ok(vec![id, secret]));
        assert_eq!(settings_of("AWS_REGION=x\nnonsense"), Err(2));
        assert_eq!(settings_of("AWS_NO_SUCH_NAME=x"), Err(1));
    }
}
