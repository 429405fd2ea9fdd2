//! The commands, one file each group. They read input, call the crate that does the work, and show the result.

pub(crate) mod agent;
pub(crate) mod apply;
pub(crate) mod audit;
pub(crate) mod certs;
pub(crate) mod context;
pub(crate) mod coordinator;
pub(crate) mod cordon;
pub(crate) mod delete;
pub(crate) mod describe;
pub(crate) mod dev;
pub(crate) mod diff;
pub(crate) mod direct;
pub(crate) mod doctor;
pub(crate) mod drain;
pub(crate) mod edit;
pub(crate) mod events;
pub(crate) mod exec;
pub(crate) mod explain;
pub(crate) mod get;
pub(crate) mod image;
pub(crate) mod instance;
pub(crate) mod instance_move;
pub(crate) mod logs;
pub(crate) mod net;
pub(crate) mod node;
pub(crate) mod operator;
pub(crate) mod plan;
pub(crate) mod plan_objects;
pub(crate) mod push;
pub(crate) mod reference;
pub(crate) mod resources;
pub(crate) mod rollout;
pub(crate) mod root;
pub(crate) mod schema;
pub(crate) mod secret;
pub(crate) mod session;
pub(crate) mod tenant;
pub(crate) mod token;
pub(crate) mod top;
pub(crate) mod trust;
pub(crate) mod wait;

use std::future::Future;
use std::time::Duration;

use anyhow::Context;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::args::{Cli, Command};
use crate::exit::{Outcome, Run};

pub(crate) fn run(cli: Cli) -> Outcome {
    let global = cli.global;
    let done = match cli.command {
        Command::Agent(command) => agent::run(&global, command),
        Command::Apply(args) => block_on(apply::run(&global, args)),
        Command::Audit(command) => audit::run(&global, command),
        Command::Context(command) => context::run(&global, &command),
        Command::Cordon(args) => block_on(cordon::run(&global, args, true)),
        Command::Uncordon(args) => block_on(cordon::run(&global, args, false)),
        Command::Coordinator(command) => coordinator::run(&global, command),
        Command::Delete(args) => block_on(delete::run(&global, args)),
        Command::Describe(args) => block_on(describe::run(&global, args)),
        Command::Dev(command) => dev::run(&global, command),
        Command::Drain(args) => block_on(drain::run(&global, args)),
        Command::Diff(args) => block_on(diff::run(&global, args)),
        Command::Doctor(args) => block_on(doctor::run(&global, *args)),
        Command::Events(args) => block_on(events::run(&global, args)),
        Command::Edit(args) => block_on(edit::run(&global, args)),
        Command::Explain(args) => block_on(explain::run(&global, args)),
        Command::Get(args) => block_on(get::run(&global, args)),
        Command::Rollout(command) => block_on(rollout::run(&global, command)),
        Command::Top(command) => block_on(top::run(&global, command)),
        Command::Wait(args) => block_on(wait::run(&global, args)),
        Command::Tenant(command) => block_on(tenant::run(&global, command)),
        Command::Pool(command) => block_on(tenant::run_pool(&global, command)),
        Command::Exec(args) | Command::Instance(instance::InstanceCommand::Exec(args)) => {
            block_on_interruptible(|interrupted| exec::run(&global, *args, interrupted))
        }
        Command::Logs(args) => block_on(logs::run(&global, args)),
        Command::Instance(command) => block_on(instance::run(&global, command)),
        Command::Secret(command) => block_on(secret::run(&global, command)),
        Command::Session(command) => block_on(session::run(&global, command)),
        Command::Net(command) => block_on(net::run(&global, command)),
        Command::Node(command) => block_on(node::run(&global, command)),
        Command::Plan(args) => plan::run(&global, args),
        Command::Push(args) => block_on(push::run(&global, args)),
        Command::Image(command) => image::run(&global, command),
        Command::Trust(command) => block_on(trust::run(&global, command)),
        Command::Schema(args) => schema::run(&args),
        Command::Completion(args) => reference::completion(&args),
        Command::Man(args) => reference::man(&args),
        Command::Version => reference::version(global.output),
    };
    done.map_or_else(|outcome| outcome, |()| Outcome::Done)
}

