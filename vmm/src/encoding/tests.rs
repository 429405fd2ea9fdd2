//! What goes in comes out, and nothing that was touched does.

use std::io::{Cursor, Seek as _, SeekFrom};

use super::*;

const ALL: [SnapshotCompression; 3] =
    [SnapshotCompression::None, SnapshotCompression::Lz4, SnapshotCompression::Zstd];

fn lock(key: u8, instance: u32, tenant: &str, revision: &[u8]) -> StreamKey {
    let binding = Binding {
        instance: InstanceId::from_bits(instance),
        tenant: tenant.parse().unwrap(),
        revision: Digest::of(revision),
    };
    StreamKey { tenant_key: SnapshotKey::new([key; 32]), binding }
}

fn ours() -> StreamKey {
    lock(1, 1, "acme", b"one")
}

fn encoded(plain: &[u8], compression: SnapshotCompression, key: Option<&StreamKey>) -> Vec<u8> {
    let (bytes, plain_bytes) = encode(plain, Vec::new(), compression, key, || true).unwrap();
    assert_eq!(plain_bytes, plain.len() as u64);
    bytes
}

/// As a wake has it: fed through a pipe, and believed only if the end was right.
fn decoded(
    bytes: &[u8],
    compression: SnapshotCompression,
    key: Option<&StreamKey>,
    plain_bytes: u64,
) -> io::Result<Vec<u8>> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    let from = decode(file, compression, key)?;
    let (out, into) = pipe().unwrap();
    let reading = std::thread::spawn(move || {
        let mut plain = Vec::new();
        File::from(out).read_to_end(&mut plain).unwrap();
        plain
    });
    feed(from, into, Some(plain_bytes))?;
    Ok(reading.join().unwrap())
}

/// Half of it random, half of it not, as memory is.
fn memory(random: &mut fastrand::Rng, length: usize) -> Vec<u8> {
    (0..length).map(|at| if at / 4096 % 2 == 0 { random.u8(..) } else { 7 }).collect()
}

#[test]
fn what_was_kept_comes_back_whatever_its_size_and_form() {
    let mut random = fastrand::Rng::with_seed(7);
    let chunk = 256 * 1024;
    let sizes = [0, 1, 15, 16, 4096, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk, 4 * chunk + 5];
    let sizes = sizes.into_iter().chain((0..12).map(|_| random.usize(..3 * chunk))).collect::<Vec<_>>();
    for size in sizes {
        let plain = memory(&mut random, size);
        for compression in ALL {
            for key in [None, Some(ours())] {
                let bytes = encoded(&plain, compression, key.as_ref());
                let back = decoded(&bytes, compression, key.as_ref(), size as u64).unwrap();
                assert!(back == plain, "{size} bytes, {compression:?}, encrypted: {}", key.is_some());
            }
        }
    }
}

#[test]
fn every_cut_and_every_changed_byte_of_an_encrypted_stream_is_refused() {
    let mut random = fastrand::Rng::with_seed(8);
    let (plain, key) = (memory(&mut random, 300), ours());
    for compression in ALL {
        let bytes = encoded(&plain, compression, Some(&key));
        let refused = |bytes: &[u8], what: &str| {
            let error = decoded(bytes, compression, Some(&key), plain.len() as u64).expect_err(what);
            assert!(is_damage(&error), "{what}: {error}");
        };
        for length in 0..bytes.len() {
            refused(&bytes[..length], &format!("cut to {length}"));
        }
        for at in 0..bytes.len() {
            for bit in [1, 128] {
                let mut changed = bytes.clone();
                changed[at] ^= bit;
                refused(&changed, &format!("byte {at} changed"));
            }
        }
        let mut longer = bytes.clone();
        longer.push(0);
        refused(&longer, "a byte more");
    }
}

#[test]
fn every_cut_of_a_compressed_stream_is_refused() {
    let mut random = fastrand::Rng::with_seed(9);
    let plain = memory(&mut random, 6000);
    for compression in [SnapshotCompression::Lz4, SnapshotCompression::Zstd] {
        let bytes = encoded(&plain, compression, None);
        for length in 0..bytes.len() {
            let error = decoded(&bytes[..length], compression, None, 6000).expect_err("a cut stream");
            assert!(is_damage(&error), "cut to {length}: {error}");
        }
        // Inside the content, where the frame's own sum is over it.
        let mut changed = bytes.clone();
        changed[bytes.len() / 2] ^= 1;
        decoded(&changed, compression, None, 6000).expect_err("a changed stream");
    }
}

