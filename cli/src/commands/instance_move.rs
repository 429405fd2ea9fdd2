//! `mvm instance export` and `import`: what sleeps on one node goes on sleeping on another.
//!
//! Through the coordinator, or asked of the node's own agent. An archive is the same either way.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use bytes::Bytes;
use clap::Args;
use http::Method;
use mvm_agent::instance::archive::{Header, Reader};
use mvm_proto::status::InstanceStatus;
use serde_json::json;

use mvm_client::Channel;
use mvm_client::archive::{self, ArchiveError, Exported, PIECE_BYTES};
use mvm_proto::Digest;
use mvm_proto::NodeId;
use mvm_proto::wire::tunnel::v1::Open;

use crate::agent_client::{AgentClient, Pieces};
use crate::client::refused;
use crate::commands::instance::details;
use crate::endpoint::{EndpointArgs, Route};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::instances::InstanceName;
use crate::instances::{Found, Instances};
use crate::output;
use crate::progress::Progress;

/// Pieces that were read and not sent yet.
const WAITING_PIECES: usize = 4;

/// Standard input or output instead of a file.
const STANDARD: &str = "-";

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// i-0123abcd, or tenant/pool/i-0123abcd
    instance: InstanceName,
    /// The archive to write; -: standard output
    file: PathBuf,
    /// Remove the instance from this node once the archive is whole and on the disk
    #[arg(long)]
    remove: bool,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// The archive to read; -: standard input
    file: PathBuf,
    /// How long reconcile leaves the instance alone; 0s: not at all
    #[arg(long = "override", value_name = "TIME", default_value = "10m", value_parser = humantime::parse_duration)]
    window: std::time::Duration,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

pub(crate) async fn export(global: &Global, args: ExportArgs) -> Run {
    let to_standard = args.file.as_os_str() == STANDARD;
    if to_standard && args.remove {
        return Err(Outcome::Usage(anyhow!(
            "--remove needs a file: mvm can't tell when standard output is on a disk"
        )));
    }
    if !to_standard && args.file.exists() {
        let shown = args.file.display();
        return Err(Outcome::Usage(anyhow!(
            "{shown} already exists, and may be the only copy of an instance"
        )));
    }
    let progress = Progress::new(global.quiet);
    let found = Instances::open(global, &args.endpoint).await?.find(&args.instance).await?;
    let name = found.name();
    let way = Way::of(global, &args.endpoint, "instance export").await?;
    let mut archive = way.export(&found).await?;
    if to_standard {
        copy(&mut archive, &mut output::archive()).await?;
        progress.say(format!("{name} is exported"));
        return Ok(());
    }
    let bytes = write_whole(&mut archive, &args.file).await?;
    let shown = args.file.display();
    progress.say(format!("{name} is in {shown} ({})", output::bytes(bytes)));
    if args.remove {
        return remove(&way, &found, &args.file, progress).await;
    }
    progress.say(
        "it is still here: remove it with --remove, or let it never be imported; two nodes must not run it",
    );
    Ok(())
}

/// Which way an archive goes.
enum Way {
    Agent(AgentClient),
    Coordinator(Channel),
}

/// An archive as it comes.
enum Archive {
    Agent(Pieces),
    Coordinator(Exported),
}

impl Archive {
    async fn next(&mut self) -> anyhow::Result<Option<Bytes>> {
        match self {
            Self::Agent(pieces) => pieces.next().await,
            Self::Coordinator(exported) => Ok(exported.next().await?),
        }
    }
}

impl Way {
    async fn of(global: &Global, endpoint: &EndpointArgs, what: &str) -> Result<Self, Outcome> {
        match endpoint.route() {
            Route::Coordinator(operator) if !endpoint.names_an_agent() => {
                Ok(Self::Coordinator(operator.channel(global).await?))
            }
            Route::Coordinator(_) | Route::Agent => Ok(Self::Agent(endpoint.open_agent(global, what).await?)),
        }
    }

    async fn export(&self, found: &Found) -> Result<Archive, Outcome> {
        Ok(match self {
            Self::Agent(agent) => {
                Archive::Agent(agent.stream(Method::POST, &found.path("/export"), Bytes::new()).await?)
            }
            Self::Coordinator(channel) => {
                let exported = archive::export(channel.clone(), header(found)).await.map_err(failed)?;
                Archive::Coordinator(exported)
            }
        })
    }

    async fn release(&self, found: &Found, snapshot: Digest) -> Run {
        match self {
            Self::Agent(agent) => {
                agent.post(&found.path("/release"), &json!({ "snapshot": snapshot })).await?;
            }
            Self::Coordinator(channel) => {
                let released = archive::release(channel.clone(), header(found), snapshot.to_string());
                released.await.map_err(failed)?;
            }
        }
        Ok(())
    }
}

/// The header of a stream to where the instance is.
fn header(found: &Found) -> Open {
    Open {
        tenant_id: found.instance.tenant_id.clone(),
        pool_id: found.instance.pool_id.clone(),
        instance_id: found.instance.instance_id.clone(),
        node_id: found.node_id.clone(),
        ..Open::default()
    }
}

fn failed(error: ArchiveError) -> Outcome {
    if let ArchiveError::Call(call) = &error
        && let Some(status) = call.status()
    {
        return refused(status);
    }
    match error.problem() {
        Some(problem) => Outcome::from(anyhow::Error::new(problem)),
        None => Outcome::Failed(anyhow::Error::new(error)),
    }
}

