//! Downloads Debian packages by name into a cache, and unpacks them into a folder; never installs them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use mvm_proto::Digest;
use mvm_proto::digest::from_hex;

use super::error::{ImageError, OnPath};
use super::store::hash_file;
use super::work::Work;

const LIST_LIMIT: Duration = Duration::from_secs(60);
const DOWNLOAD_LIMIT: Duration = Duration::from_secs(600);
const UNPACK_LIMIT: Duration = Duration::from_secs(300);
const APT_ADVICE: &str =
    "this image is made from Debian packages; install apt and dpkg, or build it on a Debian machine";
const DOWNLOAD_ADVICE: &str =
    "run `apt-get update` and check the network, or put the package's .deb file into the cache folder";

/// A folder of downloaded packages.
#[derive(Debug)]
pub(super) struct PackageCache {
    folder: PathBuf,
}

/// One package file in the cache.
#[derive(Debug)]
pub(super) struct Package {
    pub(super) path: PathBuf,
    /// `NAME_VERSION_ARCHITECTURE`, with `%3a` for a colon, as apt names files.
    pub(super) title: String,
}

/// What apt would download.
#[derive(Debug)]
struct Offer {
    title: String,
    sha256: Option<Digest>,
}

impl PackageCache {
    pub(super) fn open(folder: &Path) -> Result<Self, ImageError> {
        fs::create_dir_all(folder).on("make the package cache", folder)?;
        Ok(Self { folder: folder.to_owned() })
    }

    /// The package that this one, which is empty itself, pulls in; without apt's lists, the newest in the cache.
    pub(super) fn behind(&self, name: &str, prefix: &str, work: &Work<'_>) -> Result<String, ImageError> {
        let mut list = Command::new("apt-cache");
        list.args(["depends", "--important", name]).env("LC_ALL", "C");
        let listed = work.run(&mut list, LIST_LIMIT, APT_ADVICE);
        let found = listed.as_deref().ok().and_then(|text| {
            let depends = text.lines().filter_map(|line| line.trim().strip_prefix("Depends:"));
            depends.map(str::trim).find(|package| package.starts_with(prefix)).map(str::to_owned)
        });
        let cached = || {
            let names = self.titles().into_iter().filter(|title| title.starts_with(prefix));
            let mut names: Vec<_> =
                names.filter_map(|title| Some(title.split_once('_')?.0.to_owned())).collect();
            names.sort_by_cached_key(|name| numbers(name));
            names.pop()
        };
        if let Some(package) = found.or_else(cached) {
            return Ok(package);
        }
        let nothing = ImageError::Reference {
            reference: name.to_owned(),
            fault: "apt knows no such package and the cache has none".to_owned(),
        };
        let cause = Box::new(listed.err().unwrap_or(nothing));
        Err(ImageError::Package { package: name.to_owned(), advice: DOWNLOAD_ADVICE, cause })
    }

    /// The newest version of a package that apt offers; without the network, the newest in the cache.
    pub(super) fn get(&self, name: &str, work: &Work<'_>) -> Result<Package, ImageError> {
        let offered = offered(name, work);
        if let Some(package) = offered.as_ref().and_then(|offer| self.find_offered(offer)) {
            work.say(format!("{} is in the cache", package.title));
            return Ok(package);
        }
        match self.download(name, work) {
            Ok(()) => {}
            Err(ImageError::Cancelled) => return Err(ImageError::Cancelled),
            Err(cause) => {
                if let Some(package) = self.newest(name) {
                    work.say(format!("could not download {name}; using {} from the cache", package.title));
                    return Ok(package);
                }
                let cause = Box::new(cause);
                return Err(ImageError::Package { package: name.to_owned(), advice: DOWNLOAD_ADVICE, cause });
            }
        }
        let found = offered.as_ref().and_then(|offer| self.find(&offer.title)).or_else(|| self.newest(name));
        found.ok_or_else(|| ImageError::Package {
            package: name.to_owned(),
            advice: DOWNLOAD_ADVICE,
            cause: Box::new(ImageError::invalid(
                &self.folder,
                "apt-get said it was downloaded, and it is not there",
            )),
        })
    }

