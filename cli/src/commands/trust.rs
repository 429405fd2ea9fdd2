//! `mvm trust`: who may sign documents and images.
//!
//! `vouch` and `next-root` sign with keys that are kept offline: they read the current state from a coordinator or from
//! a file that `mvm trust show --out` wrote, and hand back what they signed or write it to a file to be carried over.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use mvm_pki::trust::RoleSpec;
use mvm_pki::{ImagesMetadata, PublicKey, SigningKey, TrustBundle, TrustStore};
use mvm_proto::wire::control::v1::{GetTrustRequest, TrustState, UpdateTrustRequest};
use mvm_proto::{Digest, Envelope, Timestamp};

use crate::args::Global;
use crate::client::{Operator, within};
use crate::exit::{Outcome, Run};
use crate::output::{self, or_dash};
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum TrustCommand {
    /// The keys, their roles and expiry, and how many images are vouched for
    Show(ShowArgs),
    /// Make a signing key, for a role that the next root gives it
    Keygen(KeygenArgs),
    /// Vouch for images by their digests, with an image key
    Vouch(VouchArgs),
    /// Make the next root: other keys, later expiry; signed by the old root keys and the new
    NextRoot(NextRootArgs),
    /// Hand a root or an images statement that was signed elsewhere to the coordinator
    Update(UpdateArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// Also write the signed statements to this file, for signing on a machine that is offline
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    operator: Operator,
}

#[derive(Debug, Args)]
pub(crate) struct KeygenArgs {
    /// File for the private key (0600); the public key goes beside it as FILE.pub
    file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct VouchArgs {
    /// An image's digest (repeatable)
    #[arg(long = "digest", value_name = "SHA256", required = true)]
    digests: Vec<Digest>,
    /// A private image key (repeatable, up to the threshold)
    #[arg(long = "image-key", value_name = "FILE", required = true)]
    keys: Vec<PathBuf>,
    /// Vouch for these digests only, instead of adding them
    #[arg(long)]
    replace: bool,
    /// How long the statement holds
    #[arg(long, value_name = "TIME", default_value = "90days", value_parser = humantime::parse_duration)]
    life: Duration,
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Args)]
pub(crate) struct NextRootArgs {
    /// A private key of the current root (repeatable, up to the threshold)
    #[arg(long = "root-key", value_name = "FILE", required = true)]
    root_keys: Vec<PathBuf>,
    /// A private key of the next root, when it changes (repeatable)
    #[arg(long = "new-root-key", value_name = "FILE")]
    new_root_keys: Vec<PathBuf>,
    /// A public director key, when they change (repeatable)
    #[arg(long = "director", value_name = "FILE.pub")]
    directors: Vec<PathBuf>,
    /// A public image key, when they change (repeatable)
    #[arg(long = "image", value_name = "FILE.pub")]
    images: Vec<PathBuf>,
    /// How many root keys must sign [default: as before]
    #[arg(long, value_name = "K")]
    root_threshold: Option<u32>,
    /// How many image keys must sign [default: as before]
    #[arg(long, value_name = "K")]
    image_threshold: Option<u32>,
    /// Let nodes forget the highest document number they saw, after a key was stolen and numbers were burnt
    #[arg(long)]
    reset_high_water: bool,
    /// How long the root holds
    #[arg(long, value_name = "TIME", default_value = "1year", value_parser = humantime::parse_duration)]
    life: Duration,
    #[command(flatten)]
    place: Place,
}

#[derive(Debug, Args)]
pub(crate) struct UpdateArgs {
    /// What `vouch --out` or `next-root --out` wrote
    #[arg(short, long = "file", value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    operator: Operator,
}

/// Where the current state is read from and the signed one goes to.
#[derive(Debug, Args)]
pub(crate) struct Place {
    /// Read the current state from this file instead of the coordinator
    #[arg(long, value_name = "FILE", requires = "out")]
    from: Option<PathBuf>,
    /// Write the signed state to this file instead of handing it to the coordinator
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    operator: Operator,
}

pub(crate) async fn run(global: &Global, command: TrustCommand) -> Run {
    match command {
        TrustCommand::Show(args) => {
            let state = fetch(global, &args.operator).await?;
            if let Some(path) = &args.out {
                write_bundle(path, &bundle_of(&state)?)?;
            }
            Ok(output::show(global.output, &state, |_| table(&state))?)
        }
        TrustCommand::Keygen(args) => keygen(global, &args),
        TrustCommand::Vouch(args) => vouch(global, args).await,
        TrustCommand::NextRoot(args) => next_root(global, args).await,
        TrustCommand::Update(args) => {
            let bundle = read_bundle(&args.file)?;
            hand_over(global, &args.operator, &bundle).await
        }
    }
}

fn keygen(global: &Global, args: &KeygenArgs) -> Run {
    let key = SigningKey::generate().map_err(anyhow::Error::new)?;
    if args.file.exists() {
        return Err(anyhow!("{} exists; a key is never overwritten", args.file.display()).into());
    }
    key.to_file(&args.file).map_err(anyhow::Error::new)?;
    let public = args.file.with_added_extension("pub");
    std::fs::write(&public, format!("{}\n", key.public()))
        .with_context(|| format!("could not write {}", public.display()))?;
    Progress::new(global.quiet).say(format!("key {} is in {}", key.public().key_id(), args.file.display()));
    Ok(())
}

async fn vouch(global: &Global, args: VouchArgs) -> Run {
    let store = current(global, &args.place).await?;
    let now = Timestamp::from(SystemTime::now());
    let mut digests =
        if args.replace { Vec::new() } else { store.images().map(|m| m.digests.clone()).unwrap_or_default() };
    digests.extend(args.digests);
    let version = store.images_version() + 1;
    let statement = ImagesMetadata::new(store.cluster().clone(), version, digests, now, args.life)
        .map_err(anyhow::Error::new)?;
    let keys = read_keys(&args.keys)?;
    let envelope = statement.seal(&keys.iter().collect::<Vec<_>>());
    finish(global, &args.place, store, |store| store.advance_images(envelope, now).map(|_| ())).await
}

async fn next_root(global: &Global, args: NextRootArgs) -> Run {
    let store = current(global, &args.place).await?;
    let now = Timestamp::from(SystemTime::now());
    let old_keys = read_keys(&args.root_keys)?;
    let new_keys = read_keys(&args.new_root_keys)?;
    let change = |role: &mut RoleSpec, keys: Vec<PublicKey>, threshold: Option<u32>| {
        if !keys.is_empty() {
            role.keys = keys;
        }
        role.threshold = threshold.unwrap_or(role.threshold);
    };
    let mut spec = store.root().spec();
    spec.expires_at = now + args.life;
    spec.resets_high_water = args.reset_high_water;
    change(&mut spec.root, new_keys.iter().map(SigningKey::public).collect(), args.root_threshold);
    change(&mut spec.director, read_public_keys(&args.directors)?, None);
    change(&mut spec.image, read_public_keys(&args.images)?, args.image_threshold);
    let next = store.root().next(&spec, now).map_err(anyhow::Error::new)?;
    let envelope = next.seal(&old_keys.iter().chain(&new_keys).collect::<Vec<_>>());
    finish(global, &args.place, store, |store| store.advance_root(envelope, now).map(|_| ())).await
}

/// Checks the new statement as an agent will, then hands it over or writes it down.
async fn finish<E: std::error::Error + Send + Sync + 'static>(
    global: &Global,
    place: &Place,
    mut store: TrustStore,
    advance: impl FnOnce(&mut TrustStore) -> Result<(), E>,
) -> Run {
    advance(&mut store).map_err(anyhow::Error::new)?;
    let bundle = store.bundle();
    match &place.out {
        Some(path) => {
            write_bundle(path, &bundle)?;
            Progress::new(global.quiet).say(format!("written; next: mvm trust update -f {}", path.display()));
            Ok(())
        }
        None => hand_over(global, &place.operator, &bundle).await,
    }
}

