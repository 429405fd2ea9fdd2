//! `mvm image`: what guests boot from, made and looked after on a node.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::{Args, Subcommand};
use mvm_image::{
    self, Built, Collected, ImageRef, ImageSettings, KeepRules, Manifest, NixSettings, Store, Work,
};
use mvm_proto::{Digest, ProfileId, Timestamp};
use nix::unistd::{User, geteuid};
use serde::Serialize;

use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output;
use crate::paths::default_data_dir;
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Build or import an image and print its digest: builtin:busybox, path:DIR or a Nix flake
    Build(BuildArgs),
    /// Import a folder with kernel, initrd or rootfs, and cmdline: the same as build path:DIR
    Import(ImportArgs),
    /// The images on this node
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// What an image is made of
    #[command(aliases = ["inspect", "info", "show"])]
    Get(GetArgs),
    /// Read images whole and compare them with what was sealed
    Verify(VerifyArgs),
    /// Remove images that no instance and no recent reference needs
    Gc(GcArgs),
    /// Remove one image
    #[command(visible_alias = "rm")]
    Remove(RemoveArgs),
}

#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// The agent's data folder
    #[arg(long, value_name = "DIR", env = "MVM_AGENT_DATA_DIR", default_value_os_t = default_data_dir("agent"))]
    data_dir: PathBuf,
    /// Folder with images [default: images/ in the data folder]
    #[arg(long, value_name = "DIR", env = "MVM_AGENT_IMAGES_DIR")]
    images_dir: Option<PathBuf>,
}

impl StoreArgs {
    fn open(&self) -> anyhow::Result<Store> {
        let folder = self.images_dir.clone().unwrap_or_else(|| self.data_dir.join("images"));
        refuse_anothers(&folder)?;
        Store::open(&folder).context("could not open the image store")
    }
}

/// Root works in no store of another user: who owns it could lead root to any file by a link.
fn refuse_anothers(folder: &Path) -> anyhow::Result<()> {
    let owner = folder.symlink_metadata().map(|found| found.uid());
    let Some(owner) = owner.ok().filter(|owner| *owner != 0 && geteuid().is_root()) else { return Ok(()) };
    let name =
        User::from_uid(owner.into()).ok().flatten().map_or_else(|| format!("#{owner}"), |user| user.name);
    bail!(
        "the image store {} belongs to {name}, and root does not work in it\nrun this as its owner: sudo -u {name} mvm image ...",
        folder.display()
    )
}

/// How images are made on this machine.
#[derive(Debug, Args)]
pub(crate) struct MakingArgs {
    /// The static guest program for built-in images [default: mvm-guest beside mvm]
    #[arg(long, value_name = "PATH", env = "MVM_AGENT_GUEST")]
    guest: Option<PathBuf>,
    /// Folder for downloaded packages [default: cache/ in the images folder]
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// The nix program, for flakes
    #[arg(long, value_name = "PATH", default_value = "nix")]
    nix: PathBuf,
    /// An option for `nix build`, such as --offline (repeatable)
    #[arg(long = "nix-option", value_name = "OPTION", allow_hyphen_values = true)]
    nix_options: Vec<String>,
}

impl MakingArgs {
    fn settings(&self) -> ImageSettings {
        let beside = || mvm_image::find_guest(&std::env::current_exe().ok()?);
        ImageSettings {
            guest: self.guest.clone().or_else(beside),
            cache: self.cache_dir.clone(),
            nix: NixSettings {
                program: self.nix.clone(),
                arguments: self.nix_options.clone(),
                ..NixSettings::default()
            },
            ..ImageSettings::default()
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    /// builtin:busybox, path:/DIR, or a flake: github:ORG/REPO?rev=..., git+file:///DIR, flake:/DIR
    #[arg(value_name = "REF")]
    reference: String,
    #[command(flatten)]
    outcome: OutcomeArgs,
    #[command(flatten)]
    making: MakingArgs,
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// The folder
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    #[command(flatten)]
    outcome: OutcomeArgs,
    #[command(flatten)]
    store: StoreArgs,
}

/// What is done with the result.
#[derive(Debug, Args)]
pub(crate) struct OutcomeArgs {
    /// The variant: a flake's output; other references give the same for all
    #[arg(long, value_name = "NAME", default_value = "default")]
    profile: ProfileId,
    /// Fail unless this is what comes out
    #[arg(long, value_name = "DIGEST")]
    expect: Option<Digest>,
    /// Keep it until it is removed by name
    #[arg(long)]
    pin: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    /// A digest, the beginning of one, or a reference
    #[arg(value_name = "IMAGE")]
    image: String,
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// A digest, the beginning of one, or a reference [default: every image]
    #[arg(value_name = "IMAGE")]
    image: Option<String>,
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Debug, Args)]
pub(crate) struct GcArgs {
    /// Show what would be removed and remove nothing
    #[arg(long)]
    dry_run: bool,
    /// Keep what a reference names for this long after it was built
    #[arg(long, value_name = "TIME", default_value = "7days", value_parser = humantime::parse_duration)]
    keep_references: Duration,
    /// Keep every image for this long after it was made
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = humantime::parse_duration)]
    keep_young: Duration,
    /// Continue although the agent never recorded which images its instances need
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// A digest, the beginning of one, or a reference
    #[arg(value_name = "IMAGE")]
    image: String,
    /// Remove it although instances need it; they can then not be started or woken
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    store: StoreArgs,
}

