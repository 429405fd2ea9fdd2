//! Answers the agent's requests for images, and builds missing ones in one background thread.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use mvm_proto::Digest;
use mvm_proto::document::ImageSource;
use mvm_proto::text::chain;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::build::{build, source_of};
use super::collect::{self, Collected, KeepRules};
use super::stamp::{Look, Stamp};
use super::store::StoreLock;
use super::{ImageError, ImageRef, ImageSettings, Resolution, Store, Work};
use crate::BootImage;

/// More answers than any node has pools; beyond it the ones at rest are forgotten and found again when asked for.
const MAX_ANSWERS: usize = 4096;
/// How often it is looked whether the command line changed a reference.
const REFRESH: Duration = Duration::from_secs(1);
/// How many of a program's last lines a condition repeats.
const LAST_LINES: usize = 5;
/// An image that was resolved is about to be used: it is kept this long before an instance must hold it.
const HELD_FOR: Duration = Duration::from_secs(600);

/// Calls off what is being built when it goes.
#[derive(Debug)]
pub(super) struct Requests {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    settings: ImageSettings,
    cancelled: AtomicBool,
    changed: watch::Sender<u64>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    answers: BTreeMap<ImageRef, Answer>,
    queue: VecDeque<ImageRef>,
    /// Whether the building thread runs.
    building: bool,
    /// When each image was last given out.
    held: BTreeMap<Digest, Instant>,
    /// What the agent's instances need.
    referenced: BTreeSet<Digest>,
    /// What is written down as in use.
    in_use: Option<BTreeSet<Digest>>,
    refs: Option<RefsSeen>,
    /// The folders that images of `answers` were imported from.
    followed: BTreeMap<ImageRef, Followed>,
}

#[derive(Debug)]
struct RefsSeen {
    looked_at: Instant,
    changed_at: Option<SystemTime>,
}

#[derive(Debug)]
enum Answer {
    Ready(Digest),
    /// What failed before is told until it is mended.
    Working {
        message: String,
        failures: u32,
        before: Option<Failure>,
    },
    Failed {
        failure: Failure,
        failures: u32,
        retry_at: Instant,
    },
}

/// Why there is no image, or no newer one.
#[derive(Debug, Clone)]
struct Failure {
    reason: &'static str,
    message: String,
}

/// A `path:` folder whose image is in use.
#[derive(Debug)]
struct Followed {
    /// How it looked when it was last imported, or when that was tried.
    stamp: Option<Stamp>,
    /// It is being imported again.
    importing: bool,
    /// Why that failed.
    failure: Option<Failure>,
}