async fn hand_over(global: &Global, operator: &Operator, bundle: &TrustBundle) -> Run {
    let mut client = operator.connect(global).await?;
    let request = UpdateTrustRequest {
        roots: bundle.roots.iter().map(Envelope::to_json).collect(),
        images: bundle.images.iter().map(Envelope::to_json).collect(),
    };
    let state = within(global.timeout, client.update_trust(request)).await?;
    Ok(output::show(global.output, &state, |_| table(&state))?)
}

async fn fetch(global: &Global, operator: &Operator) -> Result<TrustState, Outcome> {
    let mut client = operator.connect(global).await?;
    within(global.timeout, client.get_trust(GetTrustRequest {})).await
}

async fn current(global: &Global, place: &Place) -> Result<TrustStore, Outcome> {
    let bundle = match &place.from {
        Some(path) => read_bundle(path)?,
        None => bundle_of(&fetch(global, &place.operator).await?)?,
    };
    let now = Timestamp::from(SystemTime::now());
    Ok(TrustStore::pin_bundle(&bundle, now).map_err(anyhow::Error::new)?)
}

fn bundle_of(state: &TrustState) -> anyhow::Result<TrustBundle> {
    let read = |bytes: &Vec<u8>| {
        Envelope::from_json(bytes).context("the coordinator sent something that is no envelope")
    };
    Ok(TrustBundle {
        roots: state.root_envelopes.iter().map(read).collect::<Result<_, _>>()?,
        images: Some(&state.images_envelope).filter(|bytes| !bytes.is_empty()).map(read).transpose()?,
    })
}

fn read_bundle(path: &PathBuf) -> Result<TrustBundle, Outcome> {
    let read = || -> anyhow::Result<TrustBundle> {
        let text = std::fs::read(path).with_context(|| format!("could not read {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} holds no trust statements", path.display()))
    };
    read().map_err(Outcome::Usage)
}

fn write_bundle(path: &PathBuf, bundle: &TrustBundle) -> anyhow::Result<()> {
    let text = serde_json::to_vec_pretty(bundle).context("could not write the trust statements as JSON")?;
    std::fs::write(path, text).with_context(|| format!("could not write {}", path.display()))
}

fn read_keys(paths: &[PathBuf]) -> anyhow::Result<Vec<SigningKey>> {
    paths.iter().map(|path| Ok(SigningKey::from_file(path)?)).collect()
}

fn read_public_keys(paths: &[PathBuf]) -> anyhow::Result<Vec<PublicKey>> {
    let read = |path: &PathBuf| -> anyhow::Result<PublicKey> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))?;
        text.trim()
            .parse::<PublicKey>()
            .with_context(|| format!("{} holds no public signing key", path.display()))
    };
    paths.iter().map(read).collect()
}

pub(crate) fn table(state: &TrustState) -> output::Table {
    let mut rows = vec![
        ("root version", state.root_version.to_string()),
        ("root until", or_dash(&state.root_expires_at)),
        (
            "development",
            if state.dev_cluster { "yes: the coordinator holds all keys" } else { "no" }.to_owned(),
        ),
        ("images version", state.images_version.to_string()),
        ("images vouched for", state.image_digests.to_string()),
        ("images until", or_dash(&state.images_expires_at)),
    ];
    rows.extend(state.keys.iter().map(|key| {
        (
            "key",
            format!(
                "{:8} {} (threshold {}, until {})",
                key.role,
                key.key_id,
                key.threshold,
                or_dash(&key.expires_at)
            ),
        )
    }));
    output::properties(rows)
}
