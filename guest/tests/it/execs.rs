//! Programs run for the agent: what they get, what they say, how they end, and what survives a broken connection.

use crate::host::{self, Machine, Outcome, code, command, number, shell, wait_until};
use mvm_guest::limits;
use mvm_guest::protocol::guest_frame::Body;
use mvm_guest::protocol::host_frame::Body as Ask;
use mvm_guest::protocol::{Exec, Exit, Forget, Input, Signal, WINDOW_BYTES, Window};

fn ended(code: i32) -> Exit {
    Exit { code, ..Exit::default() }
}

#[test]
fn both_streams_and_the_exit_code_arrive() {
    let machine = Machine::new();
    let outcome = machine.ready().run(shell("echo out; echo err >&2; exit 3"));
    let expected = Outcome { stdout: b"out\n".to_vec(), stderr: b"err\n".to_vec(), lost: 0, exit: ended(3) };
    assert_eq!(outcome, expected);
}

#[test]
fn environment_comes_from_the_image_then_the_identity_then_the_request() {
    let machine = Machine::with(Some(r#"{"env": {"A": "image", "B": "image", "C": "image"}}"#), 3);
    let mut host = machine.connect();
    host.hello(1, 2);
    let mut identity = host::reborn(1);
    identity.env = [("B", "identity"), ("C", "identity")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    assert_eq!(host.ask(Ask::Reborn(identity)), host::done());
    let env = [("C".to_owned(), "request".to_owned())].into();
    let outcome = host.run(Exec { env, directory: "/tmp".into(), ..shell("echo $A $B $C; pwd") });
    assert_eq!(String::from_utf8(outcome.stdout).unwrap(), "image identity request\n/tmp\n");
}

#[test]
fn programs_that_can_not_be_started_say_why() {
    let machine = Machine::new();
    let mut host = machine.ready();
    assert_eq!(code(&host.ask(Ask::Exec(command(&["/no/such/program"])))), "not_found");
    assert_eq!(code(&host.ask(Ask::Exec(command(&["/etc/passwd"])))), "denied");
    assert_eq!(code(&host.ask(Ask::Exec(command(&[])))), "invalid");
    assert_eq!(code(&host.ask(Ask::Exec(command(&["a\0b"])))), "invalid");
}

#[test]
fn a_working_directory_that_is_not_there_is_what_the_refusal_names() {
    let machine = Machine::new();
    let mut host = machine.ready();
    for (directory, expected) in [("/no/such", "not_found"), ("/etc/passwd", "invalid")] {
        let answer = host.ask(Ask::Exec(Exec { directory: directory.into(), ..shell("true") }));
        let Body::Failure(failure) = answer else { panic!("{answer:?}") };
        assert_eq!(failure.code, expected);
        assert!(failure.message.starts_with(&format!("working directory {directory}: ")), "{failure:?}");
        assert!(!failure.message.contains("sh"), "{failure:?}");
    }
}

#[test]
fn time_that_is_over_ends_the_whole_group() {
    let machine = Machine::new();
    let pid = machine.text("pid");
    // The child in the background would go on without its parent.
    let script = format!("sleep 1000 & echo $! > {pid}; wait");
    // Long enough for a shell on a busy machine to get as far as waiting.
    let outcome = machine.ready().run(Exec { timeout_seconds: 5, ..shell(&script) });
    assert_eq!(outcome.exit, Exit { code: 137, signal: 9, timed_out: true, cancelled: false });
    let child = std::fs::read_to_string(machine.path("pid")).unwrap();
    wait_until("the child has ended", || is_gone(child.trim()));
}

/// Gone, or dead and waiting for a parent that is not ours.
fn is_gone(pid: &str) -> bool {
    let pid: u32 = pid.parse().unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
}

#[test]
fn signals_and_cancelling_reach_the_program() {
    let machine = Machine::new();
    let mut host = machine.ready();
    for (signal, exit) in [
        (15, Exit { code: 143, signal: 15, ..Exit::default() }),
        (0, Exit { code: 143, signal: 15, cancelled: true, ..Exit::default() }),
    ] {
        let number = number();
        host.send(number, Ask::Exec(command(&["sleep", "1000"])));
        host.send(number, Ask::Signal(Signal { number: signal }));
        assert_eq!(host.follow(number).exit, exit);
    }
}

#[test]
fn a_program_that_ignores_cancelling_is_killed() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let number = number();
    host.send(number, Ask::Exec(shell("trap '' TERM; echo on; while :; do sleep 1000; done")));
    assert!(matches!(host.answer(number), Body::Output(_)));
    host.send(number, Ask::Signal(Signal { number: 0 }));
    let exit = host.follow(number).exit;
    assert_eq!((exit.signal, exit.cancelled), (9, true));
}

#[test]
fn input_is_taken_once_and_in_order_however_often_it_is_sent() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let number = number();
    host.send(number, Ask::Exec(Exec { stdin: true, ..command(&["cat"]) }));
    let input = |data: &str, offset, last| Ask::Input(Input { data: data.into(), last, offset });
    host.send(number, input("one ", 0, false));
    host.send(number, input("one ", 0, false));
    // With a gap: not taken.
    host.send(number, input("never", 100, true));
    host.send(number, input("e two", 2, false));
    host.send(number, input("", 7, true));
    assert_eq!(host.follow(number).stdout, b"one two");
}

#[test]
fn more_input_than_fits_is_asked_for_again() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let number = number();
    host.send(number, Ask::Exec(Exec { stdin: true, ..shell("sleep 0.2; wc -c") }));
    let whole = vec![b'x'; 3 * WINDOW_BYTES];
    let (mut sent, mut taken) = (0, 0);
    while taken < whole.len() {
        while sent < whole.len() && sent - taken < WINDOW_BYTES {
            let end = whole.len().min(sent + 32 * 1024);
            let input =
                Input { data: whole[sent..end].to_vec(), last: end == whole.len(), offset: sent as u64 };
            host.send(number, Ask::Input(input));
            sent = end;
        }
        if let Body::Window(window) = host.next_of(number) {
            taken = usize::try_from(window.bytes).unwrap();
        }
    }
    let count = String::from_utf8(host.follow(number).stdout).unwrap();
    assert_eq!(count.trim(), whole.len().to_string());
}

