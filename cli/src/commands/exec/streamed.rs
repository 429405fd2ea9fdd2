//! A command with a terminal, a user or input of any length, through the socket of the node's own agent: a stream both ways.

use std::collections::BTreeMap;

use anyhow::anyhow;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::ExecArgs;
use super::direct::relay;
use crate::agent_client::AgentClient;
use crate::exit::{Outcome, Run};
use crate::progress::Progress;
use crate::user::{Typed, User};

type Body = mpsc::Sender<std::io::Result<Bytes>>;

/// Passes output on as it comes and input as it is read, each as fast as the other side takes it.
pub(super) async fn run(agent: &AgentClient, path: &str, args: ExecArgs, progress: Progress) -> Run {
    if !agent.is_local() {
        let text = "-t and -u take the socket of the node's agent, or a coordinator\n\
            run this on the node, or name the coordinator with --coordinator";
        return Err(Outcome::Usage(anyhow!(text)));
    }
    let (user, typed) = User::begin(args.gives())?;
    let (body, answer) = agent.exchange(path, line(&asked(args))).await?;
    if let Some(typed) = typed {
        tokio::spawn(pass_on(typed, body.clone()));
    }
    tokio::select! {
        done = relay(answer, progress) => done,
        code = tell_sizes(user, body) => Err(Outcome::Interrupted(code)),
    }
}

/// The first line: the command.
fn asked(args: ExecArgs) -> Value {
    let env: BTreeMap<_, _> = args.env.into_iter().collect();
    let mut body = json!({ "command": args.command, "env": env, "interactive": args.stdin });
    if let Some(directory) = args.workdir {
        body["directory"] = json!(directory);
    }
    if let Some(user) = args.user {
        body["user"] = json!(user);
    }
    if let Some(limit) = args.kill_after {
        body["timeout_seconds"] = json!(limit.as_secs().max(1));
    }
    if args.tty {
        let (rows, columns) = crate::output::terminal_size().unwrap_or_default();
        let term = std::env::var("TERM").unwrap_or_default();
        body["tty"] = json!({ "rows": rows, "columns": columns, "term": term });
    }
    body
}

/// Gives the command what is typed, until the agent takes no more.
async fn pass_on(mut typed: Typed, body: Body) {
    while let Some(bytes) = typed.recv().await {
        if body.send(Ok(line(&json!({ "stdin": STANDARD.encode(bytes) })))).await.is_err() {
            return;
        }
    }
    // The agent's answer says why it takes no more.
    let _ = body.send(Ok(line(&json!({ "end": true })))).await;
}

/// Tells the newest size whenever there is room for it, until a signal ends the command: its exit code.
async fn tell_sizes(mut user: User, body: Body) -> u8 {
    let mut newest = None;
    loop {
        tokio::select! {
            size = user.next_size() => match size {
                Ok(size) => newest = Some(size),
                Err(code) => return code,
            },
            Ok(room) = body.reserve(), if newest.is_some() => {
                if let Some((rows, columns)) = newest.take() {
                    room.send(Ok(line(&json!({ "resize": { "rows": rows, "columns": columns } }))));
                }
            }
        }
    }
}

fn line(value: &Value) -> Bytes {
    format!("{value}\n").into()
}