/// How long the tasks of dropped connections get to tell their peers. The datagram that closes a QUIC connection leaves
/// when its task next runs; the rest is for a socket whose buffer is full.
const FAREWELL: Duration = Duration::from_millis(25);

/// How long a command that is blocked on a terminal or a pipe may outlive the signal that ends it.
const BLOCKED_AT_MOST: Duration = Duration::from_secs(1);

/// What shells add to the number of the signal that ended a command.
const SIGNALLED: i32 = 128;

/// One thread: enough for everything but a coordinator, and the smallest in memory.
pub(crate) fn one_thread() -> anyhow::Result<Runtime> {
    Builder::new_current_thread()
        .enable_all()
        // Blocking work is file and database access; more threads than this would only wait for the same disk.
        .max_blocking_threads(16)
        .thread_keep_alive(Duration::from_secs(1))
        .build()
        .context("could not start the runtime")
}

/// Runs a command that asks others, until it is done or SIGINT or SIGTERM ends it. However it ends, its connections
/// are closed, so that no peer counts them until they time out.
pub(crate) fn block_on(work: impl Future<Output = Run>) -> Run {
    block_on_interruptible(|interrupted| unless_interrupted(work, interrupted))
}

/// The same of a command that has something left to do when a signal ends it: it gets the exit code for the signal, and
/// less than [`BLOCKED_AT_MOST`].
pub(crate) fn block_on_interruptible<F: Future<Output = Run>>(
    work: impl FnOnce(oneshot::Receiver<u8>) -> F,
) -> Run {
    let interrupted = first_signal()?;
    one_thread()?.block_on(async {
        let done = work(interrupted).await;
        // With the work its connections were dropped, which closes them. Their tasks have yet to say so.
        let tasks = Handle::current().metrics();
        let all_ended = async {
            while tasks.num_alive_tasks() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        // A QUIC endpoint stays for late datagrams; there is nothing to wait for in them.
        let _ = tokio::time::timeout(FAREWELL, all_ended).await;
        done
    })
}

async fn unless_interrupted(work: impl Future<Output = Run>, interrupted: oneshot::Receiver<u8>) -> Run {
    tokio::select! {
        biased;
        done = work => done,
        Ok(code) = interrupted => Err(Outcome::Interrupted(code)),
    }
}

/// The exit code for the first SIGINT or SIGTERM, from now on. Listens in a thread of its own, since a command may be blocked
/// on standard input or output.
fn first_signal() -> anyhow::Result<oneshot::Receiver<u8>> {
    let (tell, told) = oneshot::channel();
    let (listens, listening) = std::sync::mpsc::channel();
    let listen = move || {
        // Without a handler a signal ends the process as it always did.
        let Ok(kind) = wait_for_signal(&listens) else { return };
        let code = SIGNALLED + kind.as_raw_value();
        // The command may be done already.
        let _ = tell.send(u8::try_from(code).unwrap_or(u8::MAX));
        std::thread::sleep(BLOCKED_AT_MOST);
        crate::terminal::restore();
        std::process::exit(code);
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(listen)
        .context("could not start a thread")?;
    // A thread that could not listen has gone.
    let _ = listening.recv();
    Ok(told)
}

fn wait_for_signal(listens: &std::sync::mpsc::Sender<()>) -> std::io::Result<SignalKind> {
    Builder::new_current_thread().enable_io().build()?.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let _ = listens.send(());
        Ok(tokio::select! {
            _ = interrupt.recv() => SignalKind::interrupt(),
            _ = terminate.recv() => SignalKind::terminate(),
        })
    })
}

/// Cancelled at the first SIGTERM or SIGINT; a second one ends the process at once.
pub(crate) fn shutdown_on_signals() -> anyhow::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate()).context("could not listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("could not listen for SIGINT")?;
    let token = CancellationToken::new();
    let shutdown = token.clone();
    tokio::spawn(async move {
        for round in 0.. {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if round == 0 {
                tracing::info!("shutting down; instances keep running");
                shutdown.cancel();
            } else {
                std::process::exit(1);
            }
        }
    });
    Ok(token)
}
