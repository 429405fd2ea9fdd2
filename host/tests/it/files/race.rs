//! Every way of opening against the swapper: 10,000 tries each, and whole operations 100 to 2,000 (`MVM_SWAPPER_TRIES` for
//! more), over all kinds of bait.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mvm_host::{Dir, Host, HostError, Jail, JailFile, LocalHost, OpenHow, Operation};
use mvm_proto::InstanceId;

use crate::files::swapper::{Bait, CANARY, Honest, Scene, Swapper};

const TRIES: &str = "MVM_SWAPPER_TRIES";

fn tries() -> usize {
    std::env::var(TRIES).ok().and_then(|text| text.parse().ok()).unwrap_or(10_000)
}

/// Fails when what was read is the canary's.
fn innocent(bytes: &[u8]) {
    assert!(!bytes.windows(16).any(|window| window == &CANARY[..16]), "the canary's bytes came out");
}

fn innocent_file(mut file: &File) {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    innocent(&bytes);
}

/// Runs `act` on an open run directory while its `x` is swapped; nothing outside may notice. How often it did its work
/// and how often it was refused.
fn race<T>(
    what: &str,
    honest: Honest,
    tries: usize,
    act: impl Fn(&Dir) -> Result<T, HostError>,
) -> (usize, usize) {
    let (mut done, mut refused, mut swaps) = (0, 0, 0);
    for bait in Bait::ALL {
        let scene = Scene::new();
        let swapper = Swapper::start(&scene, "x", honest, bait);
        let dir = Dir::open_root(&scene.data_dir().join("vms")).and_then(|vms| vms.sub("run")).unwrap();
        let deadline = Instant::now() + Duration::from_secs(120);
        // The rarest of all to come out wrong gets all the tries there are.
        let enough = match bait {
            Bait::FlickeringHardLink => tries,
            _ => tries.div_ceil(Bait::ALL.len()),
        };
        let mut tried = 0;
        // On few cores one side may get all the time there is: go on until both had their share.
        while tried < enough || (swapper.swaps() < 100 && Instant::now() < deadline) {
            match act(&dir) {
                Ok(_) => done += 1,
                Err(_) => refused += 1,
            }
            tried += 1;
        }
        let swapped = swapper.stop();
        assert!(swapped >= 100, "{what}: {bait:?} was swapped {swapped} times only");
        swaps += swapped;
        if let Some(damage) = scene.damage() {
            panic!("{what} with {bait:?} reached outside:\n{damage}");
        }
    }
    println!("{what}: {done} done, {refused} refused, {swaps} swaps");
    (done, refused)
}

#[test]
fn the_swapper_catches_a_naive_open() {
    let caught = |bait| {
        let scene = Scene::new();
        let swapper = Swapper::start(&scene, "x", Honest::File, bait);
        let path: PathBuf = scene.run_dir().join("x");
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut leaked = false;
        while !leaked && Instant::now() < deadline {
            // Looking first and opening then is what the swapper is there for.
            if std::fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_file()) {
                leaked = std::fs::read(&path).is_ok_and(|bytes| bytes == CANARY);
            }
        }
        swapper.stop();
        leaked
    };
    assert!(caught(Bait::Link), "a link was never followed");
    assert!(caught(Bait::HardLink), "a second name was never read");

    // The same for what is changed: a naive write with the same kind of look goes through.
    let scene = Scene::new();
    let swapper = Swapper::start(&scene, "x", Honest::File, Bait::Link);
    let path = scene.run_dir().join("x");
    let deadline = Instant::now() + Duration::from_secs(60);
    let untouched = || std::fs::read(scene.outside().join("canary")).unwrap() == CANARY;
    while untouched() && Instant::now() < deadline {
        if std::fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_file()) {
            let _ = std::fs::write(&path, b"naive");
        }
    }
    swapper.stop();
    assert!(scene.damage().is_some(), "the harness did not see that the canary was written to");
}

#[test]
fn the_swapper_catches_a_check_of_the_number_of_names_alone() {
    // Opening and then asking whether there is one name: true of the canary, a moment after its second name went away.
    let scene = Scene::new();
    let swapper = Swapper::start(&scene, "x", Honest::File, Bait::FlickeringHardLink);
    let path = scene.run_dir().join("x");
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut leaked = false;
    while !leaked && Instant::now() < deadline {
        use std::os::unix::fs::MetadataExt as _;
        let Ok(mut file) = File::open(&path) else { continue };
        if file.metadata().is_ok_and(|meta| meta.nlink() == 1) {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).unwrap();
            leaked = bytes == CANARY;
        }
    }
    swapper.stop();
    assert!(leaked);
}

