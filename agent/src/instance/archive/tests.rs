//! Archives written and read back, whole, damaged and cut off.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use mvm_proto::{Digest, InstanceId, Timestamp};
use mvm_vmm::DriverKind;

use super::*;
use crate::instance::archive::{Source, stored_bytes, write};
use crate::instance::record::Record;

const LONG: u64 = 1 << 30;

fn record() -> Record {
    let record = serde_json::json!({
        "tenant": "acme", "pool": "web", "id": InstanceId::from_bits(7), "offset": 2, "address": "10.1.0.2",
        "phase": "sleeping", "since": Timestamp::from_unix_ms(0), "reason": "test", "revision": Digest::of(b"revision"),
        "resources": { "vcpus": 1, "mem_mib": 64, "data_disk_mib": 1024 }, "flake_ref": "builtin:busybox",
        "claimed": false, "on_demand": false, "failures": 0,
    });
    serde_json::from_value(record).unwrap()
}

fn file(dir: &Path, name: &str) -> File {
    File::options().read(true).write(true).create_new(true).open(dir.join(name)).unwrap()
}

/// Two members: one with a few bytes far apart in a gibibyte of holes, one full of them.
fn archive(dir: &Path) -> (Header, Vec<u8>) {
    let (disk, state) = (file(dir, "disk"), file(dir, "state"));
    disk.set_len(LONG).unwrap();
    disk.write_all_at(b"first", 0).unwrap();
    disk.write_all_at(b"far", LONG - 3).unwrap();
    state.write_all_at(&[7; PIECE_BYTES + 11], 0).unwrap();
    let sources: Vec<Source> =
        [(disk, LONG), (state, PIECE_BYTES as u64 + 11)].map(|(file, bytes)| Source { file, bytes }).into();
    let member = |name: &str, source: &Source| Member {
        name: name.to_owned(),
        bytes: source.bytes,
        stored_bytes: stored_bytes(&source.file).unwrap(),
    };
    let header = Header {
        made_by: "0".to_owned(),
        node: "node-a".parse().unwrap(),
        at: Timestamp::from_unix_ms(0),
        driver: DriverKind::Qemu,
        record: record(),
        members: vec![member("data.img", &sources[0]), member("snapshot/state", &sources[1])],
    };
    let mut bytes = Vec::new();
    let put = |piece: Vec<u8>| {
        bytes.extend(piece);
        Ok(())
    };
    write(&header, &sources, put, || Ok(())).unwrap();
    (header, bytes)
}

async fn unpack(bytes: &[u8], dir: &Path) -> Result<Header, ArchiveError> {
    let (header, mut reader) = Reader::open(bytes).await?;
    for (number, member) in header.members.iter().enumerate() {
        reader.member(member, Some(file(dir, &format!("out{number}")))).await?;
    }
    reader.close().await.map(|()| header)
}

#[tokio::test]
async fn what_is_unpacked_is_what_was_packed_and_holes_cost_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (header, bytes) = archive(dir.path());
    assert!(bytes.len() < 2 * PIECE_BYTES, "{} bytes for a gibibyte of holes", bytes.len());
    assert_eq!(unpack(&bytes, dir.path()).await.unwrap(), header);
    let out = |name: &str| File::open(dir.path().join(name)).unwrap();
    let (disk, state) = (out("out0"), out("out1"));
    assert_eq!(disk.metadata().unwrap().len(), LONG);
    assert!(disk.metadata().unwrap().blocks() * 512 < 1 << 20, "holes stay holes");
    let mut end = [0; 3];
    disk.read_exact_at(&mut end, LONG - 3).unwrap();
    assert_eq!(&end, b"far");
    assert_eq!(
        std::fs::read(dir.path().join("state")).unwrap(),
        std::fs::read(dir.path().join("out1")).unwrap()
    );
    drop(state);
}

#[tokio::test]
async fn a_bit_flipped_anywhere_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let (_, bytes) = archive(dir.path());
    // Every part of it: the opening, the header, frames, content, digests and the end.
    let places = (0..24)
        .chain((24..1200).step_by(13))
        .chain((1200..bytes.len()).step_by(65_521))
        .chain((bytes.len() - 80..bytes.len()).step_by(3));
    for at in places {
        let mut bad = bytes.clone();
        bad[at] ^= 0x10;
        let out = tempfile::tempdir().unwrap();
        assert!(unpack(&bad, out.path()).await.is_err(), "a flip at {at} was not found");
    }
}

#[tokio::test]
async fn an_archive_cut_off_anywhere_or_with_more_behind_it_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_, mut bytes) = archive(dir.path());
    for cut in (0..1200).step_by(17).chain((1200..bytes.len()).step_by(99_991)).chain([bytes.len() - 1]) {
        let out = tempfile::tempdir().unwrap();
        assert!(unpack(&bytes[..cut], out.path()).await.is_err(), "cut at {cut}");
    }
    bytes.push(0);
    let out = tempfile::tempdir().unwrap();
    assert!(matches!(unpack(&bytes, out.path()).await, Err(ArchiveError::Trailing)));
}

#[tokio::test(start_paused = true)]
async fn a_sender_that_stops_is_not_waited_for_for_ever() {
    let (mut sender, receiver) = tokio::io::duplex(64);
    tokio::io::AsyncWriteExt::write_all(&mut sender, b"mvmsleep").await.unwrap();
    assert!(matches!(Reader::open(receiver).await, Err(ArchiveError::Stalled(_))));
    drop(sender);
}

#[tokio::test]
async fn another_version_and_what_is_no_archive_say_so() {
    let mut bytes = b"mvmsleep".to_vec();
    bytes.extend(2_u32.to_be_bytes());
    bytes.extend(0_u32.to_be_bytes());
    assert!(matches!(Reader::open(&bytes[..]).await, Err(ArchiveError::Version(2))));
    assert!(matches!(
        Reader::open(&b"PK\x03\x04 is no archive of ours"[..]).await,
        Err(ArchiveError::NotOne)
    ));
    bytes[11] = 1;
    bytes[12..16].copy_from_slice(&u32::MAX.to_be_bytes());
    assert!(matches!(Reader::open(&bytes[..]).await, Err(ArchiveError::Odd(_))));
}