impl Requests {
    pub(super) fn new(store: Store, settings: ImageSettings) -> Self {
        let shared = Shared {
            store,
            settings,
            cancelled: AtomicBool::new(false),
            changed: watch::channel(0).0,
            state: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    pub(super) fn changed(&self) -> watch::Receiver<u64> {
        self.shared.changed.subscribe()
    }

    pub(super) fn resolve(&self, image: &ImageRef) -> Resolution {
        let now = Instant::now();
        let mut state = self.shared.lock();
        self.shared.refresh(&mut state, now);
        let (failures, before) = match state.answers.get(image) {
            Some(Answer::Ready(digest)) => {
                let digest = *digest;
                state.held.insert(digest, now);
                return self.ready(&mut state, image, digest);
            }
            Some(working @ Answer::Working { .. }) => return working.resolution(),
            Some(failed @ Answer::Failed { retry_at, .. }) if now < *retry_at => return failed.resolution(),
            Some(Answer::Failed { failures, failure, .. }) => (*failures, Some(failure.clone())),
            None => (0, None),
        };
        state.make_room();
        match self.shared.look_up(&mut state, image, now) {
            Ok(Some(digest)) => {
                state.answers.insert(image.clone(), Answer::Ready(digest));
                Resolution::Ready(digest)
            }
            Ok(None) => match self.shared.settings.vouched.borrow().check_source(image) {
                Ok(()) => self.enqueue(&mut state, image, failures, before),
                Err(error) => Resolution::refused(&error),
            },
            Err(ImageError::Busy) => Resolution::Working { message: ImageError::Busy.to_string() },
            Err(error) => {
                let answer = self.shared.failed(image, &error, failures);
                let told = answer.resolution();
                state.answers.insert(image.clone(), answer);
                told
            }
        }
    }

    pub(super) fn boot_image(&self, digest: &Digest) -> Result<BootImage, ImageError> {
        let found = self.shared.store.boot_image(digest);
        if let Err(ImageError::Missing(_)) = &found {
            // Removed by another program: the next request builds it again.
            let mut state = self.shared.lock();
            state.answers.retain(|_, answer| !matches!(answer, Answer::Ready(ready) if ready == digest));
        }
        found
    }

    pub(super) fn set_in_use(&self, referenced: &BTreeSet<Digest>) -> Result<(), ImageError> {
        let mut state = self.shared.lock();
        if state.referenced != *referenced {
            state.referenced.clone_from(referenced);
        }
        let needed = state.needed(Instant::now());
        if state.in_use.as_ref() == Some(&needed) {
            return Ok(());
        }
        let lock = self.shared.store.lock_soon()?;
        self.shared.write_down(&mut state, &lock, needed)
    }

    pub(super) fn collect(
        &self,
        referenced: &BTreeSet<Digest>,
        rules: &KeepRules,
    ) -> Result<Collected, ImageError> {
        let needed: BTreeSet<Digest> = {
            let state = self.shared.lock();
            state.needed(Instant::now()).union(referenced).copied().collect()
        };
        let collected = collect::collect(&self.shared.store, &needed, rules)?;
        let gone: BTreeSet<Digest> = collected.removed.iter().map(|(digest, _)| *digest).collect();
        let mut state = self.shared.lock();
        state.answers.retain(|_, answer| !matches!(answer, Answer::Ready(digest) if gone.contains(digest)));
        Ok(collected)
    }

    fn enqueue(
        &self,
        state: &mut State,
        image: &ImageRef,
        failures: u32,
        before: Option<Failure>,
    ) -> Resolution {
        let message = if state.building { "waits for another image to be built" } else { "begins to build" };
        let answer = Answer::Working { message: message.to_owned(), failures, before };
        let told = answer.resolution();
        state.answers.insert(image.clone(), answer);
        if let Err(error) = self.queue(state, image) {
            let answer = self.shared.failed(image, &error, failures);
            let told = answer.resolution();
            state.answers.insert(image.clone(), answer);
            return told;
        }
        told
    }

    /// Leaves it to the building thread.
    fn queue(&self, state: &mut State, image: &ImageRef) -> Result<(), ImageError> {
        state.queue.push_back(image.clone());
        if state.building {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        let started =
            std::thread::Builder::new().name("image-build".to_owned()).spawn(move || shared.work_off());
        if let Err(cause) = started {
            state.queue.clear();
            return Err(ImageError::Start { program: "the building thread".to_owned(), cause });
        }
        state.building = true;
        Ok(())
    }

    /// An image that is there. Where it came from a folder that no digest pins, and the folder changed, it is imported
    /// again; the image from before serves until then.
    fn ready(&self, state: &mut State, image: &ImageRef, digest: Digest) -> Resolution {
        let Ok(ImageSource::Folder(folder)) = ImageSource::parse(&image.flake_ref) else {
            return Resolution::Ready(digest);
        };
        if image.digest.is_some() {
            return Resolution::Ready(digest);
        }
        let last = state.followed.entry(image.clone()).or_insert_with(|| {
            // What an older version imported without a look is taken to be what is there.
            let built = self.shared.store.reference(&image.flake_ref, &image.profile).ok().flatten();
            let stamp = built.and_then(|built| built.stamp);
            let stamp = stamp.or_else(|| Look::at(Path::new(&folder)).map(|look| look.stamp));
            Followed { stamp, importing: false, failure: None }
        });
        if !last.importing {
            let quiet = self.shared.settings.folder_quiet;
            let look = Look::at(Path::new(&folder)).filter(|look| look.is_settled(quiet, SystemTime::now()));
            if let Some(look) = look.filter(|look| last.stamp.as_ref() != Some(&look.stamp)) {
                tracing::info!(image = image.flake_ref, "the folder changed; importing it again");
                last.stamp = Some(look.stamp);
                last.importing = true;
                last.failure = None;
                if let Err(error) = self.queue(state, image) {
                    tracing::warn!(image = image.flake_ref, error = %chain(&error), "could not begin");
                }
            }
        }
        match state.followed.get(image).and_then(|last| last.failure.clone()) {
            None => Resolution::Ready(digest),
            Some(Failure { reason, message }) => {
                let message =
                    format!("the folder changed, and its older image {digest} is used on: {message}");
                Resolution::Outdated { digest, reason, message }
            }
        }
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        self.shared.cancelled.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the state; if something did, the answers are still answers.
        self.state.lock()
    }

    /// What the store already has for this.
    fn look_up(
        &self,
        state: &mut State,
        image: &ImageRef,
        now: Instant,
    ) -> Result<Option<Digest>, ImageError> {
        if let Some(digest) = image.digest.filter(|digest| self.store.contains(digest)) {
            return self.hold(state, digest, now);
        }
        source_of(&image.flake_ref)?;
        let built = self.store.reference(&image.flake_ref, &image.profile)?;
        match built.filter(|built| image.digest.is_none() && self.store.contains(&built.digest)) {
            Some(built) => self.hold(state, built.digest, now),
            None => Ok(None),
        }
    }

    /// Writes down that the image is in use before anyone relies on it; `None` when it was removed meanwhile.
    fn hold(&self, state: &mut State, digest: Digest, now: Instant) -> Result<Option<Digest>, ImageError> {
        state.held.insert(digest, now);
        self.remember(state)?;
        let needed = state.needed(now);
        if state.in_use.as_ref() != Some(&needed) {
            let lock = self.store.lock_soon()?;
            self.write_down(state, &lock, needed)?;
        }
        Ok(self.store.contains(&digest).then_some(digest))
    }

    /// Forgets what references gave when the command line has built one again.
    fn refresh(&self, state: &mut State, now: Instant) {
        if state.refs.as_ref().is_some_and(|seen| now.duration_since(seen.looked_at) < REFRESH) {
            return;
        }
        let changed_at = std::fs::metadata(self.store.refs()).and_then(|metadata| metadata.modified()).ok();
        let seen = state.refs.replace(RefsSeen { looked_at: now, changed_at });
        if seen.is_some_and(|seen| seen.changed_at != changed_at) {
            state
                .answers
                .retain(|image, answer| !matches!(answer, Answer::Ready(_)) || image.digest.is_some());
        }
    }

    /// The building thread: one image after the other, until none is asked for.
    fn work_off(&self) {
        loop {
            let image = {
                let mut state = self.lock();
                match state.queue.pop_front() {
                    Some(image) if !self.cancelled.load(Ordering::Relaxed) => image,
                    _ => {
                        state.building = false;
                        return;
                    }
                }
            };
            let built = self.build(&image);
            let mut state = self.lock();
            let failures = match state.answers.get(&image) {
                Some(Answer::Working { failures, .. }) => *failures,
                _ => 0,
            };
            let answer = match built {
                Ok(digest) => {
                    state.followed.remove(&image);
                    Some(Answer::Ready(digest))
                }
                Err(error) => {
                    let (answer, failure) =
                        (self.failed(&image, &error, failures), failure_of(&image, &error));
                    match state.followed.get_mut(&image) {
                        // There is one to go on with.
                        Some(followed) => {
                            (followed.importing, followed.failure) = (false, Some(failure));
                            None
                        }
                        None => Some(answer),
                    }
                }
            };
            if let Some(answer) = answer {
                state.answers.insert(image, answer);
            }
            // Our own build changed the references; it is known already.
            state.refs = None;
            drop(state);
            self.changed.send_modify(|count| *count += 1);
        }
    }

    fn build(&self, image: &ImageRef) -> Result<Digest, ImageError> {
        // It may have been revoked while it waited for its turn.
        self.settings.vouched.borrow().check_source(image)?;
        tracing::info!(image = image.flake_ref, "building an image");
        let tell = |line: &str| {
            tracing::debug!(image = image.flake_ref, "{line}");
            if let Some(Answer::Working { message, .. }) = self.lock().answers.get_mut(image) {
                line.clone_into(message);
            }
        };
        let built = build(&self.store, image, &self.settings, &Work::new(&tell, &self.cancelled))?;
        let now = Instant::now();
        // Others hold the store's lock for moments only; this thread may wait, the one that asks may not.
        let lock = self.store.lock()?;
        let mut state = self.lock();
        state.held.insert(built.digest, now);
        self.remember(&mut state)?;
        let needed = state.needed(now);
        self.write_down(&mut state, &lock, needed)?;
        Ok(built.digest)
    }

    /// What the agent wrote down before it was restarted stays until it says otherwise.
    fn remember(&self, state: &mut State) -> Result<(), ImageError> {
        if state.in_use.is_none() {
            state.referenced.extend(self.store.in_use_by(self.owner())?.unwrap_or_default());
        }
        Ok(())
    }

    fn write_down(
        &self,
        state: &mut State,
        lock: &StoreLock,
        needed: BTreeSet<Digest>,
    ) -> Result<(), ImageError> {
        self.store.set_in_use(lock, self.owner(), &needed)?;
        state.in_use = Some(needed);
        Ok(())
    }

    /// Without a word on it, the store is its owner's alone.
    fn owner(&self) -> &Path {
        self.settings.owner.as_deref().unwrap_or_else(|| self.store.root())
    }

    fn failed(&self, image: &ImageRef, error: &ImageError, failures: u32) -> Answer {
        let wait = self.settings.first_retry.saturating_mul(2_u32.saturating_pow(failures));
        let wait = wait.min(self.settings.longest_retry).mul_f64(0.8 + 0.4 * fastrand::f64());
        if !matches!(error, ImageError::Cancelled) {
            tracing::warn!(image = image.flake_ref, error = %chain(error), retry_in = ?wait, "could not build an image");
        }
        let retry_at = Instant::now() + wait;
        Answer::Failed { failure: failure_of(image, error), failures: failures.saturating_add(1), retry_at }
    }
}

/// Which image, what failed, and a program's last words: one line, for a condition.
fn failure_of(image: &ImageRef, error: &ImageError) -> Failure {
    let text = chain(error);
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let (first, rest) = lines.split_first().map_or(("", &[][..]), |(first, rest)| (*first, rest));
    let last = rest.split_at(rest.len().saturating_sub(LAST_LINES)).1;
    let told = [&[first], last].concat().join(" | ");
    let named = told.contains(&image.flake_ref);
    let message = if named { told } else { format!("{}: {told}", image.flake_ref) };
    Failure { reason: error.reason(), message }
}

impl State {
    fn needed(&self, now: Instant) -> BTreeSet<Digest> {
        let lately = self.held.iter().filter(|(_, at)| now.duration_since(**at) < HELD_FOR);
        self.referenced.iter().chain(lately.map(|(digest, _)| digest)).copied().collect()
    }

    fn make_room(&mut self) {
        if self.answers.len() >= MAX_ANSWERS {
            self.answers.retain(|_, answer| matches!(answer, Answer::Working { .. }));
        }
    }
}

impl Answer {
    fn resolution(&self) -> Resolution {
        match self {
            Self::Ready(digest) => Resolution::Ready(*digest),
            Self::Working { before: None, message, .. } => Resolution::Working { message: message.clone() },
            Self::Working { before: Some(failure), .. } | Self::Failed { failure, .. } => {
                Resolution::Unavailable { reason: failure.reason, message: failure.message.clone() }
            }
        }
    }
}