#[test]
fn nothing_outside_is_read() {
    let (done, refused) = race("open to read", Honest::File, tries(), |dir| {
        dir.open_file("x", OpenHow::Read).inspect(innocent_file)
    });
    assert!(done > 0 && refused > 0, "{done} {refused}");
    race("read", Honest::File, tries(), |dir| {
        dir.read("x", OpenHow::Read, 1000).inspect(|bytes| innocent(bytes.as_deref().unwrap_or_default()))
    });
    race("tail", Honest::File, tries(), |dir| dir.tail("x", 0, 1000).inspect(|bytes| innocent(bytes)));
    race("look", Honest::File, tries(), |dir| dir.look("x"));
    race("list a directory", Honest::Dir, tries(), |dir| {
        let names = dir.sub("x")?.list()?;
        assert!(!names.iter().any(|name| name == "deep"), "{names:?}");
        Ok(())
    });
    race("read in a directory", Honest::Dir, tries(), |dir| {
        dir.sub("x")?.open_file("file", OpenHow::Read).inspect(innocent_file)
    });
    race("usage", Honest::Dir, tries(), Dir::usage);
    race("connect", Honest::File, tries(), |dir| dir.connect_socket("x"));
}

#[test]
fn nothing_outside_is_written_or_given_away() {
    let (done, refused) = race("open to write", Honest::File, tries(), |dir| {
        let mut file = dir.open_file("x", OpenHow::Write)?;
        innocent_file(&file);
        file.set_len(0).unwrap();
        file.write_all(b"written").unwrap();
        Ok(())
    });
    assert!(done > 0 && refused > 0, "{done} {refused}");
    race("append", Honest::File, tries(), |dir| {
        dir.open_file("x", OpenHow::Append)?.write_all(b"appended").unwrap();
        Ok(())
    });
    race("log", Honest::File, tries(), |dir| {
        dir.open_log("x", 0o600)?.write_all(b"logged").unwrap();
        Ok(())
    });
    race("open or make", Honest::Nothing, tries(), |dir| {
        dir.open_or_make("x", 0o600)?.write_all(b"made").unwrap();
        Ok(())
    });
    race("create", Honest::Nothing, tries(), |dir| {
        dir.create_new("x", 0o600)?.write_all(b"new").unwrap();
        Ok(())
    });
    race("trim", Honest::File, tries(), |dir| {
        if let Ok(mut log) = dir.open_file("x", OpenHow::Append) {
            log.write_all(b"more").unwrap();
        }
        dir.trim_log("x", 1, 0o600)?;
        innocent(&dir.read("x.old", OpenHow::Read, 1000)?.unwrap_or_default());
        Ok(())
    });
    race("chmod", Honest::File, tries(), |dir| dir.chmod("x", 0o777));
    race("chown", Honest::File, tries(), |dir| dir.chown("x", (12345, 12345)));
    race("replace", Honest::File, tries(), |dir| dir.replace("x", b"replaced", 0o666));
    race("write", Honest::File, tries(), |dir| dir.write_atomic("x", b"written", 0o666));
}

#[test]
fn nothing_outside_is_made_renamed_or_removed() {
    race("make", Honest::Dir, tries(), |dir| dir.make("x", 0o777, Some((12345, 12345))));
    race("make below", Honest::Dir, tries(), |dir| dir.sub("x")?.make("below", 0o777, None));
    race("remove", Honest::File, tries(), |dir| dir.remove("x"));
    let (done, _) = race("remove all", Honest::Dir, tries(), |dir| dir.remove_tree("x"));
    assert!(done > 0);
    race("rename", Honest::Dir, tries(), |dir| {
        dir.rename("x", dir, "renamed")?;
        dir.remove_tree("renamed")
    });
    race("rename over", Honest::File, tries(), |dir| {
        let _ = dir.create_new("fresh", 0o600);
        dir.rename("fresh", dir, "x")
    });
    race("sync", Honest::Dir, tries(), |dir| dir.sync_tree("x").and_then(|()| dir.sync()));
    race("path", Honest::File, tries(), |dir| dir.link_path("/nowhere".as_ref(), "x"));
    race("name", Honest::File, tries(), |dir| {
        let file = dir.create_new("source", 0o600)?;
        let linked = dir.remove_tree("x").and_then(|()| dir.link_shared(&file, "x"));
        dir.remove("source")?;
        linked
    });
    // A disk is formatted by a program of its own, so there are fewer tries.
    race("disk", Honest::Nothing, tries() / 100, |dir| dir.make_disk("x", 1));
}

