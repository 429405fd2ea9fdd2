//! Pinned trust: what an operator knows without asking a coordinator, and `mvm trust pin`.
//!
//! A pin lies in the operator's folder and beside keys that are kept offline. It is made by `mvm coordinator init` or by
//! `mvm trust pin` from a digest that a person compared, and moves only along signed statements after that.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use mvm_pki::trust::PIN_FILE;
use mvm_pki::{JoinToken, TrustStore};
use mvm_proto::{Digest, Timestamp};

use super::statements::{bundle_of, fetch, read_bundle};
use crate::client::Operator;
use crate::exit::Run;
use crate::global::Global;
use crate::progress::Progress;

#[derive(Debug, Args)]
pub(crate) struct PinArgs {
    /// The digest of one of the cluster's roots, from `mvm coordinator init` or from another operator's `mvm trust get`;
    /// not from the coordinator itself
    #[arg(long, value_name = "SHA256")]
    digest: Digest,
    /// Read the roots from this file instead of the coordinator
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// File to pin into [default: trust.json in the operator's folder]
    #[arg(long, value_name = "FILE")]
    trust: Option<PathBuf>,
    #[command(flatten)]
    operator: Operator,
}

pub(super) async fn run(global: &Global, args: PinArgs) -> Run {
    let file = args.trust.clone().unwrap_or_else(|| in_operator_dir(&args.operator));
    if let Some(pins) = Pins::load(std::slice::from_ref(&file))? {
        let held = pins.held.root_digest();
        return Err(anyhow!(
            "{} pins trust already, at root {held}\nremove it first if the cluster was made anew",
            file.display()
        )
        .into());
    }
    let bundle = match &args.from {
        Some(path) => read_bundle(path)?,
        None => bundle_of(&fetch(global, &args.operator).await?)?,
    };
    let now = Timestamp::from(SystemTime::now());
    let (store, followed) = TrustStore::pin_digest(&bundle, args.digest, now).map_err(anyhow::Error::new)?;
    if let Some(refused) = followed.images_refused {
        return Err(anyhow::Error::new(refused).context("the images statement can't be pinned").into());
    }
    store.save(&file).map_err(anyhow::Error::new)?;
    Progress::new(global.quiet).say(format!(
        "pinned in {}: root version {}, digest {}",
        file.display(),
        store.root_version(),
        store.root_digest()
    ));
    Ok(())
}

pub(crate) fn in_operator_dir(operator: &Operator) -> PathBuf {
    operator.dir().join(PIN_FILE)
}

/// Where pins may lie for a command that signs: beside each key and in the operator's folder.
pub(super) fn places(keys: &[PathBuf], operator: &Operator) -> Vec<PathBuf> {
    let beside = keys.iter().map(|key| key.parent().unwrap_or(Path::new("")).join(PIN_FILE));
    let mut places: Vec<PathBuf> = beside.chain([in_operator_dir(operator)]).collect();
    places.sort();
    places.dedup();
    places
}

/// The pins of one or several places, which agree.
#[derive(Debug)]
pub(crate) struct Pins {
    files: Vec<PathBuf>,
    /// The newest of what they hold.
    pub(crate) held: TrustStore,
}

impl Pins {
    /// Reads the pins that there are; `None` without any. Two that contradict each other are an error: one of them was
    /// not made by this operator.
    pub(crate) fn load(places: &[PathBuf]) -> anyhow::Result<Option<Self>> {
        let now = Timestamp::from(SystemTime::now());
        let mut pins: Option<Self> = None;
        for file in places.iter().filter(|file| file.exists()) {
            let read = TrustStore::load(file).with_context(|| {
                format!(
                    "could not use the pinned trust\nrestore {} from a copy, or remove it and pin again: mvm trust pin",
                    file.display()
                )
            })?;
            match &mut pins {
                None => pins = Some(Self { files: vec![file.clone()], held: read }),
                Some(pins) => {
                    agree(&mut pins.held, read, now).with_context(|| {
                        let other = pins.files[0].display();
                        format!("the pinned trust in {} contradicts the one in {other}", file.display())
                    })?;
                    pins.files.push(file.clone());
                }
            }
        }
        Ok(pins)
    }

