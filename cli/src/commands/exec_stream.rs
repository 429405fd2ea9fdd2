//! `mvm instance exec` with a terminal, a user or input of any length: both ways a stream, over the node's own socket.

use std::collections::BTreeMap;

use anyhow::anyhow;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use clap::Args;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::agent_client::AgentClient;
use crate::commands::exec::{ExecArgs, relay};
use crate::exit::{Outcome, Run};
use crate::progress::Progress;
use crate::user::{FromUser, Gives, User};

/// What only a stream can do.
#[derive(Debug, Args)]
pub(crate) struct StreamArgs {
    /// Give it a terminal, of the size that this process's has; with -i what is typed here is typed there
    #[arg(short = 't', long)]
    tty: bool,
    /// User of the guest to run as, by name or number [default: root]
    #[arg(short = 'u', long, value_name = "USER")]
    user: Option<String>,
}

impl StreamArgs {
    pub(crate) fn needs_stream(&self) -> bool {
        self.tty || self.user.is_some()
    }
}

/// Passes output on as it comes and input as it is read, each as fast as the other side takes it.
pub(crate) async fn run(agent: &AgentClient, path: &str, args: ExecArgs, progress: Progress) -> Run {
    if !agent.is_local() {
        let text = "-t and -u take the socket of the node's agent\nrun this on the node";
        return Err(Outcome::Usage(anyhow!(text)));
    }
    let user = User::begin(Gives { input: args.stdin, terminal: args.on.tty })?;
    let (to, answer) = agent.exchange(path, line(&asked(args))).await?;
    let (giving, relaying) = (give(user, to), relay(answer, progress));
    tokio::pin!(giving, relaying);
    tokio::select! {
        done = &mut relaying => done,
        given = &mut giving => match given {
            // The agent takes no more: its answer says why.
            Ok(()) => relaying.await,
            Err(interrupted) => Err(interrupted),
        },
    }
}

/// The first line: the command.
fn asked(args: ExecArgs) -> Value {
    let env: BTreeMap<_, _> = args.env.into_iter().collect();
    let mut body = json!({ "command": args.command, "env": env, "interactive": args.stdin });
    if let Some(directory) = args.workdir {
        body["directory"] = json!(directory);
    }
    if let Some(user) = args.on.user {
        body["user"] = json!(user);
    }
    if let Some(limit) = args.kill_after {
        body["timeout_seconds"] = json!(limit.as_secs().max(1));
    }
    if args.on.tty {
        let (rows, columns) = crate::output::terminal_size().unwrap_or_default();
        let term = std::env::var("TERM").unwrap_or_default();
        body["tty"] = json!({ "rows": rows, "columns": columns, "term": term });
    }
    body
}

/// Gives the command what there is for it, until the agent takes no more.
async fn give(mut user: User, to: mpsc::Sender<std::io::Result<Bytes>>) -> Run {
    loop {
        let told = match user.next().await? {
            FromUser::Input(bytes) => json!({ "stdin": STANDARD.encode(bytes) }),
            FromUser::EndOfInput => json!({ "end": true }),
            FromUser::Resize { rows, columns } => json!({ "resize": { "rows": rows, "columns": columns } }),
        };
        if to.send(Ok(line(&told))).await.is_err() {
            return Ok(());
        }
    }
}

fn line(value: &Value) -> Bytes {
    format!("{value}\n").into()
}
