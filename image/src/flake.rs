//! Nix flakes: builds one with `nix`, where it is installed, and imports the result like a folder.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use mvm_proto::ProfileId;
use serde::Deserialize;

use super::error::{ImageError, OnPath};
use super::folder::{self, Links};
use super::staging::Staging;
use super::work::Work;

/// Long enough for a first build that fetches a toolchain.
const DEFAULT_LIMIT: Duration = Duration::from_secs(3600);
const ADVICE: &str = "flakes are built by nix; install Debian's nix-bin, or give the image as path:DIR";

/// How `nix` is run.
#[derive(Debug, Clone)]
pub struct NixSettings {
    pub program: PathBuf,
    /// Added to the environment: a private store, for instance.
    pub environment: Vec<(String, String)>,
    /// Options before the reference, such as `--offline`.
    pub arguments: Vec<String>,
    pub limit: Duration,
}

impl Default for NixSettings {
    fn default() -> Self {
        Self {
            program: PathBuf::from("nix"),
            environment: Vec::new(),
            arguments: Vec::new(),
            limit: DEFAULT_LIMIT,
        }
    }
}

/// What `nix build --json` prints, as far as it is needed.
#[derive(Debug, Deserialize)]
struct Derivation {
    outputs: std::collections::BTreeMap<String, PathBuf>,
}

/// Builds one output and copies its files into `staging`.
pub(super) fn build(
    flake: &str,
    profile: &ProfileId,
    nix: &NixSettings,
    staging: &mut Staging,
    work: &Work<'_>,
) -> Result<Vec<String>, ImageError> {
    work.say(format!("nix builds {flake}#{}", profile.as_str()));
    let mut build = Command::new(&nix.program);
    // Debian's nix has flakes switched off in its settings.
    build.args([
        "--extra-experimental-features",
        "nix-command flakes",
        "build",
        "--json",
        "--no-link",
        "--no-write-lock-file",
    ]);
    build.args(&nix.arguments).arg(format!("{flake}#{}", profile.as_str()));
    build.envs(nix.environment.iter().map(|(name, value)| (name, value)));
    let printed = work.run(&mut build, nix.limit, ADVICE).map_err(name_nix)?;
    let unreadable = || ImageError::Reference {
        reference: flake.to_owned(),
        fault: "nix did not say where it put what it built".to_owned(),
    };
    let built: Vec<Derivation> = serde_json::from_str(&printed).map_err(|_| unreadable())?;
    let out = built.iter().find_map(|derivation| derivation.outputs.get("out")).ok_or_else(unreadable)?;
    let real = out.canonicalize().on("find what nix built", out)?;
    let store = real.parent().map(Path::to_owned).ok_or_else(unreadable)?;
    folder::import(&real, &Links::Below(store), staging, work)?;
    Ok(vec![out.display().to_string()])
}

/// A program that is missing is called `nix`, however it was named.
fn name_nix(error: ImageError) -> ImageError {
    match error {
        ImageError::ProgramMissing { advice, .. } => {
            ImageError::ProgramMissing { program: "nix".to_owned(), advice }
        }
        other => other,
    }
}
