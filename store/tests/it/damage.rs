//! Damaged directories: an older state that is whole, or a clear error; never a panic, never silent loss.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use mvm_store::{Settings, SledStore, Store, StoreError, Transaction};

/// No open may hang on damaged files.
const PATIENCE: Duration = Duration::from_secs(30);

/// Writes pairs that always agree, over a few segments of sled's log, and returns the last revision.
async fn fill(path: &Path) -> u64 {
    let store = SledStore::open(path, Settings::default()).await.unwrap();
    let mut revision = 0;
    for n in 0..120_u32 {
        let value = vec![u8::try_from(n).unwrap(); 9000];
        let pair = Transaction::new()
            .put(format!("a/{:02}", n % 40), value.clone())
            .put(format!("b/{:02}", n % 40), value);
        revision = store.commit(pair).await.unwrap().revision;
    }
    store.close().await;
    // sled writes its snapshot file at opening.
    SledStore::open(path, Settings::default()).await.unwrap().close().await;
    revision
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for item in fs::read_dir(from).unwrap() {
        let item = item.unwrap();
        if item.file_type().unwrap().is_dir() {
            copy(&item.path(), &to.join(item.file_name()));
        } else {
            fs::copy(item.path(), to.join(item.file_name())).unwrap();
        }
    }
}

/// Whether the directory opened; if so, what it holds must be one whole state.
async fn opens_whole(path: &Path, newest: u64, what: &str) -> bool {
    let opening = SledStore::open(path, Settings::default());
    let store =
        match tokio::time::timeout(PATIENCE, opening).await.unwrap_or_else(|_| panic!("{what}: it hangs")) {
            Ok(store) => store,
            Err(StoreError::Damaged { path: named, reason }) => {
                assert_eq!(named, path, "{what}");
                assert!(!reason.is_empty());
                return false;
            }
            Err(other) => panic!("{what}: {other}"),
        };
    let (a, b) = (store.list("a/").await.unwrap(), store.list("b/").await.unwrap());
    assert!(a.revision <= newest, "{what}");
    let values = |listing: mvm_store::Listing| -> Vec<_> {
        listing
            .entries
            .into_iter()
            .map(|entry| (entry.key[2..].to_owned(), entry.value, entry.version))
            .collect()
    };
    assert!(values(a) == values(b), "{what}: half a transaction");
    store.commit(Transaction::new().put("after", "x")).await.unwrap();
    store.close().await;
    true
}

#[tokio::test]
async fn a_log_cut_short_anywhere_is_found() {
    let root = tempfile::tempdir().unwrap();
    let good = root.path().join("good");
    let newest = fill(&good).await;
    let length = fs::metadata(good.join("db")).unwrap().len();
    let mut opened = Vec::new();
    for part in (0..16).map(|n| length * n / 16).chain([1, 19, 21, length - 1, length - 4096, 512 * 1024 + 7])
    {
        let path = root.path().join(format!("cut-{part}"));
        copy(&good, &path);
        OpenOptions::new().write(true).open(path.join("db")).unwrap().set_len(part).unwrap();
        if opens_whole(&path, newest, &format!("cut to {part} of {length}")).await {
            opened.push(part);
        }
        fs::remove_dir_all(&path).unwrap();
    }
    // What opened had lost nothing: the newest confirmed revision is noted outside of the log.
    println!("of {length} bytes, cuts at {opened:?} left the whole state");
    assert!(!opened.contains(&0), "an emptied log is not a new store");
}

#[tokio::test]
async fn an_older_log_is_refused_unless_it_is_accepted_by_hand() {
    let root = tempfile::tempdir().unwrap();
    let (old, new) = (root.path().join("old"), root.path().join("new"));
    let newest = fill(&old).await;
    copy(&old, &new);
    let store = SledStore::open(&new, Settings::default()).await.unwrap();
    store.commit(Transaction::new().put("later", "x")).await.unwrap();
    store.close().await;
    fs::copy(new.join("confirmed"), old.join("confirmed")).unwrap();
    let refused = SledStore::open(&old, Settings::default()).await.unwrap_err();
    assert!(matches!(&refused, StoreError::Damaged { .. }), "{refused}");
    assert!(refused.to_string().contains("`confirmed`"), "{refused}");
    fs::remove_file(old.join("confirmed")).unwrap();
    assert!(opens_whole(&old, newest, "accepted").await);
}

#[tokio::test]
async fn flipped_and_overwritten_bytes_are_found() {
    let root = tempfile::tempdir().unwrap();
    let good = root.path().join("good");
    let newest = fill(&good).await;
    let length = fs::metadata(good.join("db")).unwrap().len();
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    for round in 0..24 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let path = root.path().join(format!("flip-{round}"));
        copy(&good, &path);
        let file = OpenOptions::new().read(true).write(true).open(path.join("db")).unwrap();
        let noise = if round % 2 == 0 { vec![0xff; 1] } else { vec![u8::try_from(round).unwrap(); 700] };
        file.write_all_at(&noise, random % (length - 700)).unwrap();
        drop(file);
        opens_whole(&path, newest, &format!("noise at {}", random % (length - 700))).await;
        fs::remove_dir_all(&path).unwrap();
    }
}

#[tokio::test]
async fn lost_or_cut_small_files_do_no_harm_or_are_named() {
    let root = tempfile::tempdir().unwrap();
    let good = root.path().join("good");
    let newest = fill(&good).await;
    let names: Vec<_> = fs::read_dir(&good)
        .unwrap()
        .map(|item| item.unwrap())
        .filter(|item| item.file_type().unwrap().is_file() && item.file_name() != "db")
        .map(|item| item.file_name().into_string().unwrap())
        .collect();
    assert!(names.iter().any(|name| name.starts_with("snap")), "{names:?}");
    for name in &names {
        for cut in [None, Some(0), Some(5), Some(20)] {
            let path = root.path().join("cut");
            copy(&good, &path);
            match cut {
                None => fs::remove_file(path.join(name)).unwrap(),
                Some(length) => {
                    let file = OpenOptions::new().write(true).open(path.join(name)).unwrap();
                    file.set_len(length).unwrap();
                }
            }
            opens_whole(&path, newest, &format!("{name} cut to {cut:?}")).await;
            fs::remove_dir_all(&path).unwrap();
        }
    }
}
