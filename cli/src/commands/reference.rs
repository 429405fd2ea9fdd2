//! `mvm completion`, `mvm man`, `mvm version`: the command line describing itself.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use serde::Serialize;

use crate::args::Cli;
use crate::exit::Run;
use crate::output::{self, Format};

#[derive(Debug, Args)]
pub(crate) struct CompletionArgs {
    /// The shell to complete for
    shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Folder to write to; made if missing
    #[arg(default_value = "man")]
    folder: PathBuf,
}

pub(crate) fn completion(args: &CompletionArgs) -> Run {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "mvm", &mut script);
    Ok(output::print(&String::from_utf8_lossy(&script))?)
}

pub(crate) fn man(args: &ManArgs) -> Run {
    let folder = &args.folder;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("could not create the folder {}", folder.display()))?;
    clap_mangen::generate_to(Cli::command(), folder)
        .with_context(|| format!("could not write man pages to {}", folder.display()))?;
    Ok(output::print(&format!("man pages are in {0}; read one with: man {0}/mvm.1\n", folder.display()))?)
}

#[derive(Serialize)]
struct Version {
    version: &'static str,
    target: String,
    session_protocol: u32,
    schema_versions: Vec<u32>,
}

pub(crate) fn version(format: Format) -> Run {
    let version = Version {
        version: env!("CARGO_PKG_VERSION"),
        target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        session_protocol: mvm_proto::wire::SESSION_PROTOCOL,
        schema_versions: vec![mvm_proto::document::SCHEMA_VERSION],
    };
    Ok(output::show(format, &version, |_| {
        output::properties([
            ("mvm", version.version.to_owned()),
            ("target", version.target.clone()),
            ("session protocol", version.session_protocol.to_string()),
            (
                "document schemas",
                version.schema_versions.iter().map(u32::to_string).collect::<Vec<_>>().join(", "),
            ),
        ])
    })?)
}