/// Under its name only when all of it is on the disk.
async fn write_whole(archive: &mut Archive, path: &Path) -> Result<u64, Outcome> {
    let name = path.file_name().ok_or_else(|| anyhow!("{} is no name of a file", path.display()))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let temporary = folder.join(format!(".{}.{}.part", name.to_string_lossy(), std::process::id()));
    let written = async {
        let mut options = File::options();
        // It holds a guest's memory.
        std::os::unix::fs::OpenOptionsExt::mode(options.write(true).create_new(true), 0o600);
        let mut file = options.open(&temporary)?;
        let bytes = copy(archive, &mut file).await?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        File::open(folder)?.sync_all()?;
        Ok::<u64, anyhow::Error>(bytes)
    };
    match written.await {
        Ok(bytes) => Ok(bytes),
        Err(error) => {
            // What is left of it is of no use, and can't be told about twice.
            let _ = std::fs::remove_file(&temporary);
            Err(Outcome::Failed(error.context(format!("could not write {}", path.display()))))
        }
    }
}

async fn copy(archive: &mut Archive, into: &mut impl Write) -> anyhow::Result<u64> {
    let mut bytes = 0;
    while let Some(piece) = archive.next().await.context("the archive broke off")? {
        into.write_all(&piece)?;
        bytes += piece.len() as u64;
    }
    into.flush()?;
    Ok(bytes)
}

/// Reads the archive back before the only other copy goes.
async fn remove(way: &Way, found: &Found, path: &Path, progress: Progress) -> Run {
    let header = check(path).await.with_context(|| format!("{} is not whole", path.display()))?;
    let snapshot = header.record.snapshot.ok_or_else(|| anyhow!("nothing sleeps in {}", path.display()))?;
    way.release(found, snapshot.digest).await?;
    progress.say(format!("{} is gone from this node; it sleeps in {}", found.name(), path.display()));
    Ok(())
}

async fn check(path: &Path) -> anyhow::Result<Header> {
    let file = tokio::fs::File::open(path).await?;
    let (header, reader) = Reader::open(tokio::io::BufReader::with_capacity(1 << 20, file)).await?;
    reader.check(&header).await?;
    Ok(header)
}

pub(crate) async fn import(global: &Global, args: ImportArgs) -> Run {
    let way = Way::of(global, &args.endpoint, "instance import").await?;
    let from_standard = args.file.as_os_str() == STANDARD;
    let archive: Box<dyn Read + Send> = match from_standard {
        true => Box::new(io::stdin()),
        false => {
            let opened = File::open(&args.file);
            Box::new(opened.with_context(|| format!("could not open {}", args.file.display()))?)
        }
    };
    let window = args.window.as_secs();
    let found = match &way {
        Way::Agent(agent) => {
            let path = format!("/v1/instances/import?override_seconds={window}");
            let answer = agent.upload(&path, archive).await?;
            let instance: InstanceStatus =
                serde_json::from_slice(&answer).context("could not read the agent's answer")?;
            Found { instance, ..Found::default() }
        }
        Way::Coordinator(channel) => {
            let node = args.endpoint.node().ok_or_else(|| {
                Outcome::Usage(anyhow!("through a coordinator, --node says which node takes the instance in"))
            })?;
            let name = import_through(channel.clone(), node, archive, window).await?;
            Instances::open(global, &args.endpoint).await?.find(&name).await?
        }
    };
    let progress = Progress::new(global.quiet);
    let there = args.endpoint.node().map_or_else(|| "here".to_owned(), |node| format!("on {node}"));
    progress.say(format!("{} is {} {there}", found.name(), found.instance.phase));
    if global.output != output::Format::Table && global.output != output::Format::Wide {
        output::show(global.output, &found, |_| details(&found))?;
    }
    Ok(())
}

/// Sends an archive; the name of what was in it.
async fn import_through(
    channel: Channel,
    node: &NodeId,
    mut archive: Box<dyn Read + Send>,
    override_seconds: u64,
) -> Result<InstanceName, Outcome> {
    let open = Open { node_id: node.to_string(), ..Open::default() };
    let mut importing = archive::import(channel, open, override_seconds).await.map_err(failed)?;
    // A thread of its own: standard input may be silent for ever.
    let (pieces, mut waiting) = tokio::sync::mpsc::channel::<io::Result<Bytes>>(WAITING_PIECES);
    tokio::task::spawn_blocking(move || {
        loop {
            let mut piece = vec![0; PIECE_BYTES];
            let read = archive.read(&mut piece).map(|count| {
                piece.truncate(count);
                Bytes::from(piece)
            });
            let is_over = read.as_ref().map_or(true, Bytes::is_empty);
            if pieces.blocking_send(read).is_err() || is_over {
                return;
            }
        }
    });
    while let Some(piece) = waiting.recv().await {
        let piece = piece.context("could not read the archive")?;
        if piece.is_empty() || !importing.send(piece).await {
            break;
        }
    }
    let done = importing.finish().await.map_err(failed)?;
    let name = format!("{}/{}/{}", done.tenant_id, done.pool_id, done.instance_id);
    name.parse().map_err(|error: String| Outcome::Failed(anyhow!("could not read the answer: {error}")))
}