#[test]
fn a_program_waits_while_its_output_is_not_read() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let number = number();
    let bytes = 3_000_000;
    host.send(
        number,
        Ask::Exec(shell(&format!("head -c {bytes} /dev/zero; echo end > {}", machine.text("end")))),
    );
    let mut read = 0;
    while read < WINDOW_BYTES {
        match host.answer(number) {
            Body::Output(output) => read += output.data.len(),
            other => panic!("{other:?}"),
        }
    }
    // No more comes: the answer to a later question comes first.
    assert_eq!(host.ask(Ask::Ping(mvm_guest::protocol::Ping {})), host::done());
    assert!(!machine.path("end").exists());
    host.send(number, Ask::Window(Window { bytes: read as u64, received: 0 }));
    let rest = host.follow(number);
    assert_eq!((read + rest.stdout.len(), rest.lost), (bytes, 0));
}

#[test]
fn a_program_outlives_its_connection_and_is_not_started_twice() {
    let machine = Machine::new();
    let (number, starts) = (number(), machine.text("starts"));
    let go = machine.text("go");
    let script =
        format!("echo x >> {starts}; echo one; while ! [ -e {go} ]; do sleep 0.01; done; echo two; exit 4");
    let mut host = machine.ready();
    host.send(number, Ask::Exec(shell(&script)));
    assert!(matches!(host.answer(number), Body::Output(_)));
    drop(host);
    let mut host = machine.ready();
    std::fs::write(machine.path("go"), "").unwrap();
    host.send(number, Ask::Exec(Exec { output_from: 4, ..shell(&script) }));
    let outcome = host.follow(number);
    assert_eq!((outcome.stdout.as_slice(), outcome.exit), (b"two\n".as_slice(), ended(4)));
    // And its end can be heard again, with everything it said.
    let mut host = machine.ready();
    host.send(number, Ask::Exec(shell(&script)));
    let outcome = host.follow(number);
    assert_eq!((outcome.stdout.as_slice(), outcome.exit), (b"one\ntwo\n".as_slice(), ended(4)));
    assert_eq!(std::fs::read_to_string(machine.path("starts")).unwrap(), "x\n");
}

#[test]
fn output_without_a_connection_is_kept_up_to_its_bound_and_the_loss_is_told() {
    let machine = Machine::new();
    let (number, kept) = (number(), limits::MIN_KEPT_OUTPUT_BYTES);
    let mut host = machine.ready();
    let script = format!("echo begun; head -c 1000000 /dev/zero; echo end; : > {}", machine.text("end"));
    let exec = Exec { max_output_bytes: kept as u64, ..shell(&script) };
    host.send(number, Ask::Exec(exec.clone()));
    assert!(matches!(host.answer(number), Body::Output(_)));
    drop(host);
    wait_until("it ran to its end without anyone", || machine.path("end").exists());
    let mut host = machine.ready();
    host.send(number, Ask::Exec(exec));
    let outcome = host.follow(number);
    assert!(outcome.stdout.ends_with(b"end\n"));
    assert_eq!(outcome.stdout.len() as u64 + outcome.lost, 1_000_010);
    assert_eq!(outcome.stdout.len(), kept);
}

#[test]
fn what_a_program_leaves_behind_does_not_hold_its_end_back() {
    let machine = Machine::new();
    let outcome = machine.ready().run(shell("sleep 1000 & echo $!"));
    assert_eq!(outcome.exit, ended(0));
    let left = String::from_utf8(outcome.stdout).unwrap();
    std::process::Command::new("kill").arg(left.trim()).status().unwrap();
}

#[test]
fn a_forgotten_program_ends_and_its_number_is_free() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let number = number();
    host.send(number, Ask::Exec(shell(&format!("echo $$ > {}; exec sleep 1000", machine.text("pid")))));
    wait_until("it runs", || {
        std::fs::read_to_string(machine.path("pid")).is_ok_and(|pid| pid.ends_with('\n'))
    });
    host.send(number, Ask::Forget(Forget {}));
    let pid = std::fs::read_to_string(machine.path("pid")).unwrap();
    wait_until("it has ended", || is_gone(pid.trim()));
    // Until its last news are out it is told again what became of the first.
    wait_until("the number is free", || {
        host.send(number, Ask::Exec(command(&["echo", "again"])));
        host.follow(number).stdout == b"again\n"
    });
}

#[test]
fn more_programs_than_the_limit_are_refused_and_can_be_asked_for_again() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let numbers: Vec<u64> = (0..limits::MAX_EXECS).map(|_| number()).collect();
    for number in &numbers {
        host.send(*number, Ask::Exec(command(&["sleep", "1000"])));
    }
    let one_more = number();
    host.send(one_more, Ask::Exec(command(&["true"])));
    assert_eq!(code(&host.answer(one_more)), "busy");
    for number in numbers {
        host.send(number, Ask::Signal(Signal { number: 9 }));
        assert_eq!(host.follow(number).exit.signal, 9);
    }
    host.send(one_more, Ask::Exec(command(&["true"])));
    assert_eq!(host.follow(one_more).exit, ended(0));
}
