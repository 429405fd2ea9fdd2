//! Programs with a terminal: what they see of it, what is typed into it, how it ends; and programs that go on unfollowed.

use std::fs;

use crate::host::{Host, Machine, code, command, done, number, shell};
use mvm_guest::protocol::exec::User;
use mvm_guest::protocol::guest_frame::Body;
use mvm_guest::protocol::host_frame::Body as Ask;
use mvm_guest::protocol::{
    Detach, Exec, Exit, Input, Ping, Reborn, Resize, Signal, Terminal, WINDOW_BYTES, Window,
};

fn on_terminal(exec: Exec) -> Exec {
    let terminal = Terminal { rows: 40, columns: 100, term: "vt220".to_owned() };
    Exec { terminal: Some(terminal), stdin: true, ..exec }
}

fn ended(code: i32) -> Exit {
    Exit { code, ..Exit::default() }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Types into an exec's terminal from this byte of all that was typed on; the number of the next one.
fn types(host: &mut Host, number: u64, what: &str, offset: u64) -> u64 {
    host.send(number, Ask::Input(Input { data: what.into(), last: false, offset }));
    offset + what.len() as u64
}

/// Reads what it shows until that holds this.
fn reads_until(host: &mut Host, number: u64, shown: &mut String, wanted: &str) {
    while !shown.contains(wanted) {
        match host.answer(number) {
            Body::Output(output) => {
                assert!(!output.stderr, "a terminal has one output");
                let end = output.offset + output.data.len() as u64;
                shown.push_str(&text(&output.data));
                host.send(number, Ask::Window(Window { bytes: end, received: 0 }));
            }
            other => panic!("{other:?} after {shown:?}, without {wanted:?}"),
        }
    }
}

#[test]
fn a_terminal_is_all_three_files_has_the_size_asked_for_and_controls_the_session() {
    let machine = Machine::new();
    let script = "test -t 0 && test -t 1 && test -t 2 && stty size && echo $TERM >&2 \
                  && stty -a | grep -o ' iutf8' && echo here > /dev/tty && test $(ps -o sid= -p $$) = $$ && exit 3";
    let outcome = machine.ready().run(on_terminal(shell(script)));
    assert_eq!(text(&outcome.stdout), "40 100\r\nvt220\r\n iutf8\r\nhere\r\n");
    assert_eq!((outcome.stderr.len(), outcome.lost, outcome.exit), (0, 0, ended(3)));
    // The usual one, and what the request says of TERM counts for more.
    let env = [("TERM".to_owned(), "dumb".to_owned())].into();
    let usual = Exec { terminal: Some(Terminal::default()), env, ..shell("stty size; echo $TERM") };
    assert_eq!(text(&machine.ready().run(usual).stdout), "24 80\r\ndumb\r\n");
}

#[test]
fn another_size_is_told_to_the_program_and_of_many_the_last_one_counts() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let number = number();
    let script =
        "trap 'stty size' WINCH; echo on; while ! [ $(stty size | cut -d' ' -f1) = 50 ]; do sleep 0.05; done";
    host.send(number, Ask::Exec(on_terminal(shell(script))));
    let mut shown = String::new();
    reads_until(&mut host, number, &mut shown, "on\r\n");
    for rows in 1..=50 {
        host.send(number, Ask::Resize(Resize { rows, columns: 132 }));
    }
    reads_until(&mut host, number, &mut shown, "50 132\r\n");
    assert_eq!(host.follow(number).exit, ended(0));
    // Of a program without a terminal, or one that is not there, it is no one's.
    host.send(number, Ask::Resize(Resize { rows: 1, columns: 1 }));
    assert_eq!(host.ask(Ask::Ping(Ping {})), done());
}

#[test]
fn what_is_typed_is_echoed_edited_and_interrupts_the_foreground_of_a_shell() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let number = number();
    // A shell that controls jobs: what it runs has a process group of its own.
    let env = [("PS1".to_owned(), "ready> ".to_owned())].into();
    host.send(number, Ask::Exec(Exec { env, ..on_terminal(command(&["sh", "-i", "-m"])) }));
    let (mut shown, mut at) = (String::new(), 0);
    reads_until(&mut host, number, &mut shown, "ready> ");
    // Erased: the kernel edits the line.
    at = types(&mut host, number, "echo wrong\x7f\x7f\x7f\x7f\x7fright\n", at);
    reads_until(&mut host, number, &mut shown, "right\r\n");
    assert!(!shown.contains("wrong\r\n"), "{shown:?}");
    // Said by the job itself, which is in the foreground then.
    at = types(&mut host, number, "sh -c 'echo be''gun; exec sleep 1000'\n", at);
    reads_until(&mut host, number, &mut shown, "begun\r\n");
    at = types(&mut host, number, "\x03", at);
    at = types(&mut host, number, "echo still $((40+2))\n", at);
    reads_until(&mut host, number, &mut shown, "still 42\r\n");
    types(&mut host, number, "exit 7\n", at);
    assert_eq!(host.follow(number).exit, ended(7));
}

