//! A person at a terminal and a program in a real microVM: `mvm exec -it` in a pseudo-terminal, with its sizes, its keys and
//! its end; through the node's socket, and through a coordinator that goes and comes. And input of any length.
//!
//! Needs QEMU and the test image (`make test` installs and builds both).

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mvm_needs::{Need, can_run};
use mvm_tests::{Cluster, LoneAgent, path_text, small_pool, wait_for, wait_until};
use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

const LONG: Duration = Duration::from_secs(180);

/// `mvm` in a terminal of its own, and what that shows.
struct Screen {
    child: Child,
    keys: File,
    /// The program's end, so that the terminal outlives it.
    its: OwnedFd,
    pieces: mpsc::Receiver<Vec<u8>>,
    shown: String,
}

impl Screen {
    fn start(mvm: &Command) -> Self {
        let pty = openpty(None, None).expect("a pseudo-terminal");
        set_size(&pty.master, 33, 101);
        // A session whose terminal this is, as one has at a desk: sizes are told to it.
        let mut command = Command::new("setsid");
        command.args(["--ctty", "--wait"]).arg(mvm.get_program()).args(mvm.get_args()).env_clear();
        command.envs(mvm.get_envs().filter_map(|(name, value)| Some((name, value?)))).env("TERM", "vt100");
        let end = || Stdio::from(pty.slave.try_clone().expect("another handle"));
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().expect("setsid runs");
        let keys = File::from(pty.master);
        let mut screen = keys.try_clone().expect("another handle");
        let (tell, pieces) = mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length) = screen.read(&mut buffer) {
                if length == 0 || tell.send(buffer[..length].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child, keys, its: pty.slave, pieces, shown: String::new() }
    }

    fn types(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("the terminal takes keys");
    }

    /// Waits until this is shown behind what was waited for before; what was shown up to its end.
    fn until(&mut self, wanted: &str) -> String {
        let begun = Instant::now();
        loop {
            if let Some(at) = self.shown.find(wanted) {
                let rest = self.shown.split_off(at + wanted.len());
                return std::mem::replace(&mut self.shown, rest);
            }
            let left = LONG.saturating_sub(begun.elapsed());
            let piece = self.pieces.recv_timeout(left);
            let piece = piece.unwrap_or_else(|_| panic!("{wanted:?} is not in {:?}", self.shown));
            self.shown.push_str(&String::from_utf8_lossy(&piece));
        }
    }

    /// Whether it is as a shell expects it.
    fn is_as_before(&self) -> bool {
        let modes = tcgetattr(&self.its).expect("a terminal has modes").local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    fn ends(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until("mvm to end", LONG, || {
            status = self.child.try_wait().expect("a child can be waited for");
            status.is_some()
        });
        status.expect("it has ended")
    }

    /// The `mvm` below `setsid`, which is in a session of its own.
    fn mvm(&self) -> Pid {
        let own = self.child.id();
        let of_parent = |stat: &str| {
            let fields = stat.rsplit_once(") ")?.1;
            fields.split(' ').nth(1)?.parse::<u32>().ok()
        };
        let entries = std::fs::read_dir("/proc").expect("processes can be listed").flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let child = pids.into_iter().find(|pid| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            of_parent(&stat) == Some(own)
        });
        Pid::from_raw(i32::try_from(child.unwrap_or(own)).expect("a pid fits"))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = kill(self.mvm(), Signal::SIGKILL);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn set_size(terminal: &impl std::os::fd::AsFd, rows: u16, columns: u16) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).expect("a terminal takes a size");
}

