//! A command through the coordinator: streamed both ways, and attached to again by itself when a connection is lost.

use std::time::Duration;

use mvm_client::{Channel, Exec, ExecEvent, ExecInput};
use mvm_proto::wire::tunnel::v1::{self as wire, Attach, Open, Tty, Variable};
use tokio::sync::oneshot;

use super::{ExecArgs, ended};
use crate::client::stream_failed;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output::terminal_size;
use crate::progress::Progress;
use crate::user::{Gives, Typed, User};

/// How long the program has to end when this process is told to; it is killed then, whether its end is heard or not.
const ENDS_WITHIN: Duration = Duration::from_millis(700);

pub(super) async fn run(
    global: &Global,
    args: ExecArgs,
    channel: Channel,
    interrupted: oneshot::Receiver<u8>,
) -> Run {
    let progress = Progress::new(global.quiet);
    let gives = args.gives();
    gives.check()?;
    let header = header(args, global.open_within_ms());
    let mut exec = Exec::open(channel, header).await.map_err(|error| stream_failed(error, ""))?;
    // Not before: until there is something to type to, a key is for this process.
    let (mut user, typed) = User::begin(gives)?;
    let input = exec.input();
    if let Some((rows, columns)) = terminal_size().filter(|_| gives.terminal) {
        input.resize(rows.into(), columns.into());
    }
    if let Some(typed) = typed {
        tokio::spawn(pass_on(typed, exec.input()));
    }
    let code = tokio::select! {
        done = follow(&mut exec, gives, progress) => return done,
        Ok(code) = interrupted => code,
        code = tell_sizes(&mut user, &input) => code,
    };
    // What is said from here on is said to a terminal that is as before.
    drop(user);
    input.signal(0);
    if tokio::time::timeout(ENDS_WITHIN, until_the_end(&mut exec)).await != Ok(true) {
        progress.say(format!("warning: its end was not heard of{}", go_on(&exec, gives)));
    }
    Err(Outcome::Interrupted(code))
}

fn header(args: ExecArgs, open_within_ms: u32) -> Open {
    let (tenant, pool, instance) = args.target.parts();
    fn text<T: ToString>(id: Option<&T>) -> String {
        id.map(ToString::to_string).unwrap_or_default()
    }
    let open = Open {
        tenant_id: text(tenant),
        pool_id: text(pool),
        instance_id: text(instance),
        node_id: text(args.endpoint.node()),
        open_within_ms,
        may_wake: true,
        is_activity: true,
        ..Open::default()
    };
    if let Some(exec_id) = args.attach {
        let (output_from, input_follows) = (args.output_from, args.stdin);
        let attach = Attach { exec_id, output_from, input_follows, ..Attach::default() };
        return Open { kind: "attach".to_owned(), attach: Some(attach), ..open };
    }
    let seconds = args.kill_after.map_or(0, |limit| limit.as_secs().max(1));
    let exec = wire::Exec {
        command: args.command,
        env: args.env.into_iter().map(|(name, value)| Variable { name, value }).collect(),
        directory: args.workdir.unwrap_or_default(),
        timeout_seconds: u32::try_from(seconds).unwrap_or(u32::MAX),
        stdin: args.stdin,
        user: args.user.unwrap_or_default(),
        tty: args.tty.then(|| {
            let (rows, cols) = terminal_size().unwrap_or_default();
            Tty { rows: rows.into(), cols: cols.into(), term: std::env::var("TERM").unwrap_or_default() }
        }),
        ..wire::Exec::default()
    };
    Open { kind: "exec".to_owned(), exec: Some(exec), ..open }
}

async fn follow(exec: &mut Exec, gives: Gives, progress: Progress) -> Run {
    loop {
        let event = match exec.next().await {
            Ok(event) => event,
            Err(error) => return Err(stream_failed(error, &go_on(exec, gives))),
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

/// Whether its end was told.
async fn until_the_end(exec: &mut Exec) -> bool {
    while let Ok(event) = exec.next().await {
        if matches!(event, ExecEvent::Exit(_)) {
            return true;
        }
    }
    false
}

/// How to go on with a program that this process loses sight of.
fn go_on(exec: &Exec, gives: Gives) -> String {
    let Some(opened) = exec.opened() else { return String::new() };
    let (tenant, pool, instance) = (&opened.tenant_id, &opened.pool_id, &opened.instance_id);
    let (from, id) = (exec.output_from(), exec.id());
    let flags = match (gives.input, gives.terminal) {
        (true, true) => "-it ",
        (true, false) => "-i ",
        (false, true) => "-t ",
        (false, false) => "",
    };
    format!(
        "\nattach again with: mvm exec {flags}{tenant}/{pool}/{instance} --attach {id} --output-from {from}"
    )
}

/// Passes on what is typed until there is no more of it, or the program has ended.
async fn pass_on(mut typed: Typed, input: ExecInput) {
    while let Some(bytes) = typed.recv().await {
        if !input.write(bytes.into()).await {
            return;
        }
    }
    input.close().await;
}

/// Tells the sizes of the terminal until a signal ends the command: its exit code.
async fn tell_sizes(user: &mut User, input: &ExecInput) -> u8 {
    loop {
        match user.next_size().await {
            Ok((rows, columns)) => input.resize(rows.into(), columns.into()),
            Err(code) => return code,
        }
    }
}