#[test]
fn a_signal_reaches_the_foreground_too_and_cancelling_hangs_up() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let script = "trap 'echo hung up; exit 5' HUP; echo on; while :; do sleep 0.05; done";
    for (signal, exit) in [
        (2, Exit { code: 130, signal: 2, ..Exit::default() }),
        (0, Exit { code: 5, cancelled: true, ..Exit::default() }),
    ] {
        let number = number();
        host.send(number, Ask::Exec(on_terminal(shell(script))));
        let mut shown = String::new();
        reads_until(&mut host, number, &mut shown, "on\r\n");
        host.send(number, Ask::Signal(Signal { number: signal }));
        let outcome = host.follow(number);
        assert_eq!(outcome.exit, exit);
        assert_eq!(text(&outcome.stdout).contains("hung up"), signal == 0);
    }
}

#[test]
fn the_end_of_the_input_is_typed_also_in_the_middle_of_a_line() {
    let machine = Machine::new();
    let mut host = machine.ready();
    for (typed, shown) in [("one\ntwo\n", "one one two two"), ("half", "halfhalf"), ("", "")] {
        let number = number();
        host.send(number, Ask::Exec(on_terminal(command(&["cat"]))));
        host.send(number, Ask::Input(Input { data: typed.into(), last: true, offset: 0 }));
        let outcome = host.follow(number);
        // What is echoed may come before or after what is said.
        let said = text(&outcome.stdout);
        let mut lines: Vec<_> = said.split_whitespace().collect();
        lines.sort_unstable();
        assert_eq!((lines.join(" ").as_str(), outcome.exit), (shown, ended(0)), "{typed:?}");
    }
    // One that reads bytes is not told by a byte of its own.
    let number = number();
    host.send(number, Ask::Exec(on_terminal(shell("stty raw -echo; echo raw; head -c 2 | od -An -c"))));
    let mut shown = String::new();
    reads_until(&mut host, number, &mut shown, "raw");
    types(&mut host, number, "\x03\x04", 0);
    assert!(text(&host.follow(number).stdout).contains("003 004"));
}

#[test]
fn a_program_at_a_terminal_waits_while_its_output_is_not_read_and_loses_none() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let number = number();
    let bytes = 2_500_000;
    let script = format!("stty raw; head -c {bytes} /dev/zero; : > {}", machine.text("end"));
    host.send(number, Ask::Exec(on_terminal(shell(&script))));
    let mut read = 0;
    while read < WINDOW_BYTES {
        match host.answer(number) {
            Body::Output(output) => read += output.data.len(),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(host.ask(Ask::Ping(Ping {})), done());
    assert!(!machine.path("end").exists());
    host.send(number, Ask::Window(Window { bytes: read as u64, received: 0 }));
    let rest = host.follow(number);
    assert_eq!((read + rest.stdout.len(), rest.lost), (bytes, 0));
}

#[test]
fn what_is_left_behind_at_a_terminal_does_not_hold_its_end_back() {
    let machine = Machine::new();
    let script = "trap '' HUP; sleep 1000 & echo $!";
    let outcome = machine.ready().run(on_terminal(shell(script)));
    assert_eq!(outcome.exit, ended(0));
    let left = text(&outcome.stdout);
    std::process::Command::new("kill").arg(left.trim()).status().unwrap();
}

#[test]
fn a_detached_program_goes_on_and_is_followed_again_from_a_byte_on() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let number = number();
    let go = machine.text("go");
    let script = format!(
        "read -r one; echo \"got $one\"; while ! [ -e {go} ]; do sleep 0.02; done; read -r two; echo \"got $two\"; exit 6"
    );
    let exec = on_terminal(shell(&script));
    host.send(number, Ask::Exec(exec));
    let at = types(&mut host, number, "first\n", 0);
    let mut shown = String::new();
    reads_until(&mut host, number, &mut shown, "got first\r\n");
    host.send(number, Ask::Detach(Detach {}));
    assert_eq!(host.ask(Ask::Ping(Ping {})), done());
    fs::write(machine.path("go"), "").unwrap();
    // Whoever follows it next need not know what it was begun with, but hears how much of its input was taken.
    host.send(number, Ask::Exec(Exec { output_from: shown.len() as u64, ..Exec::default() }));
    assert!(matches!(host.next_of(number), Body::Accepted(_)));
    assert_eq!(host.next_of(number), Body::Window(Window { bytes: at, received: at }));
    types(&mut host, number, "second\n", at);
    let outcome = host.follow(number);
    assert_eq!(text(&outcome.stdout), "second\r\ngot second\r\n");
    assert_eq!(outcome.exit, ended(6));
    // One that is not there is not begun by being followed.
    assert_eq!(code(&host.ask(Ask::Exec(Exec { output_from: 1, ..Exec::default() }))), "invalid");
}