pub(crate) fn run(global: &Global, command: ImageCommand) -> Run {
    match command {
        ImageCommand::Build(args) => {
            build(global, args.reference, args.outcome, &args.making.settings(), &args.store)
        }
        ImageCommand::Import(args) => {
            let folder = args.folder.canonicalize();
            let folder =
                folder.with_context(|| format!("could not open the folder {}", args.folder.display()));
            let folder = folder.map_err(Outcome::Usage)?;
            build(
                global,
                format!("path:{}", folder.display()),
                args.outcome,
                &ImageSettings::default(),
                &args.store,
            )
        }
        ImageCommand::List(args) => list(global, &args.store),
        ImageCommand::Get(args) => {
            let store = args.store.open()?;
            let digest = find(&store, &args.image)?;
            let report = Details::of(&store, digest)?;
            Ok(output::show(global.output, &report, |_| report.table())?)
        }
        ImageCommand::Verify(args) => verify(global, &args),
        ImageCommand::Gc(args) => collect(global, &args),
        ImageCommand::Remove(args) => {
            let store = args.store.open()?;
            let digest = find(&store, &args.image)?;
            mvm_image::remove(&store, &digest, args.force).map_err(anyhow::Error::new)?;
            Progress::new(global.quiet).say(format!("removed {digest}"));
            Ok(())
        }
    }
}

fn build(
    global: &Global,
    reference: String,
    outcome: OutcomeArgs,
    settings: &ImageSettings,
    store: &StoreArgs,
) -> Run {
    let store = store.open()?;
    let progress = Progress::new(global.quiet);
    let tell = |line: &str| progress.say(line);
    let (profile, pin) = (outcome.profile, outcome.pin);
    let asked = ImageRef { flake_ref: reference, profile, digest: outcome.expect };
    let never = AtomicBool::new(false);
    let built =
        mvm_image::build(&store, &asked, settings, &Work::new(&tell, &never)).map_err(anyhow::Error::new)?;
    if pin {
        store.pin(&built.reference, &built.profile, true).map_err(anyhow::Error::new)?;
    }
    let report = Details::of(&store, built.digest)?;
    match global.output {
        // Alone on its line: it goes into a document's image_digest, or into `mvm trust`.
        output::Format::Table => output::print(&format!("{}\n", built.digest))?,
        format => output::show(format, &report, |_| report.table())?,
    }
    Ok(())
}

fn list(global: &Global, store: &StoreArgs) -> Run {
    let store = store.open()?;
    let digests = store.list().map_err(anyhow::Error::new)?;
    let images = digests.into_iter().map(|digest| Details::of(&store, digest));
    let images = images.collect::<anyhow::Result<Vec<_>>>()?;
    Ok(output::show(global.output, &images, |wide| {
        let mut table = output::table(["IMAGE", "SIZE", "MADE", "IN USE", "REFERENCES"]);
        for image in &images {
            let digest = image.digest.to_string();
            table.add_row([
                if wide { digest } else { digest.chars().take(SHORT_DIGEST).collect() },
                output::bytes(image.size_bytes),
                image.made_at.map_or_else(|| "-".to_owned(), |at| output::when(&at.to_string(), wide)),
                if image.in_use { "yes" } else { "no" }.to_owned(),
                output::or_dash(&image.named_by().join(", ")),
            ]);
        }
        table
    })?)
}

#[derive(Debug, Serialize)]
struct Verified {
    digest: Digest,
    ok: bool,
    fault: Option<String>,
}

fn verify(global: &Global, args: &VerifyArgs) -> Run {
    let store = args.store.open()?;
    let digests = match &args.image {
        Some(image) => vec![find(&store, image)?],
        None => store.list().map_err(anyhow::Error::new)?,
    };
    let verified: Vec<_> = digests
        .into_iter()
        .map(|digest| {
            let fault = store.verify(&digest).err().map(|error| format!("{:#}", anyhow::Error::new(error)));
            Verified { digest, ok: fault.is_none(), fault }
        })
        .collect();
    output::show(global.output, &verified, |_| {
        let mut table = output::table(["IMAGE", "RESULT"]);
        for image in &verified {
            table.add_row([
                image.digest.to_string(),
                image.fault.clone().unwrap_or_else(|| "as sealed".to_owned()),
            ]);
        }
        table
    })?;
    match verified.iter().filter(|image| !image.ok).count() {
        0 => Ok(()),
        damaged => Err(Outcome::Failed(anyhow!("{damaged} of {} images damaged", verified.len()))),
    }
}