/// The operations as the agent asks for them, on the run directory of an instance whose names are swapped.
#[test]
fn no_operation_of_the_host_reaches_outside() {
    let id = InstanceId::from_bits(0x7e57);
    let (instance, x) = (|| id.clone(), || "x".to_owned());
    let operations = [
        (Honest::Dir, Operation::MakeDir { instance: instance(), name: x() }),
        (Honest::Dir, Operation::RemoveFile { instance: instance(), name: "x/file".to_owned() }),
        (Honest::Dir, Operation::RemoveFile { instance: instance(), name: x() }),
        (
            Honest::Dir,
            Operation::WriteFile { instance: instance(), name: "x/file".to_owned(), text: "w".to_owned() },
        ),
        (Honest::Dir, Operation::Rename { instance: instance(), from: x(), to: "y".to_owned() }),
        (Honest::Dir, Operation::Rename { instance: instance(), from: "y".to_owned(), to: x() }),
        (Honest::File, Operation::TrimLog { instance: instance(), name: x(), max_bytes: 1 }),
        (Honest::Dir, Operation::TrimLog { instance: instance(), name: "x/file".to_owned(), max_bytes: 1 }),
        (Honest::File, Operation::LinkFile { instance: instance(), source: "/nowhere".into(), name: x() }),
        (Honest::Dir, Operation::MakeRunDir { instance: instance() }),
    ];
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    for (honest, operation) in operations {
        // A thread is asked for each, which takes its time.
        host_race(&runtime, &id, honest, tries() / 5, |_| operation.clone());
    }
}

#[test]
fn no_jail_reaches_outside() {
    let id = InstanceId::from_bits(0x7e57);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    for (honest, source, writable, through_jail) in [
        (Honest::File, "x", true, false),
        (Honest::File, "x", false, false),
        (Honest::Dir, "x/file", true, false),
        // The name in the jail is what is swapped, and then the way to the jail.
        (Honest::File, "data.img", true, true),
    ] {
        // Each looks at all processes and control groups of the machine.
        host_race(&runtime, &id, honest, tries() / 10, |run_dir| {
            let program = if through_jail { "x" } else { "firecracker" };
            let root = run_dir.join(program).join(id.as_str()).join("root");
            let jail = Jail { instance: id.clone(), root, uid, gid };
            let file = JailFile { source: run_dir.join(source), name: "seen".to_owned(), writable };
            Operation::MakeJail { jail, files: vec![file] }
        });
    }
}

fn host_race(
    runtime: &tokio::runtime::Runtime,
    id: &InstanceId,
    honest: Honest,
    tries: usize,
    operation: impl Fn(&std::path::Path) -> Operation,
) {
    let (mut done, mut refused, mut swaps) = (0, 0, 0);
    let mut what = String::new();
    for bait in Bait::ALL {
        let scene = Scene::new();
        let host = LocalHost::new(scene.data_dir());
        let run_dir = host.run_dir(id);
        std::fs::rename(scene.run_dir(), &run_dir).unwrap();
        // The swapper and the check look for it under its first name.
        std::os::unix::fs::symlink(&run_dir, scene.run_dir()).unwrap();
        let operation = operation(&run_dir);
        what = serde_json::to_string(&operation).unwrap();
        let swapper = Swapper::start(&scene, "x", honest, bait);
        let deadline = Instant::now() + Duration::from_secs(120);
        let mut tried = 0;
        while tried < tries.div_ceil(Bait::ALL.len()) || (swapper.swaps() < 100 && Instant::now() < deadline)
        {
            match runtime.block_on(host.perform(&operation)) {
                Ok(_) => done += 1,
                Err(_) => refused += 1,
            }
            // What was given to a jail has the canary's bytes if it ever was the canary.
            if let Operation::MakeJail { jail, .. } = &operation {
                innocent(&std::fs::read(jail.root.join("seen")).unwrap_or_default());
            }
            tried += 1;
        }
        let swapped = swapper.stop();
        assert!(swapped >= 100, "{what}: {bait:?} was swapped {swapped} times only");
        swaps += swapped;
        std::fs::remove_file(scene.run_dir()).unwrap();
        std::fs::rename(&run_dir, scene.run_dir()).unwrap();
        if let Some(damage) = scene.damage() {
            panic!("{what} with {bait:?} reached outside:\n{damage}");
        }
    }
    println!("{what}: {done} done, {refused} refused, {swaps} swaps");
}
