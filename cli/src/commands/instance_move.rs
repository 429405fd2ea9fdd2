//! `mvm instance export` and `import`: what sleeps on one node goes on sleeping on another.

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

use crate::agent_client::{AgentClient, Pieces};
use crate::commands::instance::details;
use crate::endpoint::EndpointArgs;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::instances::InstanceName;
use crate::instances::{Found, Instances};
use crate::output;
use crate::progress::Progress;

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
    let agent = args.endpoint.open_agent(global, "instance export").await?;
    let found = Instances::open(global, &args.endpoint).await?.find(&args.instance).await?;
    let name = found.name();
    let mut archive = agent.stream(Method::POST, &found.path("/export"), Bytes::new()).await?;
    if to_standard {
        copy(&mut archive, &mut output::archive()).await?;
        progress.say(format!("{name} is exported"));
        return Ok(());
    }
    let bytes = write_whole(&mut archive, &args.file).await?;
    let shown = args.file.display();
    progress.say(format!("{name} is in {shown} ({})", output::bytes(bytes)));
    if args.remove {
        return remove(&agent, &found, &args.file, progress).await;
    }
    progress.say(
        "it is still here: remove it with --remove, or let it never be imported; two nodes must not run it",
    );
    Ok(())
}

/// Under its name only when all of it is on the disk.
async fn write_whole(archive: &mut Pieces, path: &Path) -> Result<u64, Outcome> {
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

async fn copy(archive: &mut Pieces, into: &mut impl Write) -> anyhow::Result<u64> {
    let mut bytes = 0;
    while let Some(piece) = archive.next().await.context("the archive broke off")? {
        into.write_all(&piece)?;
        bytes += piece.len() as u64;
    }
    into.flush()?;
    Ok(bytes)
}

/// Reads the archive back before the only other copy goes.
async fn remove(agent: &AgentClient, found: &Found, path: &Path, progress: Progress) -> Run {
    let header = check(path).await.with_context(|| format!("{} is not whole", path.display()))?;
    let snapshot = header.record.snapshot.ok_or_else(|| anyhow!("nothing sleeps in {}", path.display()))?;
    agent.post(&found.path("/release"), &json!({ "snapshot": snapshot.digest })).await?;
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
    let agent = args.endpoint.open_agent(global, "instance import").await?;
    let from_standard = args.file.as_os_str() == STANDARD;
    let archive: Box<dyn Read + Send> = match from_standard {
        true => Box::new(io::stdin()),
        false => {
            let opened = File::open(&args.file);
            Box::new(opened.with_context(|| format!("could not open {}", args.file.display()))?)
        }
    };
    let path = format!("/v1/instances/import?override_seconds={}", args.window.as_secs());
    let answer = agent.upload(&path, archive).await?;
    let instance: InstanceStatus =
        serde_json::from_slice(&answer).context("could not read the agent's answer")?;
    let found = Found { instance, ..Found::default() };
    let progress = Progress::new(global.quiet);
    progress.say(format!("{} is {} here", found.name(), found.instance.phase));
    if global.output != output::Format::Table && global.output != output::Format::Wide {
        output::show(global.output, &found, |_| details(&found))?;
    }
    Ok(())
}
