//! From exec to ready, as a supervisor sees it: the process says `READY=1`, or answers `/readyz`, whichever is first.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use mvm_tests::{Cluster, Process, free_port, path_text};
use nix::sys::signal::Signal;

use super::as_shipped;
use crate::effort::Effort;
use crate::row::{Goal, Row, Subject, Unit};

const GOAL: Goal = Goal::FigureBelow(50.0);
const NODE: &str = "node-a";
/// How long to listen for `READY=1` before asking `/readyz`; also how exact the latter is.
const ASK_EVERY: Duration = Duration::from_millis(1);
const READY_LIMIT: Duration = Duration::from_secs(20);
/// An agent may take 10 s to stop in order.
const STOP_LIMIT: Duration = Duration::from_secs(15);

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    let mut cluster = Cluster::init(as_shipped());
    let coordinator = samples(effort, &cluster, |cluster| {
        let port = free_port();
        let dir = cluster.coordinator_dir();
        let mut command = cluster.command(&["coordinator", "serve", "--data-dir", path_text(&dir)]);
        let listen = format!("127.0.0.1:{}", cluster.port);
        command.args(["--listen", &listen, "--metrics-listen", &format!("127.0.0.1:{port}")]);
        (command, port)
    })?;
    cluster.start_coordinator();
    cluster.enrol(NODE);
    let agent = samples(effort, &cluster, |cluster| {
        let port = free_port();
        let dir = cluster.agent_dir(NODE);
        let mut command =
            cluster.command(&["agent", "serve", "--data-dir", path_text(&dir), "--driver", "fake"]);
        let metrics = format!("127.0.0.1:{port}");
        command.args(["--listen", "127.0.0.1:0", "--metrics-listen", &metrics]);
        (command, port)
    })?;
    Ok(vec![row("agent, exec to ready", &agent), row("coordinator, exec to ready", &coordinator)])
}

fn row(name: &str, pairs: &[(f64, f64)]) -> Row {
    let ours: Vec<f64> = pairs.iter().map(|(ours, _)| *ours).collect();
    Row::of(Subject::Startup, name, &ours, Unit::Milliseconds)
        .beside("`mvm version`, exec to exit", pairs)
        .goal(GOAL)
}

/// Starts, times and stops in order, again and again; each beside a run of the same binary that does nothing.
fn samples(
    effort: &Effort,
    cluster: &Cluster,
    command: impl Fn(&Cluster) -> (Command, u16),
) -> Result<Vec<(f64, f64)>> {
    // The first start makes what later ones find; it is not counted.
    let all = (0..=effort.starts).map(|_| {
        let (command, port) = command(cluster);
        let ours = time_to_ready(command, port, cluster.path())?;
        let begun = Instant::now();
        cluster.mvm_ok(&["version"]);
        Ok((ours, begun.elapsed().as_secs_f64() * 1e3))
    });
    Ok(all.collect::<Result<Vec<_>>>()?.split_off(1))
}

fn time_to_ready(mut command: Command, metrics_port: u16, dir: &Path) -> Result<f64> {
    let path = dir.join("notify");
    // Left by the start before.
    let _ = std::fs::remove_file(&path);
    let socket = UnixDatagram::bind(&path)?;
    socket.set_read_timeout(Some(ASK_EVERY))?;
    command.env("NOTIFY_SOCKET", &path);
    let begun = Instant::now();
    let mut process = Process::start(command, &dir.join("startup.log"));
    while !says_ready(&socket) && !answers_ready(metrics_port) {
        if begun.elapsed() > READY_LIMIT || !process.is_running() {
            bail!("the process did not become ready:\n{}", process.log());
        }
    }
    let took = begun.elapsed().as_secs_f64() * 1e3;
    process.signal(Signal::SIGTERM);
    process.wait_exit(STOP_LIMIT);
    Ok(took)
}

fn says_ready(socket: &UnixDatagram) -> bool {
    let mut message = [0; 1024];
    let Ok(length) = socket.recv(&mut message) else { return false };
    message[..length].split(|byte| *byte == b'\n').any(|line| line == b"READY=1")
}

fn answers_ready(port: u16) -> bool {
    let ask = || -> Result<bool> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_millis(100)))?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut status = [0; 12];
        stream.read_exact(&mut status).context("no status line")?;
        Ok(&status[9..] == b"200")
    };
    ask().unwrap_or(false)
}