#[test]
fn a_terminal_in_a_microvm_is_as_one_at_hand_and_is_put_back_however_mvm_ends() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let images = mvm_tests::test_images();
    let mut agent = LoneAgent::new("qemu", &["--images-dir", path_text(&images)]);
    agent.declare(&small_pool(1, 0, 0));
    agent.start();
    let id = agent.wait_counts(1, 0, 0, LONG)["running"].first().expect("one runs").clone();
    let in_guest = |script: &str| agent.mvm_ok(&["instance", "exec", &id, "--", "sh", "-c", script]);
    let on = |args: &[&str]| {
        Screen::start(&agent.mvm_command(&[&["instance", "exec", "-it", &id], args].concat()))
    };

    // Echo, sizes, an interrupt, an exit code; and the terminal is put back.
    let mut screen = on(&["--", "sh"]);
    screen.until("/ # ");
    screen.types("echo at $((40+2)) on $TERM of $(tty)\r");
    let shown = screen.until("at 42 on vt100 of /dev/pts/");
    assert!(shown.contains("echo at $((40+2))"), "what is typed is echoed: {shown:?}");
    assert!(!screen.is_as_before(), "it is raw meanwhile");
    screen.types("stty size\r");
    screen.until("33 101\r\n");
    set_size(&screen.keys, 44, 132);
    screen.types("while [ \"$(stty size)\" != '44 132' ]; do sleep 0.1; done; echo re''sized\r");
    screen.until("resized\r\n");
    screen.types("sh -c 'echo be''gun; exec sleep 1000'\r");
    screen.until("begun\r\n");
    screen.types("\x03");
    screen.types("echo still $((6*7))\r");
    screen.until("still 42\r\n");
    screen.types("exit 7\r");
    assert_eq!(screen.ends().code(), Some(7));
    assert!(screen.is_as_before(), "the terminal is put back");
    drop(screen);

    // A signal ends mvm and the command, and the terminal is put back.
    for signal in [Signal::SIGTERM, Signal::SIGHUP] {
        let mut screen = on(&["--", "sh", "-c", "echo here; exec sleep 4321"]);
        screen.until("here\r\n");
        kill(screen.mvm(), signal).expect("mvm is there");
        assert_eq!(screen.ends().code(), Some(128 + signal as i32));
        assert!(screen.is_as_before(), "after {signal}");
        wait_until("the command to be gone", LONG, || {
            in_guest("ps | grep '[s]leep 4321' || true").is_empty()
        });
    }

    // Input of any length, streamed, and without a terminal.
    let sent: Vec<u8> = (0..9_000_000_u32).map(|n| (n % 251) as u8).collect();
    let back = agent
        .mvm_with_input(&["instance", "exec", "-i", &id, "--", "sh", "-c", "sleep 1; cat"], sent.clone());
    assert!(back.status.success(), "{}", String::from_utf8_lossy(&back.stderr));
    assert!(back.stdout == sent, "{} of {} bytes came back", back.stdout.len(), sent.len());
    let unfit = agent.mvm_with_input(&["instance", "exec", "-it", &id, "--", "true"], Vec::new());
    assert_eq!(unfit.status.code(), Some(2), "-it without a terminal is refused");
}

#[test]
fn a_terminal_through_the_coordinator_goes_on_without_it_and_is_put_back_however_it_ends() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let mut cluster = Cluster::start();
    cluster.join_with_microvms("node-a");
    let pool = cluster.file("pool.json", &small_pool(1, 0, 0).to_string());
    cluster.mvm_ok(&["push", "-f", path_text(&pool), "--node", "node-a", "--timeout", "2m"]);
    let id = wait_for("a guest to run", LONG, || {
        let listed = cluster.mvm_json(&["instance", "list"]);
        let is_running = listed[0]["phase"] == "running";
        listed[0]["instance_id"].as_str().filter(|_| is_running).map(str::to_owned)
    });
    let on = |cluster: &Cluster, args: &[&str]| {
        Screen::start(&cluster.command(&[&["exec", "-it", &id], args].concat()))
    };

    let mut screen = on(&cluster, &["--", "sh"]);
    screen.until("/ # ");
    screen.types("stty size; echo of $(id -un) on $TERM\r");
    screen.until("33 101\r\n");
    screen.until("of root on vt100\r\n");
    assert!(!screen.is_as_before(), "it is raw meanwhile");
    screen.types("sh -c 'echo be''gun; exec sleep 1000'\r");
    screen.until("begun\r\n");
    screen.types("\x03");
    screen.types("echo still $((6*7))\r");
    screen.until("still 42\r\n");
    // The coordinator goes. What is typed and how large the terminal is meanwhile comes to the shell with the next one.
    cluster.kill_coordinator();
    screen.until("attaching again ...\r\n");
    screen.types("echo meanwhile $((50-8)) at $(stty size)\r");
    set_size(&screen.keys, 44, 132);
    cluster.start_coordinator();
    screen.until("meanwhile 42 at 44 132\r\n");
    screen.types("exit 7\r");
    assert_eq!(screen.ends().code(), Some(7));
    assert!(screen.is_as_before(), "the terminal is put back");
    drop(screen);

    let mut screen = on(&cluster, &["-u", "nobody", "--", "sh", "-c", "id -un; test -O $(tty) && exit 5"]);
    screen.until("nobody\r\n");
    assert_eq!(screen.ends().code(), Some(5));
    drop(screen);

    for signal in [Signal::SIGTERM, Signal::SIGHUP] {
        let mut screen = on(&cluster, &["--", "sh", "-c", "echo here; exec sleep 4321"]);
        screen.until("here\r\n");
        kill(screen.mvm(), signal).expect("mvm is there");
        assert_eq!(screen.ends().code(), Some(128 + signal as i32));
        assert!(screen.is_as_before(), "after {signal}");
        wait_until("the command to be gone", LONG, || {
            let script = "ps | grep '[s]leep 4321' || true";
            cluster.mvm_ok(&["exec", &id, "--", "sh", "-c", script]).is_empty()
        });
    }

    // Lost for good: the node is removed from under it.
    let mut screen = on(&cluster, &["--", "sh", "-c", "echo here; exec sleep 4321"]);
    screen.until("here\r\n");
    cluster.mvm_ok(&["node", "remove", "node-a"]);
    screen.until("node-a");
    assert!(screen.ends().code().is_some_and(|code| code != 0));
    assert!(screen.is_as_before(), "after a loss");
}