#[test]
fn a_program_that_was_let_go_of_writes_on_keeps_the_newest_and_its_end_is_told() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let number = number();
    let (lines, marker) = (500_000, machine.text("marker"));
    let script =
        format!("i=0; while [ $i -lt {lines} ]; do echo $i; i=$((i+1)); done; echo > {marker}; exit 5");
    host.send(number, Ask::Exec(Exec { command: shell(&script).command, ..Exec::default() }));
    // What it says is more than is kept, and nobody confirms any of it.
    let mut heard = 0;
    while heard < WINDOW_BYTES {
        if let Body::Output(output) = host.next_of(number) {
            heard += output.data.len();
        }
    }
    assert_eq!(host.ask(Ask::Ping(Ping {})), done());
    assert!(!machine.path("marker").exists(), "it waits for its reader");
    host.send(number, Ask::Detach(Detach {}));
    let end = loop {
        match host.next_of(number) {
            // What was under way.
            Body::Output(_) => {}
            other => break other,
        }
    };
    assert_eq!(end, Body::Exit(ended(5)));
    // The newest of it is there for those that ask.
    host.send(number, Ask::Exec(Exec { output_from: heard as u64, ..Exec::default() }));
    let rest = host.follow(number);
    assert!(rest.lost > 0 && text(&rest.stdout).ends_with(&format!("\n{}\n", lines - 1)));
    assert_eq!(rest.exit, ended(5));
}

#[test]
fn one_that_does_not_know_what_was_typed_hears_how_much_came() {
    let machine = Machine::new();
    let mut host = machine.ready();
    let number = number();
    host.send(number, Ask::Exec(on_terminal(shell("cat"))));
    assert!(matches!(host.next_of(number), Body::Accepted(_)));
    let again = Exec { tell_input: true, ..Exec::default() };
    host.send(number, Ask::Exec(again.clone()));
    assert!(matches!(host.next_of(number), Body::Accepted(_)));
    assert_eq!(host.next_of(number), Body::Window(Window::default()), "nothing came so far");
    let at = types(&mut host, number, "typed\n", 0);
    let mut shown = String::new();
    reads_until(&mut host, number, &mut shown, "typed\r\ntyped\r\n");
    host.send(number, Ask::Exec(Exec { output_from: shown.len() as u64, ..again }));
    assert!(matches!(host.next_of(number), Body::Accepted(_)));
    assert_eq!(host.next_of(number), Body::Window(Window { bytes: at, received: at }));
    host.send(number, Ask::Signal(Signal { number: 0 }));
    assert!(host.follow(number).exit.cancelled);
}

#[test]
fn it_runs_as_a_user_by_name_or_number_who_owns_the_terminal() {
    let machine = Machine::new();
    let (uid, gid) = match rustix::process::geteuid().as_raw() {
        0 => (12_345, 12_346),
        uid => (uid, rustix::process::getegid().as_raw()),
    };
    fs::create_dir(machine.path("etc")).unwrap();
    fs::write(machine.path("etc/passwd"), format!("someone:x:{uid}:{gid}::/srv/home:/bin/sh\n")).unwrap();
    let mut host = machine.ready();
    let script = shell("echo $(id -u) $(id -g) $HOME");
    let expected = format!("{uid} {gid} /srv/home");
    for user in [User::UserName("someone".to_owned()), User::UserId(uid)] {
        let outcome = host.run(Exec { user: Some(user.clone()), ..script.clone() });
        assert_eq!(text(&outcome.stdout), format!("{expected}\n"));
        let owns = shell("test -O $(tty) && echo again > $(tty) && echo $(id -u) $(id -g) $HOME");
        let outcome = host.run(Exec { user: Some(user), ..on_terminal(owns) });
        assert_eq!(text(&outcome.stdout), format!("again\r\n{expected}\r\n"));
    }
    let unknown = Exec { user: Some(User::UserName("nobody-here".to_owned())), ..script };
    assert_eq!(code(&host.ask(Ask::Exec(unknown))), "invalid");
}

#[test]
fn a_guest_of_an_older_version_says_that_it_has_none() {
    let machine = Machine::with(None, 2);
    let mut host = machine.connect();
    assert_eq!(host.hello(1, 3).features, [""; 0]);
    assert_eq!(host.ask(Ask::Reborn(Reborn { entropy: vec![7; 32], ..Reborn::default() })), done());
    assert_eq!(code(&host.ask(Ask::Exec(on_terminal(shell("true"))))), "unsupported");
    let user = Some(User::UserId(0));
    assert_eq!(code(&host.ask(Ask::Exec(Exec { user, ..shell("true") }))), "unsupported");
    assert_eq!(host.run(shell("true")).exit, ended(0));
}
