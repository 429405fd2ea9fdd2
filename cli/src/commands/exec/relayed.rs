//! A command through the coordinator: streamed both ways, and attached to again by itself when a connection is lost.

use std::io::Read as _;
use std::time::Duration;

use anyhow::anyhow;
use bytes::Bytes;
use mvm_client::Channel;
use mvm_client::{Exec, ExecError, ExecEvent, ExecInput};
use mvm_proto::wire::tunnel::v1::{self as wire, Attach, Open, Variable};
use tokio::sync::{mpsc, oneshot};

use super::{ExecArgs, ended};
use crate::client::refused;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::progress::Progress;

/// Standard input in one piece, and how many of them may wait.
const PIECE_BYTES: usize = 32 * 1024;
const WAITING_PIECES: usize = 2;
/// How long the program has to end when this process is told to; it is killed then, whether its end is heard or not.
const ENDS_WITHIN: Duration = Duration::from_millis(700);

pub(super) async fn run(
    global: &Global,
    args: ExecArgs,
    channel: Channel,
    interrupted: oneshot::Receiver<u8>,
) -> Run {
    let progress = Progress::new(global.quiet);
    let stdin = args.stdin;
    let deadline_ms = u32::try_from(global.timeout().as_millis()).unwrap_or(u32::MAX);
    let mut exec = Exec::open(channel, header(args, deadline_ms)).await.map_err(|error| failed(error, ""))?;
    let input = exec.input();
    if stdin {
        tokio::spawn(pass_on(read_stdin(), exec.input()));
    }
    tokio::select! {
        done = follow(&mut exec, progress) => done,
        Ok(code) = interrupted => {
            input.signal(0);
            let _ = tokio::time::timeout(ENDS_WITHIN, until_the_end(&mut exec)).await;
            Err(Outcome::Interrupted(code))
        }
    }
}

fn header(args: ExecArgs, deadline_ms: u32) -> Open {
    let (tenant, pool, instance) = args.target.parts();
    fn text<T: ToString>(id: Option<&T>) -> String {
        id.map(ToString::to_string).unwrap_or_default()
    }
    let open = Open {
        tenant_id: text(tenant),
        pool_id: text(pool),
        instance_id: text(instance),
        node_id: text(args.endpoint.node()),
        open_within_ms: deadline_ms,
        may_wake: true,
        is_activity: true,
        ..Open::default()
    };
    if let Some(exec_id) = args.attach {
        let attach = Attach { exec_id, output_from: args.output_from, input_from: 0 };
        return Open { kind: "attach".to_owned(), attach: Some(attach), ..open };
    }
    let seconds = args.kill_after.map_or(0, |limit| limit.as_secs().max(1));
    let exec = wire::Exec {
        command: args.command,
        env: args.env.into_iter().map(|(name, value)| Variable { name, value }).collect(),
        directory: args.workdir.unwrap_or_default(),
        timeout_seconds: u32::try_from(seconds).unwrap_or(u32::MAX),
        stdin: args.stdin,
        ..wire::Exec::default()
    };
    Open { kind: "exec".to_owned(), exec: Some(exec), ..open }
}

async fn follow(exec: &mut Exec, progress: Progress) -> Run {
    loop {
        let event = match exec.next().await {
            Ok(event) => event,
            Err(error) => return Err(failed(error, &go_on(exec))),
        };
        match event {
            ExecEvent::Opened(_) => {}
            ExecEvent::Resuming => progress.say("lost the connection; attaching again ..."),
            ExecEvent::Output { stderr, data, lost } => {
                if lost > 0 {
                    progress.say(format!("warning: {lost} bytes of output were lost"));
                }
                if stderr {
                    crate::output::error_of_command(&data);
                } else {
                    crate::output::of_command(&data)?;
                }
            }
            ExecEvent::Exit(exit) => return ended(exit.code.into(), exit.signal.into(), exit.timed_out),
        }
    }
}

async fn until_the_end(exec: &mut Exec) {
    while let Ok(event) = exec.next().await {
        if matches!(event, ExecEvent::Exit(_)) {
            return;
        }
    }
}

/// How to go on with a program that this process loses sight of.
fn go_on(exec: &Exec) -> String {
    let Some(opened) = exec.opened() else { return String::new() };
    let (tenant, pool, instance) = (&opened.tenant_id, &opened.pool_id, &opened.instance_id);
    let from = exec.output_from();
    format!(
        "\nattach again with: mvm exec {tenant}/{pool}/{instance} --attach {} --output-from {from}",
        exec.id()
    )
}

fn failed(error: ExecError, go_on: &str) -> Outcome {
    if let ExecError::Call(call) = &error
        && let Some(status) = call.status()
    {
        return refused(status);
    }
    let is_lost = matches!(error, ExecError::Lost(_));
    match error.problem() {
        Some(problem) if is_lost => {
            Outcome::Unreachable(anyhow::Error::new(problem).context(format!("{error}{go_on}")))
        }
        Some(problem) => Outcome::from(anyhow::Error::new(problem)),
        None if is_lost => {
            Outcome::Unreachable(anyhow::Error::new(error).context(format!("lost sight of it{go_on}")))
        }
        None => Outcome::Failed(anyhow!("{error}{go_on}")),
    }
}

/// Reads standard input in a thread of its own, which may be blocked in that for ever; the last piece is empty.
fn read_stdin() -> mpsc::Receiver<Bytes> {
    let (pieces, receiver) = mpsc::channel(WAITING_PIECES);
    let read = move || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = vec![0; PIECE_BYTES];
        loop {
            let count = match stdin.read(&mut buffer) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                // What can't be read has ended.
                read => read.unwrap_or(0),
            };
            let piece = Bytes::copy_from_slice(&buffer[..count]);
            if pieces.blocking_send(piece).is_err() || count == 0 {
                return;
            }
        }
    };
    // Without a thread there is no input.
    let _ = std::thread::Builder::new().name("stdin".to_owned()).spawn(read);
    receiver
}

async fn pass_on(mut pieces: mpsc::Receiver<Bytes>, input: ExecInput) {
    while let Some(piece) = pieces.recv().await {
        if piece.is_empty() {
            break;
        }
        if !input.write(piece).await {
            return;
        }
    }
    input.close().await;
}