    /// The file in the cache, if it is the one that apt's signed lists speak of.
    fn find_offered(&self, offer: &Offer) -> Option<Package> {
        let package = self.find(&offer.title)?;
        let found = hash_file(&package.path).ok()?;
        let same = offer.sha256.is_none_or(|expected| expected == found);
        if !same {
            tracing::warn!(path = %package.path.display(), "a cached package is not what apt offers; fetching it again");
        }
        same.then_some(package)
    }

    /// Downloads into a folder of its own and moves the file when it is whole: apt checks its hash.
    fn download(&self, name: &str, work: &Work<'_>) -> Result<(), ImageError> {
        work.say(format!("downloading {name}"));
        let began = Instant::now();
        let partial = self.folder.join(format!(".partial-{:016x}", fastrand::u64(..)));
        fs::create_dir(&partial).on("make", &partial)?;
        let mut get = Command::new("apt-get");
        // A download by root switches to a user of its own where it can; it can't reach a private folder.
        get.args(["-q", "-o", "APT::Sandbox::User=root", "download", name])
            .env("LC_ALL", "C")
            .current_dir(&partial);
        let done = work.run(&mut get, DOWNLOAD_LIMIT, APT_ADVICE).and_then(|_| {
            for entry in fs::read_dir(&partial).on("read", &partial)? {
                let entry = entry.on("read", &partial)?;
                let bytes = entry.metadata().map(|metadata| metadata.len()).unwrap_or(0);
                fs::rename(entry.path(), self.folder.join(entry.file_name())).on("keep", &entry.path())?;
                let (title, took) = (entry.file_name(), began.elapsed().as_secs_f32());
                work.say(format!(
                    "downloaded {} ({:.1} MB in {took:.1} s)",
                    title.display(),
                    megabytes(bytes)
                ));
            }
            Ok(())
        });
        // What is left is only a few bytes in the cache, and the failure itself says more.
        let _ = fs::remove_dir_all(&partial);
        done
    }

    fn titles(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().filter_map(Result::ok);
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter_map(|name| Some(name.strip_suffix(".deb")?.to_owned())).collect()
    }

    fn find(&self, title: &str) -> Option<Package> {
        let path = self.folder.join(format!("{title}.deb"));
        path.is_file().then(|| Package { path, title: title.to_owned() })
    }

    fn newest(&self, name: &str) -> Option<Package> {
        let mut titles = self.titles();
        titles.retain(|title| title.split_once('_').is_some_and(|(found, _)| found == name));
        titles.sort_by_cached_key(|title| numbers(title));
        self.find(&titles.pop()?)
    }
}

impl Package {
    /// Unpacks the package's files below `folder`.
    pub(super) fn unpack(&self, folder: &Path, work: &Work<'_>) -> Result<(), ImageError> {
        let began = Instant::now();
        let mut unpack = Command::new("dpkg-deb");
        unpack.arg("-x").arg(&self.path).arg(folder);
        work.run(&mut unpack, UNPACK_LIMIT, APT_ADVICE)?;
        work.say(format!("unpacked {} in {:.1} s", self.title, began.elapsed().as_secs_f32()));
        Ok(())
    }
}

/// Asked from a folder without packages: apt says nothing of a file that is already there.
fn offered(name: &str, work: &Work<'_>) -> Option<Offer> {
    let mut show = Command::new("apt-get");
    show.args(["download", "--print-uris", name]).env("LC_ALL", "C").current_dir("/");
    let text = work.run(&mut show, LIST_LIMIT, APT_ADVICE).ok()?;
    parse_offer(&text)
}

/// `'URI' FILE SIZE SHA256:HASH`
fn parse_offer(text: &str) -> Option<Offer> {
    let line = text.lines().find(|line| line.starts_with('\''))?;
    let mut words = line.split_whitespace().skip(1);
    let title = words.next()?.strip_suffix(".deb").filter(|title| !title.contains('/'))?.to_owned();
    let hash = words.find_map(|word| word.strip_prefix("SHA256:"));
    Some(Offer { title, sha256: hash.and_then(from_hex).map(Digest::from_bytes) })
}

#[allow(clippy::cast_precision_loss, reason = "for people")]
pub(super) fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// The numbers in a name, so that 6.1.0-54 comes after 6.1.0-9. Enough for the versions of one package.
fn numbers(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}
