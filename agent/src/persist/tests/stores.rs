//! What every store must do, tried on a folder and on a bucket of an S3 server that is not ours.
//!
//! `scripts/setup` installs the server (moto) under `target/interop-venv`.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mvm_proto::Timestamp;

use super::folder::{Folder, looks};
use super::{EVERY, at, fill, holder};
use crate::persist::blob_store::{BlobStore, BlobStoreError, ObjectBlobStore};
use crate::persist::head::FolderContent;
use crate::persist::session::Session;
use crate::persist::session_store::SessionStore;

/// The laws that sessions rest on.
async fn conforms(blobs: &ObjectBlobStore) {
    assert!(blobs.get("a/none", 10).await.unwrap().is_none());
    assert!(blobs.list("a").await.unwrap().is_empty());
    blobs.put("a/one", "1".into()).await.unwrap();
    blobs.put("a/one", "one".into()).await.unwrap();
    assert_eq!(blobs.get("a/one", 3).await.unwrap().unwrap(), "one");
    assert!(matches!(blobs.get("a/one", 2).await, Err(BlobStoreError::TooLong { .. })));
    assert!(!blobs.put_new("a/one", "other".into()).await.unwrap());
    assert_eq!(blobs.get("a/one", 3).await.unwrap().unwrap(), "one");

    // Of many at once, one.
    let tries = (0..8).map(|number| {
        let blobs = blobs.clone();
        tokio::spawn(async move { blobs.put_new("a/b/first", format!("{number}").into()).await.unwrap() })
    });
    let won = futures::future::join_all(tries).await;
    assert_eq!(won.iter().filter(|won| *won.as_ref().unwrap()).count(), 1);

    // Whole steps only, with a time near ours.
    blobs.put("ab/two", "2".into()).await.unwrap();
    let mut keys: Vec<_> = blobs.list("a").await.unwrap();
    keys.sort_by(|one, other| one.key.cmp(&other.key));
    let now = Timestamp::from(std::time::SystemTime::now());
    for listed in &keys {
        let apart = now.since(listed.written_at).max(listed.written_at.since(now));
        assert!(apart < Duration::from_secs(60), "{listed:?}");
    }
    let keys: Vec<_> = keys.into_iter().map(|listed| listed.key).collect();
    assert_eq!(keys, ["a/b/first", "a/one"]);
    for _ in 0..2 {
        blobs.delete("a/one").await.unwrap();
    }
    assert!(blobs.put_new("a/one", "again".into()).await.unwrap());
    for key in ["../out", "a/../../out", "/a/one"] {
        let put = blobs.put(key, "x".into()).await;
        let outside = put.is_ok() && blobs.list("a").await.unwrap().len() != 2;
        assert!(!outside, "{key}");
    }
}

/// A whole session, with what a real store makes of it.
async fn carries_a_session(blobs: &ObjectBlobStore) {
    let session_store =
        || SessionStore::new(blobs.clone(), &"acme".parse().unwrap(), &"workers".parse().unwrap());
    let (here, there) = (Folder::new(), Folder::new());
    fill(&here);
    let mut session =
        Session::take(session_store(), &holder(1), FolderContent::Nothing, EVERY).await.unwrap();
    let held = Session::take(session_store(), &holder(2), FolderContent::Nothing, EVERY).await.unwrap();
    assert_eq!((session.slot, held.slot), (0, 1));
    session.copy_folder(&here, here.root(), EVERY, at(1)).await.unwrap();
    session.copy_folder(&here, here.root(), EVERY, at(2)).await.unwrap();
    session.release().await.unwrap();
    let mut session =
        Session::take(session_store(), &holder(3), FolderContent::Nothing, EVERY).await.unwrap();
    assert_eq!((session.slot, session.taken_at()), (0, Some(at(2))));
    session.bring_back(&there, there.root()).await.unwrap();
    assert_eq!(looks(&there), looks(&here));
}

#[tokio::test]
async fn a_folder_is_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let blobs = ObjectBlobStore::open("local", dir.path(), dir.path()).unwrap();
    conforms(&blobs).await;
    let below = format!("file://{}/below", dir.path().display());
    carries_a_session(&ObjectBlobStore::open(&below, dir.path(), dir.path()).unwrap()).await;
}

#[tokio::test]
async fn a_bucket_is_a_store() {
    let server = Server::start();
    let dir = tempfile::tempdir().unwrap();
    let open = |store: &str| ObjectBlobStore::open(store, dir.path(), dir.path());
    let missing = open("s3://sessions").unwrap_err();
    assert!(matches!(missing, BlobStoreError::NoCredentials { name: "AWS_ACCESS_KEY_ID", .. }), "{missing}");
    let credentials = format!(
        "AWS_ACCESS_KEY_ID=key\nAWS_SECRET_ACCESS_KEY=secret\nAWS_REGION=us-east-1\nAWS_ENDPOINT_URL={}\n\
         AWS_ALLOW_HTTP=true\n",
        server.url
    );
    std::fs::write(dir.path().join("s3.sessions"), credentials).unwrap();
    conforms(&open("s3://sessions").unwrap()).await;
    carries_a_session(&open("s3://sessions/some/where").unwrap()).await;
}

/// An S3 server with the bucket `sessions`, until it is dropped.
struct Server {
    process: Child,
    url: String,
}

const SCRIPT: &str = "
import boto3, sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
url = f'http://{host}:{port}'
client = boto3.client('s3', endpoint_url=url, region_name='us-east-1', aws_access_key_id='x', aws_secret_access_key='x')
client.create_bucket(Bucket='sessions')
print(url, flush=True)
# Until whoever started it is gone.
sys.stdin.read()
";

impl Server {
    fn start() -> Self {
        let python = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/interop-venv/bin/python");
        assert!(python.exists(), "the Python environment is missing: run scripts/setup");
        let mut process = Command::new(python)
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut url = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut url).unwrap();
        assert!(url.starts_with("http://"), "the S3 server did not start: run scripts/setup");
        Self { process, url: url.trim().to_owned() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