#[test]
fn chunks_that_were_exchanged_left_out_or_doubled_are_refused() {
    let mut random = fastrand::Rng::with_seed(10);
    let (chunk, none, key) = (256 * 1024, SnapshotCompression::None, ours());
    let plain = memory(&mut random, 4 * chunk);
    let bytes = encoded(&plain, none, Some(&key));
    let head = bytes.len() - 4 * (chunk + 16);
    let part = |number: usize| &bytes[head + number * (chunk + 16)..head + (number + 1) * (chunk + 16)];
    for order in [&[0, 1, 2][..], &[1, 0, 2, 3], &[0, 2, 3], &[0, 1, 1, 2, 3], &[0, 1, 2, 3, 3], &[3]] {
        let mut changed = bytes[..head].to_vec();
        order.iter().for_each(|number| changed.extend_from_slice(part(*number)));
        let error = decoded(&changed, none, Some(&key), plain.len() as u64).expect_err("another order");
        assert!(is_damage(&error), "{order:?}: {error}");
    }
    // And a chunk of another stream of the same key in its place.
    let other = encoded(&plain, none, Some(&key));
    let mut changed = bytes.clone();
    changed[head..head + chunk].copy_from_slice(&other[head..head + chunk]);
    decoded(&changed, none, Some(&key), plain.len() as u64).expect_err("another's chunk");
    assert!(bytes != other, "no two streams are alike");
}

#[test]
fn a_stream_of_another_instance_tenant_revision_or_key_is_refused() {
    let none = SnapshotCompression::None;
    let bytes = encoded(b"memory", none, Some(&ours()));
    assert_eq!(decoded(&bytes, none, Some(&ours()), 6).unwrap(), b"memory");
    for (other, says) in [
        (lock(1, 2, "acme", b"one"), "instance"),
        (lock(1, 1, "beta", b"one"), "tenant"),
        (lock(1, 1, "acme", b"two"), "revision"),
        (lock(2, 1, "acme", b"one"), "key"),
    ] {
        let error = decoded(&bytes, none, Some(&other), 6).expect_err(says);
        assert!(error.to_string().contains(says), "{error}");
    }
    let error = decoded(&bytes, SnapshotCompression::Zstd, Some(&ours()), 6).expect_err("another encoding");
    assert!(error.to_string().contains("in another way"), "{error}");
}

#[test]
fn nothing_of_what_is_encrypted_is_in_the_file() {
    let plain = b"CANARY-0123456789".repeat(1000);
    let found = |bytes: &[u8]| bytes.windows(6).any(|word| word == b"CANARY");
    assert!(found(&encoded(&plain, SnapshotCompression::None, None)));
    for compression in ALL {
        assert!(!found(&encoded(&plain, compression, Some(&ours()))));
    }
}

#[test]
fn encoding_stops_when_it_is_not_wanted_any_more() {
    let looks = std::cell::Cell::new(0);
    let wanted = || {
        looks.set(looks.get() + 1);
        looks.get() < 3
    };
    let plain = vec![1; 10 * STEP_BYTES];
    let error = encode(&*plain, Cursor::new(Vec::new()), SnapshotCompression::Lz4, None, wanted).unwrap_err();
    assert_eq!((error.kind(), looks.get()), (io::ErrorKind::Interrupted, 3));
}

#[test]
fn a_stream_is_checked_to_its_end_even_if_its_reader_wants_no_more() {
    let (plain, none, key) = (vec![3; 1 << 20], SnapshotCompression::None, ours());
    let fed = |bytes: &[u8]| {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        let (out, into) = pipe().unwrap();
        drop(out);
        feed(decode(file, none, Some(&key)).unwrap(), into, None)
    };
    let bytes = encoded(&plain, none, Some(&key));
    fed(&bytes).unwrap();
    assert!(is_damage(&fed(&bytes[..bytes.len() - 1]).unwrap_err()));
}
