//! Everything but execs: hello and versions, identity, readiness, files, relays, sleep, shutdown.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

use crate::host::{Host, Machine, code, done, number, reborn, shell, wait_until};
use mvm_guest::protocol::guest_frame::Body;
use mvm_guest::protocol::host_frame::Body as Ask;
use mvm_guest::protocol::{
    CancelSleep, Chunk, EndWork, Exec, ListDirectory, Ping, PrepareSleep, ReadFile, Readiness, RelayOpen,
    Secrets, SetEntry, Shutdown, WINDOW_BYTES, Window, WipeSecrets, WriteFile,
};

#[test]
fn the_newest_common_version_is_spoken_and_none_in_common_is_said() {
    let machine = Machine::new();
    assert_eq!(machine.connect().hello(1, 9).version, 3);
    assert_eq!(machine.connect().hello(1, 1).version, 1);
    let hello = machine.connect().hello(4, 9);
    assert_eq!((hello.version, hello.guest_min, hello.guest_max), (0, 1, 3));
    assert_eq!(Machine::with(None, 1).connect().hello(1, 2).version, 1);
}

#[test]
fn a_guest_of_version_1_needs_no_identity_and_refuses_what_came_later() {
    let machine = Machine::with(None, 1);
    let mut host = machine.connect();
    assert_eq!(host.hello(1, 2).readiness(), Readiness::Starting);
    host.wait_for(Readiness::Ready);
    assert_eq!(code(&host.ask(Ask::Ping(Ping {}))), "unsupported");
    assert_eq!(code(&host.ask(Ask::Reborn(reborn(1)))), "unsupported");
    assert_eq!(code(&host.ask(Ask::Exec(Exec { stdin: true, ..shell("cat") }))), "unsupported");
    // More than a window, and nobody confirms anything; nothing is said that version 1 does not know.
    let number = number();
    host.send(number, Ask::Exec(shell("head -c 2000000 /dev/zero")));
    let mut read = 0;
    loop {
        match host.next_of(number) {
            Body::Output(output) => read += output.data.len(),
            Body::Exit(_) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(read, 2_000_000);
}

#[test]
fn secrets_are_there_before_the_workload_and_gone_before_sleep() {
    let config = r#"{"workload": ["sh", "-c", "cat RUN/secrets/bundle > RUN/seen; touch RUN/worker-ready; sleep 600"],
                     "ready": "file"}"#;
    let machine = Machine::with(Some(config), 3);
    let mut host = machine.connect();
    host.hello(1, 3);
    let secrets = || Secrets { offset: 0, data: b"TOKEN=x".to_vec().into(), padding: Vec::new(), last: true };
    assert_eq!(host.ask(Ask::Secrets(secrets())), done());
    assert_eq!(host.ask(Ask::Reborn(reborn(1))), done());
    wait_until("the workload is ready", || machine.path("run/worker-ready").exists());
    assert_eq!(std::fs::read_to_string(machine.path("run/seen")).unwrap(), "TOKEN=x");
    assert_eq!(host.ask(Ask::WipeSecrets(WipeSecrets {})), done());
    assert!(!machine.path("run/secrets/bundle").exists());
    assert_eq!(host.ask(Ask::Secrets(secrets())), done());
    assert!(machine.path("run/secrets/bundle").exists());
    let mut older = machine.connect();
    older.hello(1, 2);
    assert_eq!(code(&older.ask(Ask::WipeSecrets(WipeSecrets {}))), "unsupported");
    host = machine.connect();
    host.hello(1, 3);
    assert_eq!(host.ask(Ask::Shutdown(Shutdown { grace_seconds: 0 })), done());
}

#[test]
fn an_older_identity_is_refused_and_the_same_is_taken_again() {
    let machine = Machine::new();
    let mut host = machine.connect();
    assert!(!host.hello(1, 2).configured);
    assert_eq!(host.ask(Ask::Reborn(reborn(5))), done());
    assert_eq!(host.ask(Ask::Reborn(reborn(5))), done());
    assert_eq!(code(&host.ask(Ask::Reborn(reborn(4)))), "invalid");
    assert!(machine.connect().hello(1, 2).configured);
}

#[test]
fn a_heartbeat_comes_with_the_connection() {
    let machine = Machine::new();
    let mut host = machine.connect();
    host.hello(1, 2);
    let Body::Heartbeat(beat) = host.next_of(0) else { panic!("no heartbeat") };
    assert!(beat.mem_total_kib > beat.mem_available_kib && beat.uptime_ms > 0 && beat.sequence > 0);
}

#[test]
fn frames_of_another_connection_are_dropped() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let ours = host.nonce;
    host.nonce = ours + 1_000_000;
    host.send(1, Ask::Exec(shell(&format!("echo > {}", machine.text("never")))));
    host.nonce = ours;
    assert_eq!(host.ask(Ask::Ping(Ping {})), done());
    assert!(!machine.path("never").exists());
}