fn collect(global: &Global, args: &GcArgs) -> Run {
    let store = args.store.open()?;
    let known = store.in_use_by(&args.store.data_dir).map_err(anyhow::Error::new)?.is_some();
    if !args.force && !known && args.store.data_dir.join("state").exists() {
        return Err(Outcome::Failed(anyhow!(
            "this node's agent never recorded which images its instances need\n\
             start it once, or use --force"
        )));
    }
    let rules =
        KeepRules { references_for: args.keep_references, young_for: args.keep_young, dry_run: args.dry_run };
    let collected: Collected =
        mvm_image::collect(&store, &Default::default(), &rules).map_err(anyhow::Error::new)?;
    output::show(global.output, &collected, |_| {
        let mut table = output::table(["IMAGE", "RESULT"]);
        let verb = if args.dry_run { "would be removed" } else { "removed" };
        for (digest, size) in &collected.removed {
            table.add_row([digest.to_string(), format!("{verb} ({})", output::bytes(*size))]);
        }
        for (digest, why) in &collected.kept {
            table.add_row([digest.to_string(), format!("kept: {}", why.as_str())]);
        }
        table
    })?;
    let (count, freed) = (collected.removed.len(), output::bytes(collected.freed_bytes()));
    let verb = if args.dry_run { "would free" } else { "freed" };
    Progress::new(global.quiet).say(format!("{count} images, {verb} {freed}"));
    Ok(())
}

/// Enough of a digest to tell the images of a node apart.
const SHORT_DIGEST: usize = "sha256:".len() + 16;

#[derive(Debug, Serialize)]
struct Details {
    digest: Digest,
    folder: PathBuf,
    size_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    made_at: Option<Timestamp>,
    in_use: bool,
    /// None: the image is damaged.
    manifest: Option<Manifest>,
    references: Vec<Built>,
}

impl Details {
    fn of(store: &Store, digest: Digest) -> anyhow::Result<Self> {
        let manifest = store.manifest(&digest).ok();
        let mut references = store.references()?;
        references.retain(|built| built.digest == digest);
        Ok(Self {
            digest,
            folder: store.folder(&digest),
            size_bytes: manifest.as_ref().map_or(0, Manifest::size),
            made_at: store.made_at(&digest),
            in_use: store.in_use()?.contains(&digest),
            manifest,
            references,
        })
    }

    fn named_by(&self) -> Vec<String> {
        let name = |built: &Built| match built.profile.as_str() {
            "default" => built.reference.clone(),
            profile => format!("{} ({profile})", built.reference),
        };
        self.references.iter().map(name).collect()
    }

    fn table(&self) -> output::Table {
        let mut rows = vec![
            ("digest", self.digest.to_string()),
            ("folder", self.folder.display().to_string()),
            ("made", self.made_at.map_or_else(|| "-".to_owned(), |at| output::when_exactly(&at.to_string()))),
            ("in use", if self.in_use { "yes" } else { "no" }.to_owned()),
        ];
        match &self.manifest {
            Some(manifest) => rows.extend(
                manifest
                    .files
                    .iter()
                    .map(|file| (file.name.file_name(), format!("{} bytes, {}", file.size, file.sha256))),
            ),
            None => rows.push(("manifest", "damaged".to_owned())),
        }
        for built in &self.references {
            rows.push(("reference", format!("{} ({})", built.reference, built.profile.as_str())));
            rows.extend(built.made_of.iter().map(|part| ("made of", part.clone())));
            rows.extend(built.pinned.then(|| ("pinned", "yes".to_owned())));
        }
        output::properties(rows)
    }
}

/// An image by digest, by the beginning of its digest, or by reference.
fn find(store: &Store, text: &str) -> Result<Digest, Outcome> {
    if let Ok(digest) = text.parse() {
        return Ok(digest);
    }
    let references = store.references().map_err(anyhow::Error::new)?;
    let mut found: Vec<Digest> =
        references.into_iter().filter(|built| built.reference == text).map(|built| built.digest).collect();
    if found.is_empty() {
        let hex = text.strip_prefix("sha256:").unwrap_or(text);
        found = store.list().map_err(anyhow::Error::new)?;
        found.retain(|digest| hex.len() >= 4 && digest.hex().starts_with(hex));
    }
    found.sort();
    found.dedup();
    match found[..] {
        [digest] => Ok(digest),
        [] => Err(Outcome::Failed(anyhow!("there is no image {text} on this node"))),
        _ => Err(Outcome::Failed(anyhow!("{text} may mean {} images; name one by its digest", found.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_works_in_no_store_of_another_user() {
        let dir = tempfile::tempdir().unwrap();
        refuse_anothers(&dir.path().join("none")).unwrap();
        refuse_anothers(dir.path()).unwrap();
        if !mvm_needs::can_run(&[mvm_needs::Need::Root]) {
            return;
        }
        std::os::unix::fs::chown(dir.path(), Some(65_534), None).unwrap();
        let refused = refuse_anothers(dir.path()).unwrap_err().to_string();
        assert!(refused.contains("sudo -u nobody mvm image"), "{refused}");
    }
}
