//! What a started process gets and does not get, tried with a shell. Needs no rights.

use std::io::{Seek as _, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use super::*;

const LOG: &str = "log";

fn shell<'a>(dir: &'a Path, args: &'a [String]) -> Launch<'a> {
    let log = File::options().create(true).append(true).open(dir.join(LOG)).unwrap();
    Launch {
        program: Path::new("sh"),
        args,
        dir,
        log,
        confine: None,
        images: Vec::new(),
        inherit: Vec::new(),
        cgroup: None,
    }
}

fn script(text: &str) -> Vec<String> {
    vec!["-c".to_owned(), text.to_owned()]
}

fn ended(child: &Child) -> ExitStatus {
    let (_, status) = waitpid(Some(child.pid), WaitOptions::empty()).unwrap().unwrap();
    ExitStatus::from_raw(status.as_raw())
}

#[test]
fn given_files_arrive_under_their_numbers_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = Vec::new();
    for (text, number) in [("three", 3), ("nine", 9)] {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.rewind().unwrap();
        files.push((OwnedFd::from(file), number));
    }
    let args = script("cat <&3; cat <&9; ls /proc/self/fd | tr '\\n' ' '; pwd");
    let launched = launch(&Launch { inherit: files, ..shell(dir.path(), &args) }).unwrap();
    assert_eq!(ended(&launched.child).code(), Some(0));
    let said = fs::read_to_string(dir.path().join(LOG)).unwrap();
    let here = dir.path().canonicalize().unwrap();
    // `ls` has the directory open that it lists, under the lowest free number.
    assert_eq!(said.trim(), format!("threenine0 1 2 3 4 9 {}", here.display()));
}

#[test]
fn a_number_of_the_standard_streams_is_not_given_away() {
    let dir = tempfile::tempdir().unwrap();
    let (args, file) = (script(":"), tempfile::tempfile().unwrap());
    let refused =
        launch(&Launch { inherit: vec![(file.into(), 2)], ..shell(dir.path(), &args) }).unwrap_err();
    assert!(matches!(refused, HostError::Refused(_)), "{refused}");
}

#[test]
fn what_can_not_be_started_is_told_and_leaves_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let absent = Launch { program: Path::new("no-such-program"), ..shell(dir.path(), &[]) };
    assert!(matches!(launch(&absent).unwrap_err(), HostError::ProgramMissing { .. }));
    let text = dir.path().join("text");
    fs::write(&text, "no program").unwrap();
    let refused = launch(&Launch { program: &text, ..shell(dir.path(), &[]) }).unwrap_err();
    assert!(matches!(refused, HostError::Io { .. }), "{refused}");
}

#[test]
fn a_guest_that_could_make_holes_in_its_template_is_not_started_without_a_filter() {
    let dir = tempfile::tempdir().unwrap();
    let start = |memory: &str| {
        let mut args = script(":");
        args.extend(["virtio-balloon-device,id=balloon", memory].map(str::to_owned));
        launch(&Launch { ..shell(dir.path(), &args) })
    };
    // What is not said to be shared is not.
    for memory in ["mem-path=base,share=off", "mem-path=base", "mem-path=share=onx"] {
        let refused = start(&format!("memory-backend-file,id=memory,{memory}")).unwrap_err();
        assert!(matches!(refused, HostError::Refused(_)), "{refused}");
    }
    for memory in ["memory-backend-file,id=memory,mem-path=memory,share=on", "memory-backend-ram,id=memory"] {
        assert_eq!(ended(&start(memory).unwrap().child).code(), Some(0));
    }
}
