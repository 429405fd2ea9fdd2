//! What operations do when nobody interferes, and what they refuse to begin with.

use std::fs;
use std::io::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;

use mvm_host::{Dir, HostError, OpenHow, free_space};
use mvm_needs::{Need, can_run};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

#[allow(clippy::needless_pass_by_value, reason = "what is refused leaves nothing to use")]
fn refused<T: std::fmt::Debug>(what: &str, result: Result<T, HostError>) {
    assert!(result.is_err(), "{what}: {result:?}");
}

#[test]
fn a_data_directory_that_others_may_write_to_is_refused_with_what_to_do() {
    let place = tempfile::tempdir().unwrap();
    Dir::open_root(place.path()).unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o770)).unwrap();
    let error = Dir::open_root(place.path()).unwrap_err();
    assert!(error.to_string().contains("chmod go-w"), "{error}");
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o700)).unwrap();
    if !can_run(&[Need::Root]) {
        return;
    }
    std::os::unix::fs::chown(place.path(), Some(12345), None).unwrap();
    let error = Dir::open_root(place.path()).unwrap_err();
    assert!(error.to_string().contains("belongs to user 12345"), "{error}");
}

#[test]
fn only_regular_files_are_opened_and_nothing_is_waited_for() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open_root(place.path()).unwrap();
    let path = |name: &str| place.path().join(name);
    mknodat(CWD, path("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    fs::create_dir(path("dir")).unwrap();
    fs::write(path("file"), b"file").unwrap();
    symlink("file", path("link")).unwrap();
    symlink("dir", path("dirlink")).unwrap();
    fs::write(path("twice"), b"twice").unwrap();
    fs::hard_link(path("twice"), path("second")).unwrap();
    let mut wrong = vec!["fifo", "dir", "link", "twice", "missing", "", "..", "dir/x"];
    // A terminal's master side or a disk: opening one is an effect by itself.
    if can_run(&[Need::Root]) {
        mknodat(CWD, path("device"), FileType::CharacterDevice, Mode::RUSR, makedev(1, 3)).unwrap();
        wrong.push("device");
    }
    for name in wrong {
        for how in [OpenHow::Read, OpenHow::Write, OpenHow::Append] {
            refused(name, dir.open_file(name, how));
        }
        refused(name, dir.chmod(name, 0o777));
        refused(name, dir.chown(name, (0, 0)));
        refused(name, dir.connect_socket(name));
    }
    for name in ["fifo", "link", "device", "dir"] {
        refused(name, dir.open_file(name, OpenHow::ReadShared));
        refused(name, dir.create_new(name, 0o600));
    }
    refused("a link to a directory", dir.sub("dirlink"));
    dir.open_file("twice", OpenHow::ReadShared).unwrap();
    dir.open_file("file", OpenHow::Write).unwrap();
    // Logs are not waited for either: what is in the way of one goes.
    dir.open_log("fifo", 0o600).unwrap().write_all(b"log").unwrap();
    assert_eq!(dir.tail("fifo", 0, 2).unwrap(), b"og");
}

#[test]
fn a_socket_is_connected_to_whatever_the_length_of_its_path() {
    let place = tempfile::tempdir().unwrap();
    let long = place.path().join("x".repeat(120));
    fs::create_dir(&long).unwrap();
    let dir = Dir::open_root(&long).unwrap();
    // A path through the descriptor, for the path itself is longer than a socket's name may be.
    let listener = UnixListener::bind(format!("/proc/self/fd/{}/socket", dir.as_fd().as_raw_fd())).unwrap();
    let mut stream = dir.connect_socket("socket").unwrap();
    stream.write_all(b"hello").unwrap();
    drop(stream);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut listener.accept().unwrap().0, &mut said).unwrap();
    assert_eq!(said, "hello");
    // Who does not accept does not keep anyone waiting.
    rustix::net::listen(&listener, 1).unwrap();
    let mut waiting = Vec::new();
    let error = loop {
        match dir.connect_socket("socket") {
            Ok(stream) => waiting.push(stream),
            Err(error) => break std::io::Error::from(error),
        }
        assert!(waiting.len() < 10);
    };
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}");
    drop(listener);
    refused("nobody listens", dir.connect_socket("socket"));
}

#[test]
fn a_tree_deeper_than_any_path_and_than_the_descriptors_there_are_is_removed() {
    let place = crate::files::in_memory();
    let dir = Dir::open_root(place.path()).unwrap();
    let mut at = dir.make("deep", 0o700, None).unwrap();
    for level in 0..3000 {
        if level % 100 == 0 {
            drop(at.create_new("file", 0o600).unwrap());
        }
        at = at.make("deeper", 0o700, None).unwrap();
    }
    drop(at);
    refused("too deep to count", dir.usage());
    dir.remove_tree("deep").unwrap();
    assert_eq!(dir.list().unwrap(), [""; 0]);
}

#[test]
fn usage_counts_what_is_on_disk_and_each_file_once() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open_root(place.path()).unwrap();
    let empty = dir.usage().unwrap();
    let sparse = dir.create_new("sparse", 0o600).unwrap();
    sparse.set_len(1 << 30).unwrap();
    assert_eq!(dir.usage().unwrap() - empty, 0, "a hole costs nothing");
    sparse.write_all_at(&[1; 1 << 20], 1 << 29).unwrap();
    sparse.sync_all().unwrap();
    let used = dir.usage().unwrap() - empty;
    assert!((1 << 20..(1 << 20) + (1 << 17)).contains(&used), "{used}");
    dir.link_shared(&sparse, "again").unwrap();
    symlink("/", place.path().join("link")).unwrap();
    let linked = dir.usage().unwrap() - empty;
    assert!(linked - used <= 4096, "{used} {linked}");
    let sub = dir.make("sub", 0o700, None).unwrap();
    sub.replace("file", &[1; 1 << 20], 0o600).unwrap();
    sub.sync_tree("file").unwrap();
    assert!(dir.usage().unwrap() - empty >= 2 << 20);
    assert!(free_space(&dir).unwrap() > 0);
}

#[test]
fn what_is_written_is_whole_private_and_leaves_nothing_beside_it() {
    let place = tempfile::tempdir().unwrap();
    let dir = Dir::open_root(place.path()).unwrap();
    for text in [b"one".as_slice(), b"another"] {
        dir.write_atomic("file", text, 0o600).unwrap();
        assert_eq!(dir.read("file", OpenHow::Read, 7).unwrap().unwrap(), text);
    }
    assert!(dir.read("file", OpenHow::Read, 6).is_err(), "longer than asked for");
    assert_eq!(dir.read("none", OpenHow::Read, 6).unwrap(), None);
    dir.make("taken", 0o700, None).unwrap();
    refused("a directory in its place", dir.write_atomic("taken", b"text", 0o600));
    assert_eq!(dir.list().unwrap(), ["file", "taken"]);
    assert_eq!(fs::metadata(place.path().join("file")).unwrap().mode() & 0o777, 0o600);
}