#[test]
fn the_newest_connection_is_served() {
    let machine = Machine::new();
    let mut first = machine.ready();
    let mut second = machine.ready();
    assert_eq!(second.ask(Ask::Ping(Ping {})), done());
    first.send(7, Ask::Ping(Ping {}));
    // Nothing but what was said before the second came.
    while let Some((request, _)) = first.try_receive() {
        assert_ne!(request, 7);
    }
}

#[test]
fn a_lost_answer_is_repeated_and_the_work_is_not_done_twice() {
    let machine = Machine::new();
    let number = number();
    let piece =
        WriteFile { path: machine.text("file"), data: b"one".to_vec(), last: true, ..WriteFile::default() };
    let mut host = machine.ready();
    host.send(number, Ask::WriteFile(piece.clone()));
    wait_until("it is written", || machine.path("file").exists());
    drop(host);
    std::fs::remove_file(machine.path("file")).unwrap();
    let mut host = machine.ready();
    host.send(number, Ask::WriteFile(piece));
    assert_eq!(host.answer(number), done());
    assert!(!machine.path("file").exists());
}

#[test]
fn a_workload_is_ready_when_it_says_so_then_idle_and_busy() {
    let config = r#"{"workload": ["sh", "-c", "until [ -e RUN/go ]; do sleep 0.01; done; echo > RUN/worker-ready; exec sleep 1000"], "ready": "file"}"#;
    let machine = Machine::with(Some(config), 3);
    let mut host = machine.ready();
    let run = machine.path("run");
    assert_eq!(machine.connect().hello(1, 2).readiness(), Readiness::Starting);
    host = reconnected(&machine, host);
    std::fs::write(run.join("go"), "").unwrap();
    host.wait_for(Readiness::Ready);
    for (file, readiness) in [
        ("worker-idle", Readiness::Idle),
        ("worker-busy", Readiness::Busy),
        ("worker-idle", Readiness::Idle),
        ("worker-busy", Readiness::Busy),
    ] {
        std::fs::write(run.join(file), "").unwrap();
        host.wait_for(readiness);
    }
    assert_eq!(host.ask(Ask::Shutdown(Shutdown { grace_seconds: 10 })), done());
}

fn reconnected(machine: &Machine, old: Host) -> Host {
    drop(old);
    let mut host = machine.connect();
    host.hello(1, 2);
    host
}