    /// As [`Pins::load`]; none at all is an error that says how to make one.
    pub(super) fn require(places: &[PathBuf]) -> anyhow::Result<Self> {
        Self::load(places)?.ok_or_else(|| {
            let looked: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
            anyhow!(
                "there is no pinned trust to sign on top of; looked for {}\n\
                 pin it once, by a digest from `mvm coordinator init` or from another operator's `mvm trust get`: \
                 mvm trust pin --digest SHA256",
                looked.join(", ")
            )
        })
    }

    /// One of the files, for hints.
    pub(super) fn file(&self) -> &Path {
        &self.files[0]
    }

    /// Moves every pin to `next`. Done before anything signed leaves this machine, so that no version is signed twice.
    pub(crate) fn advance(&self, next: &TrustStore) -> anyhow::Result<()> {
        for file in &self.files {
            next.save(file).with_context(|| {
                format!(
                    "nothing was handed over: the pinned trust in {} could not be advanced\n\
                     make it writable, or sign with a copy: --trust FILE",
                    file.display()
                )
            })?;
        }
        Ok(())
    }
}

/// Brings `held` up to what `other` knows, if they tell one story.
fn agree(held: &mut TrustStore, mut other: TrustStore, now: Timestamp) -> anyhow::Result<()> {
    let forth = held.follow_supplied(&other.bundle(), now)?;
    let back = other.follow_supplied(&held.bundle(), now)?;
    if let Some(refused) = forth.images_refused.or(back.images_refused) {
        return Err(refused.into());
    }
    if held.root_digest() != other.root_digest() {
        bail!("root {} is not root {}", held.root_digest(), other.root_digest());
    }
    Ok(())
}

/// Whether a new token names the root that this operator has pinned: a coordinator must not be able to enrol nodes
/// under a root of its own.
pub(crate) async fn check_token(global: &Global, operator: &Operator, token: &str) -> Run {
    let token = JoinToken::parse(token).context("the coordinator made no usable token")?;
    let (_, anchors) = operator.credential()?;
    if !anchors.contains(&token.fingerprint()) {
        return Err(anyhow!(
            "the token names a root certificate that this operator does not trust; it is not shown\n\
             treat this as an attack on the coordinator, unless its roots are being changed: then try again"
        )
        .into());
    }
    let named = token.trust_root();
    let file = in_operator_dir(operator);
    let Some(pins) = Pins::load(std::slice::from_ref(&file))? else {
        Progress::new(global.quiet).say(format!(
            "the trust root that this token names was not checked, because {} is not there; pin it: \
             mvm trust pin --digest SHA256",
            file.display()
        ));
        return Ok(());
    };
    if pins.held.root_digest() == named {
        return Ok(());
    }
    let supplied = bundle_of(&fetch(global, operator).await?)?;
    let next = judge_token(&pins.held, named, &supplied, Timestamp::from(SystemTime::now()))?;
    Ok(pins.advance(&next)?)
}

/// The pin moved to the root that a token names, if signed statements lead there.
fn judge_token(
    pin: &TrustStore,
    named: Digest,
    supplied: &mvm_pki::TrustBundle,
    now: Timestamp,
) -> anyhow::Result<TrustStore> {
    let mut next = pin.clone();
    let foreign = || {
        format!(
            "the token names trust root {named}, which does not follow from the pinned one; it is not shown\n\
             treat this as an attack on the coordinator, unless the cluster was made anew"
        )
    };
    let found = next.follow_supplied(supplied, now).with_context(foreign)?;
    if next.root_digest() == named {
        return Ok(next);
    }
    match found.root_behind {
        Some(shown) => bail!(
            "the coordinator is at root version {shown}, the pinned trust at version {}; the token is not shown\n\
             hand the newer root over first: mvm trust update -f FILE, with the pinned trust.json",
            next.root_version()
        ),
        None => bail!(foreign()),
    }
}
