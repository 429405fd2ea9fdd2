//! `mvm agent certs`: how a node gets, keeps and shows its identity.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use mvm_agent::upkeep::certs;
use mvm_pki::{CertificateStatus, CsrNames, JoinToken};
use mvm_proto::{NodeId, Timestamp};
use mvm_transport::Target;

use crate::client::parse_target;
use crate::commands::block_on;
use crate::commands::coordinator::split_names;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output::{self, Format};
use crate::paths::default_data_dir;
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum CertsCommand {
    /// Pin the cluster's root certificate
    Init(InitArgs),
    /// Join the cluster with a one-time token; the key is made here and never leaves this machine
    Request(RequestArgs),
    /// Replace the certificate now, with a new key; a running agent picks it up
    Rotate(RotateArgs),
    /// What the certificate says, how old it is and when it is renewed
    Status(StatusArgs),
}

#[derive(Debug, Args)]
pub(crate) struct Folder {
    /// The agent's data folder
    #[arg(long, value_name = "DIR", default_value_os_t = default_data_dir("agent"))]
    data_dir: PathBuf,
    /// Folder for certificates [default: certs/ in the data folder]
    #[arg(long, value_name = "DIR")]
    certs_dir: Option<PathBuf>,
}

impl Folder {
    fn path(&self) -> PathBuf {
        self.certs_dir.clone().unwrap_or_else(|| self.data_dir.join("certs"))
    }
}

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// The root certificate, as `mvm coordinator init` made it
    #[arg(long, value_name = "FILE")]
    ca: PathBuf,
    /// Replace a root that is pinned already
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    folder: Folder,
}

#[derive(Debug, Args)]
pub(crate) struct RequestArgs {
    /// The coordinator to join
    #[arg(long, value_name = "URL", env = "MVM_COORDINATOR", value_parser = parse_target)]
    coordinator: Target,
    /// The join token
    #[arg(long, env = "MVM_JOIN_TOKEN", hide_env_values = true, conflicts_with = "token_file")]
    token: Option<String>,
    /// A file that holds the join token; `-` reads standard input
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// This node's id; only checked, since the token is bound to one
    #[arg(long, value_name = "NODE")]
    node_id: Option<NodeId>,
    /// A full DNS name or IP address under which this agent is reached (repeatable); fixed from then on
    #[arg(long = "san", value_name = "NAME")]
    sans: Vec<String>,
    #[command(flatten)]
    folder: Folder,
}

#[derive(Debug, Args)]
pub(crate) struct RotateArgs {
    /// The coordinator to ask [default: the one that enrolled this node]
    #[arg(long, value_name = "URL", env = "MVM_COORDINATOR", value_parser = parse_target)]
    coordinator: Option<Target>,
    #[command(flatten)]
    folder: Folder,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// The same as `-o json`
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    folder: Folder,
}

pub(crate) fn run(global: &Global, command: CertsCommand) -> Run {
    let progress = Progress::new(global.quiet);
    match command {
        CertsCommand::Init(args) => {
            let report =
                certs::init(&args.folder.path(), &args.ca, args.force).map_err(anyhow::Error::new)?;
            for fingerprint in &report.fingerprints {
                progress.say(format!("pinned root {fingerprint}"));
            }
            progress.say("next: mvm agent certs request --coordinator https://HOST:4433 --token-file FILE");
            Ok(())
        }
        CertsCommand::Request(args) => {
            let token = token(&args)?;
            let (dns, ips) = split_names(args.sans);
            let names = CsrNames { dns, ips };
            let dir = args.folder.path();
            block_on(async {
                let status =
                    certs::request(&dir, &args.coordinator, &token, args.node_id, names, global.timeout())
                        .await
                        .map_err(anyhow::Error::new)?;
                progress.say(format!("enrolled as {}", status.identity));
                let data_dir = args.folder.data_dir.display();
                progress.say(format!("next: mvm agent serve --data-dir {data_dir}"));
                show(global.output, &status)
            })
        }
        CertsCommand::Rotate(args) => block_on(async {
            let status = certs::rotate(&args.folder.path(), args.coordinator.as_ref(), global.timeout())
                .await
                .map_err(anyhow::Error::new)?;
            show(global.output, &status)
        }),
        CertsCommand::Status(args) => {
            let now = Timestamp::from(SystemTime::now());
            let status = certs::status(&args.folder.path(), now).map_err(anyhow::Error::new)?;
            show(if args.json { Format::Json } else { global.output }, &status)
        }
    }
}

fn token(args: &RequestArgs) -> Result<JoinToken, Outcome> {
    let text = match (&args.token, &args.token_file) {
        (Some(token), _) => token.clone(),
        (None, Some(path)) => read_token(path)?,
        (None, None) => {
            return Err(Outcome::Usage(anyhow!(
                "a join token is needed: --token, --token-file or MVM_JOIN_TOKEN\n\
                 make one on the coordinator's machine: mvm coordinator token create --node NODE"
            )));
        }
    };
    JoinToken::parse(text.trim())
        .map_err(|error| Outcome::Usage(anyhow::Error::new(error).context("the join token can't be read")))
}

fn read_token(path: &Path) -> Result<String, Outcome> {
    let read = if path == Path::new("-") {
        std::io::read_to_string(std::io::stdin())
    } else {
        std::fs::read_to_string(path)
    };
    read.with_context(|| format!("could not read the token from {}", path.display())).map_err(Outcome::Usage)
}

fn show(format: Format, status: &CertificateStatus) -> Run {
    Ok(output::show(format, status, |_| {
        let mut rows = vec![
            ("identity", status.identity.clone()),
            ("subject", status.subject.clone()),
            ("state", status.state.as_str().to_owned()),
            ("serial", status.serial.clone()),
            ("not before", status.not_before.to_string()),
            ("not after", status.not_after.to_string()),
            ("life used", format!("{} %", status.percent_of_life)),
            ("next renewal", status.next_renewal.to_string()),
        ];
        rows.extend(
            status.chain.iter().map(|link| ("chain", format!("{} {}", link.subject, link.fingerprint))),
        );
        rows.extend(
            status.roots.iter().map(|root| ("root", format!("{} {}", root.subject, root.fingerprint))),
        );
        rows.extend(
            status.trust_keys.iter().map(|key| ("trust key", format!("{} {}", key.role, key.key_id))),
        );
        output::properties(rows)
    })?)
}
