//! `mvm coordinator token`: one-time join tokens.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use mvm_proto::NodeId;
use mvm_proto::wire::control::v1::{CreateTokenRequest, ListTokensRequest, RevokeTokenRequest, Token};

use crate::client::{Operator, within};
use crate::commands::trust::pin::check_token;
use crate::exit::Run;
use crate::global::Global;
use crate::output::{self, or_dash, when};
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Create a one-time join token for one node
    Create(CreateArgs),
    /// List tokens and their state
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Revoke a token
    #[command(visible_alias = "rm")]
    Revoke(RevokeArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The node that may join with it
    #[arg(long)]
    node: NodeId,
    /// How long it can be used
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = humantime::parse_duration)]
    ttl: Duration,
    /// A full DNS name or IP address that the node's certificate may carry (repeatable); without it the node's id, localhost and the address that it joins from
    #[arg(long = "name", value_name = "NAME")]
    names: Vec<String>,
    /// Write the token to this file (0600) instead of showing it
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    operator: Operator,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    operator: Operator,
}

#[derive(Debug, Args)]
pub(crate) struct RevokeArgs {
    /// The token's id, as `list` shows it
    token_id: String,
    #[command(flatten)]
    operator: Operator,
}

pub(crate) async fn run(global: &Global, command: TokenCommand) -> Run {
    match command {
        TokenCommand::Create(args) => create(global, args).await,
        TokenCommand::List(args) => {
            let mut client = args.operator.connect(global).await?;
            let list = within(global.timeout(), client.list_tokens(ListTokensRequest {})).await?;
            Ok(output::show(global.output, &list.tokens, |wide| table(&list.tokens, wide))?)
        }
        TokenCommand::Revoke(args) => {
            let mut client = args.operator.connect(global).await?;
            let request = RevokeTokenRequest { token_id: args.token_id };
            let answer = within(global.timeout(), client.revoke_token(request)).await?;
            let tokens: Vec<Token> = answer.record.into_iter().collect();
            Ok(output::show(global.output, &tokens, |wide| table(&tokens, wide))?)
        }
    }
}

async fn create(global: &Global, args: CreateArgs) -> Run {
    let mut client = args.operator.connect(global).await?;
    let request = CreateTokenRequest {
        node_id: args.node.to_string(),
        ttl_seconds: args.ttl.as_secs(),
        names: args.names,
    };
    let answer = within(global.timeout(), client.create_token(request)).await?;
    check_token(global, &args.operator, &answer.token).await?;
    let progress = Progress::new(global.quiet);
    if let Some(path) = &args.out {
        mvm_pki::files::write_atomic(path, format!("{}\n", answer.token).as_bytes(), 0o600)
            .with_context(|| format!("could not write the token to {}", path.display()))?;
        progress.say(format!("the token is in {}", path.display()));
        return Ok(());
    }
    let life = humantime::format_duration(args.ttl);
    progress
        .say(format!("{} can join once with this token within {life}; it is not shown again:", args.node));
    Ok(output::show(global.output, &answer, |_| {
        let mut only = output::plain();
        only.add_row([answer.token.clone()]);
        only
    })?)
}

pub(crate) fn table(tokens: &[Token], wide: bool) -> output::Table {
    let mut table = if wide {
        output::table(["TOKEN", "NODE", "STATE", "EXPIRES", "CREATED", "CREATED BY", "USED", "NAMES"])
    } else {
        output::table(["TOKEN", "NODE", "STATE", "EXPIRES"])
    };
    for token in tokens {
        let expires = when(&token.expires_at, wide);
        let mut row = vec![&token.token_id, &token.node_id, &token.state, &expires];
        let names = token.names.join(" ");
        if wide {
            row.extend([&token.created_at, &token.created_by, &token.used_at, &names]);
        }
        table.add_row(row.into_iter().map(|text| or_dash(text)));
    }
    table
}
