//! What `vouch` and `next-root` share: they sign on top of the pinned trust, show what, and hand the result over.
//!
//! The coordinator, or a file that came from it, only brings statements that were signed since: these are followed from
//! the pin, and nothing else of what it says is used.

use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::Context as _;
use clap::Args;
use mvm_pki::trust::Supplied;
use mvm_pki::{TrustBundle, TrustError, TrustStore};
use mvm_proto::Timestamp;

use super::difference::{View, difference};
use super::pin::{Pins, places};
use super::statements::{bundle_of, fetch, hand_over, read_bundle, write_bundle};
use crate::client::Operator;
use crate::confirm::{Question, confirm};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::progress::Progress;

/// Where the current state is read from and the signed one goes to.
#[derive(Debug, Args)]
pub(crate) struct Place {
    /// Read what was signed since the pin from this file instead of the coordinator
    #[arg(long, value_name = "FILE", requires = "out")]
    from: Option<PathBuf>,
    /// Write the signed state to this file instead of handing it to the coordinator
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The pinned trust to sign on top of [default: trust.json beside the keys and in the operator's folder]
    #[arg(long, value_name = "FILE")]
    trust: Option<PathBuf>,
    /// Sign without asking; what changes is still shown
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    operator: Operator,
}

/// What a signing command starts from.
#[derive(Debug)]
pub(super) struct Start {
    pins: Pins,
    /// The pinned trust, followed along what was supplied.
    pub(super) store: TrustStore,
    supplied: Supplied,
}

pub(super) async fn start(global: &Global, place: &Place, keys: &[PathBuf]) -> Result<Start, Outcome> {
    let places = place.trust.clone().map_or_else(|| places(keys, &place.operator), |file| vec![file]);
    let pins = Pins::require(&places)?;
    let supplied = match &place.from {
        Some(path) => read_bundle(path)?,
        None => bundle_of(&fetch(global, &place.operator).await?)?,
    };
    Ok(Start::new(pins, &supplied, Timestamp::from(SystemTime::now()))?)
}

impl Start {
    fn new(pins: Pins, supplied: &TrustBundle, now: Timestamp) -> anyhow::Result<Self> {
        let mut store = pins.held.clone();
        let supplied = store.follow_supplied(supplied, now).with_context(|| {
            format!(
                "nothing was signed: the trust that was supplied does not follow from the pinned one in {}\n\
                 treat this as an attack on the coordinator, unless the cluster was made anew",
                pins.file().display()
            )
        })?;
        Ok(Self { pins, store, supplied })
    }

    /// For a statement of images: what was supplied as one must be in order.
    pub(super) fn require_images(&mut self) -> anyhow::Result<()> {
        match self.supplied.images_refused.take() {
            None => Ok(()),
            Some(cause) => Err(anyhow::Error::new(cause).context(
                "nothing was signed: the images statement that was supplied contradicts the pinned trust\n\
                 if an image key was stolen, replace it first: mvm trust next-root --image FILE.pub",
            )),
        }
    }

    /// Shows what will be signed and asks, unless `--yes`.
    pub(super) fn confirm(&self, global: &Global, place: &Place, after: View<'_>) -> Run {
        let show = Progress::new(place.yes && global.quiet);
        let before = View { root: self.pins.held.root(), images: self.pins.held.images() };
        show.say(format!("to be signed, against the pinned trust in {}:", self.pins.file().display()));
        for change in difference(before, after) {
            show.say(change.to_string());
        }
        for notice in self.notices() {
            show.say(format!("! {notice}"));
        }
        if place.yes {
            return Ok(());
        }
        let question = Question {
            text: "Sign this?",
            undone: "nothing was signed",
            advice: "read what is listed above, then repeat with --yes",
        };
        confirm("", &question)
    }

    /// Where what was supplied is not what the pin knows. None of it is signed on, so it is told and goes no further.
    fn notices(&self) -> Vec<String> {
        let behind = |what: &str, shown: u64, held: u64| {
            format!(
                "the coordinator shows version {shown} of the {what}, the pinned trust holds version {held}: \
                 it was not handed over yet, or the coordinator hides it"
            )
        };
        let root = self.supplied.root_behind.map(|shown| behind("root", shown, self.store.root_version()));
        let images = self.supplied.images_behind;
        let images = images.map(|shown| behind("images statement", shown, self.store.images_version()));
        let refused = self.supplied.images_refused.as_ref();
        let refused = refused.map(|cause| format!("the supplied images statement was refused: {cause}"));
        [root, images, refused].into_iter().flatten().collect()
    }

    /// Checks the signed statement as an agent will, advances the pins, then hands it over or writes it down.
    pub(super) async fn finish(
        self,
        global: &Global,
        place: &Place,
        advance: impl FnOnce(&mut TrustStore) -> Result<(), TrustError>,
    ) -> Run {
        let mut store = self.store;
        advance(&mut store).map_err(anyhow::Error::new)?;
        self.pins.advance(&store)?;
        let progress = Progress::new(global.quiet);
        let bundle = store.bundle();
        if let Some(path) = &place.out {
            write_bundle(path, &bundle)?;
            progress.say(format!("written; next: mvm trust update -f {}", path.display()));
            return Ok(());
        }
        let handed = hand_over(global, &place.operator, &bundle).await;
        if handed.is_err() {
            let file = self.pins.file().display();
            progress.say(format!("signed and pinned; to hand it over again: mvm trust update -f {file}"));
        }
        handed
    }
}