#[test]
fn a_workload_that_ends_or_can_not_start_is_told_with_the_reason() {
    for (config, reason) in [
        (r#"{"workload": ["sh", "-c", "exit 7"]}"#, "exit code 7"),
        (r#"{"workload": ["/no/such/program"]}"#, "could not start"),
        (r#"{"workload": "text"}"#, "guest.json"),
    ] {
        let machine = Machine::with(Some(config), 3);
        let mut host = machine.connect();
        host.hello(1, 2);
        host.send(1, Ask::Reborn(reborn(1)));
        let message = host.wait_for(Readiness::Failed);
        assert!(message.contains(reason), "{message}");
    }
}

#[test]
fn files_are_written_whole_and_read_back_in_pieces() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let path = machine.text("folder/file");
    let whole: Vec<u8> = (0..300_000u32).map(|at| u8::try_from(at % 251).unwrap()).collect();
    for (at, data) in whole.chunks(100_000).enumerate() {
        let (offset, last) = (at as u64 * 100_000, at == 2);
        let piece = WriteFile { path: path.clone(), offset, data: data.to_vec(), last, mode: 0o600 };
        assert_eq!(host.ask(Ask::WriteFile(piece)), done());
        assert_eq!(machine.path("folder/file").exists(), last);
    }
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(read(&mut host, ReadFile { path: path.clone(), offset: 0, limit: 0 }), whole);
    assert_eq!(read(&mut host, ReadFile { path, offset: 250_000, limit: 7 }), whole[250_000..250_007]);
    let list = number();
    host.send(list, Ask::ListDirectory(ListDirectory { path: machine.text("folder") }));
    let Body::Directory(directory) = host.answer(list) else { panic!("no directory") };
    assert_eq!((directory.entries[0].name.as_str(), directory.entries[0].size), ("file", 300_000));
}

fn read(host: &mut Host, request: ReadFile) -> Vec<u8> {
    let number = number();
    host.send(number, Ask::ReadFile(request));
    let mut data = Vec::new();
    loop {
        match host.answer(number) {
            Body::Chunk(chunk) => {
                data.extend(chunk.data);
                if chunk.last {
                    return data;
                }
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn files_that_are_none_are_refused() {
    let machine = Machine::new();
    let mut host = machine.ready();
    for (path, expected) in
        [("/no/such/file", "not_found"), ("/", "invalid"), ("relative", "invalid"), ("/dev/zero", "invalid")]
    {
        let request = ReadFile { path: path.into(), offset: 0, limit: 0 };
        assert_eq!(code(&host.ask(Ask::ReadFile(request))), expected, "{path}");
    }
}

#[test]
fn folders_links_and_the_looks_of_a_file_are_made_and_listed() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let entry = |name: &str, mode, target: &str| SetEntry {
        path: machine.text(&format!("session/{name}")),
        mode,
        target: target.to_owned(),
        uid,
        gid,
        modified_ms: 1_700_000_000_123,
    };
    assert_eq!(host.ask(Ask::SetEntry(entry("deep/er", 0o040_750, ""))), done());
    assert_eq!(host.ask(Ask::SetEntry(entry("link", 0o120_777, "old"))), done());
    assert_eq!(host.ask(Ask::SetEntry(entry("link", 0o120_777, "deep/er"))), done());
    assert_eq!(code(&host.ask(Ask::SetEntry(entry("file", 0o100_600, "")))), "not_found");
    std::fs::write(machine.path("session/file"), "x").unwrap();
    assert_eq!(host.ask(Ask::SetEntry(entry("file", 0o100_640, ""))), done());
    assert_eq!(code(&host.ask(Ask::SetEntry(entry("file", 0o040_755, "")))), "exists");
    assert_eq!(code(&host.ask(Ask::SetEntry(entry("pipe", 0o010_644, "")))), "invalid");

    let listed = Ask::ListDirectory(ListDirectory { path: machine.text("session") });
    let Body::Directory(folder) = host.ask(listed) else { panic!("no listing") };
    let mut seen: Vec<_> =
        folder.entries.iter().map(|e| (e.name.as_str(), e.mode, e.target.as_str(), e.uid)).collect();
    seen.sort_unstable();
    assert_eq!(
        seen,
        [("deep", 0o040_755, "", uid), ("file", 0o100_640, "", uid), ("link", 0o120_777, "deep/er", uid)]
    );
    let file = folder.entries.iter().find(|entry| entry.name == "file").unwrap();
    assert_eq!(file.modified_ms, 1_700_000_000_123);
    assert!(file.changed_ms > file.modified_ms);
}

#[test]
fn work_ends_and_what_it_left_can_still_be_read() {
    let config = r#"{"workload": ["sh", "-c", "trap 'echo last words > RUN/said; exit' TERM; echo > RUN/worker-ready; while :; do sleep 0.01; done"], "ready": "file"}"#;
    let machine = Machine::with(Some(config), 3);
    let mut host = machine.ready();
    // Its word may have come with the greeting already, and comes once.
    wait_until("the workload is ready", || machine.path("run").join("worker-ready").exists());
    assert_eq!(host.ask(Ask::EndWork(EndWork { grace_seconds: 5 })), done());
    let path = machine.path("run").join("said").to_str().unwrap().to_owned();
    assert_eq!(read(&mut host, ReadFile { path, offset: 0, limit: 0 }), b"last words\n");
    assert_eq!(host.ask(Ask::Ping(Ping {})), done());
}

#[test]
fn a_relay_carries_bytes_both_ways_and_ends_with_them() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().into();
    let echo = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::copy(&mut stream.try_clone().unwrap(), &mut stream).unwrap()
    });
    let machine = Machine::new();
    let mut host = machine.ready();
    let relay = number();
    host.send(relay, Ask::RelayOpen(RelayOpen { port }));
    assert!(matches!(host.next_of(relay), Body::Accepted(_)));
    let bytes = 4 * WINDOW_BYTES;
    let (mut sent, mut taken, mut read, mut over) = (0, 0, 0, false);
    while !over {
        while sent < bytes && sent + 16 * 1024 - taken <= WINDOW_BYTES {
            sent += 16 * 1024;
            let chunk = Chunk { data: vec![b'x'; 16 * 1024], last: sent == bytes };
            host.send(relay, Ask::RelayData(chunk));
        }
        match host.next_of(relay) {
            Body::Window(window) => taken = usize::try_from(window.bytes).unwrap(),
            Body::Chunk(chunk) => {
                read += chunk.data.len();
                over = chunk.last;
                host.send(relay, Ask::Window(Window { bytes: read as u64, received: 0 }));
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((read, echo.join().unwrap()), (bytes, bytes as u64));
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    assert_eq!(code(&host.ask(Ask::RelayOpen(RelayOpen { port: nobody.into() }))), "not_found");
}

#[test]
fn a_relay_that_is_sent_more_than_its_window_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().into();
    let machine = Machine::new();
    let mut host = machine.ready();
    let relay = number();
    host.send(relay, Ask::RelayOpen(RelayOpen { port }));
    assert!(matches!(host.next_of(relay), Body::Accepted(_)));
    // Nobody reads at the other end: the kernel's buffers fill, then ours.
    for _ in 0..1000 {
        host.send(relay, Ask::RelayData(Chunk { data: vec![0; 32 * 1024], last: false }));
    }
    assert_eq!(code(&host.answer(relay)), "busy");
}

#[test]
fn sleep_waits_for_the_work_and_can_be_called_off() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let sign = machine.path("run/prepare-sleep");
    assert_eq!(host.ask(Ask::PrepareSleep(PrepareSleep { timeout_seconds: 0 })), done());
    assert!(sign.exists());
    std::fs::write(machine.path("run/worker-busy"), "").unwrap();
    host.wait_for(Readiness::Busy);
    assert_eq!(code(&host.ask(Ask::PrepareSleep(PrepareSleep { timeout_seconds: 0 }))), "timed_out");
    // Called off by the very next request. Asked again, for its answer may have come before the other's.
    let waiting = number();
    host.send(waiting, Ask::PrepareSleep(PrepareSleep { timeout_seconds: 1000 }));
    assert_eq!(host.ask(Ask::CancelSleep(CancelSleep {})), done());
    assert!(!sign.exists());
    host.send(waiting, Ask::PrepareSleep(PrepareSleep { timeout_seconds: 1000 }));
    assert_eq!(code(&host.answer(waiting)), "busy");
    // The end of the work ends the waiting.
    let waiting = number();
    host.send(waiting, Ask::PrepareSleep(PrepareSleep { timeout_seconds: 1000 }));
    assert!(matches!(host.next_of(waiting), Body::Accepted(_)));
    std::fs::write(machine.path("run/worker-idle"), "").unwrap();
    assert_eq!(host.answer(waiting), done());
}

#[test]
fn what_is_said_before_the_guest_knows_who_it_is_counts_from_then_on() {
    let machine = Machine::new();
    let mut host = machine.connect();
    assert_eq!(host.hello(1, 3).readiness(), Readiness::Starting);
    std::fs::write(machine.path("run/worker-busy"), "").unwrap();
    assert_eq!(host.ask(Ask::Reborn(reborn(1))), done());
    host.wait_for(Readiness::Busy);
}

#[test]
fn what_was_said_by_a_file_that_is_gone_does_not_count() {
    let config = r#"{"workload": ["sh", "-c", "until [ -e RUN/go ]; do sleep 0.01; done; echo > RUN/worker-ready; exec sleep 1000"], "ready": "file"}"#;
    let machine = Machine::with(Some(config), 3);
    let mut host = machine.connect();
    host.hello(1, 3);
    // A warm-up says something, and cleans up behind itself.
    for name in ["run/worker-idle", "run/worker-busy"] {
        std::fs::write(machine.path(name), "").unwrap();
        std::fs::remove_file(machine.path(name)).unwrap();
    }
    assert_eq!(host.ask(Ask::Reborn(reborn(1))), done());
    std::fs::write(machine.path("run/go"), "").unwrap();
    host.wait_for(Readiness::Ready);
}

#[test]
fn a_rebirth_takes_the_sign_of_sleep_down_but_not_that_of_the_next_one() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let sign = machine.path("run/prepare-sleep");
    for generation in 2..50 {
        assert_eq!(host.ask(Ask::PrepareSleep(PrepareSleep { timeout_seconds: 0 })), done());
        assert!(sign.exists());
        assert_eq!(host.ask(Ask::Reborn(reborn(generation))), done());
    }
    wait_until("the sign is down", || !sign.exists());
}

#[test]
fn shutdown_ends_the_workload_and_the_execs_takes_no_new_ones_and_says_so() {
    // It is asked to end, and ends when it is let.
    let config = r#"{"workload": ["sh", "-c", "trap 'echo > RUN/asked; until [ -e RUN/go ]; do sleep 0.01; done; exit 0' TERM; echo > RUN/up; while :; do sleep 0.01; done"]}"#;
    let machine = Machine::with(Some(config), 3);
    let mut host = machine.ready();
    wait_until("the workload is up", || machine.path("run/up").exists());
    let exec = number();
    host.send(exec, Ask::Exec(shell("exec sleep 1000")));
    let shutdown = number();
    host.send(shutdown, Ask::Shutdown(Shutdown { grace_seconds: 30 }));
    wait_until("the workload is asked to end", || machine.path("run/asked").exists());
    assert_eq!(code(&host.ask(Ask::Exec(shell("true")))), "busy");
    std::fs::write(machine.path("run/go"), "").unwrap();
    assert_eq!(host.answer(shutdown), done());
    machine.guest.wait_until_ended();
}

#[test]
fn an_agent_that_reads_nothing_is_not_read_and_a_new_one_is_served() {
    let machine = Machine::new();
    let mut host = machine.ready();
    host.stream.set_write_timeout(Some(std::time::Duration::from_millis(500))).unwrap();
    let mut bytes = Vec::new();
    let body = Some(Ask::ReadFile(ReadFile { path: "/no/such/file".into(), offset: 0, limit: 0 }));
    for request in 1..2000 {
        let frame = mvm_guest::protocol::HostFrame { nonce: host.nonce, request, body: body.clone() };
        mvm_guest::protocol::put_frame(&mut bytes, &frame).unwrap();
    }
    // Sooner or later the guest takes no more.
    while host.stream.write_all(&bytes).is_ok() {}
    let mut next = machine.ready();
    assert_eq!(next.ask(Ask::Ping(Ping {})), done());
}

/// Ends with the test, whatever becomes of it.
struct Program(std::process::Child);

impl Drop for Program {
    fn drop(&mut self) {
        // It has ended already when all went well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_program_serves_a_socket_and_ends_with_shutdown() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_mvm-guest"));
    command.args(["--listen", &format!("unix:{}", socket.display()), "--max-version", "2"]);
    let mut process = Program(command.spawn().unwrap());
    wait_until("it listens", || UnixStream::connect(&socket).is_ok());
    for _ in 0..20 {
        let mut host = Host::new(UnixStream::connect(&socket).unwrap());
        host.hello(1, 2);
        assert_eq!(host.ask(Ask::Ping(Ping {})), done());
    }
    let mut host = Host::new(UnixStream::connect(&socket).unwrap());
    host.hello(1, 2);
    assert_eq!(host.run(shell("echo hi")).stdout, b"hi\n");
    assert_eq!(host.ask(Ask::Shutdown(Shutdown { grace_seconds: 1 })), done());
    assert_eq!(process.0.wait().unwrap().code(), Some(0));
    let mut rest = Vec::new();
    assert!(host.stream.read_to_end(&mut rest).is_ok());
}
