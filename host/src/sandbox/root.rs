//! What a confined VMM's root directory looks like, from paths alone: what is made, and what of the host is shown where.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

/// What lies at a path of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Missing,
    Directory,
    File,
    /// With what it says.
    Link(PathBuf),
}

/// One thing in the new root. Names have no `/` in front: they are taken from the new root, which is not yet the root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Entry {
    Directory {
        name: CString,
    },
    Link {
        name: CString,
        target: CString,
    },
    /// Of the host, to read.
    BindMount {
        source: CString,
        name: CString,
        kind: Kind,
        executable: bool,
    },
    /// The image of this number.
    Image {
        name: CString,
        number: usize,
    },
}

impl Entry {
    pub(super) fn name(&self) -> &CString {
        match self {
            Self::Directory { name }
            | Self::Link { name, .. }
            | Self::BindMount { name, .. }
            | Self::Image { name, .. } => name,
        }
    }
}

/// The new root, and what Landlock is to allow of it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) entries: Vec<Entry>,
    pub(super) executed: Vec<PathBuf>,
    pub(super) read: Vec<(PathBuf, Kind)>,
    /// Whatever lies below these is there already.
    covered: Vec<PathBuf>,
    made: BTreeSet<PathBuf>,
}

/// What is to be seen of the host.
#[derive(Debug)]
pub(super) struct HostPaths<'a> {
    /// With no link in it.
    pub(super) program: &'a Path,
    /// What loads the program, if it is not loaded by the kernel alone.
    pub(super) loader: Option<&'a Path>,
    /// With no link in it: it is both where the run directory is and where it is seen.
    pub(super) run_dir: &'a Path,
    /// Where each is seen. Which files they are was found out before.
    pub(super) images: &'a [&'a Path],
    pub(super) needs: &'a [PathBuf],
}

/// The root that shows this and nothing else, on a host where `look` tells what lies where.
pub(super) fn layout(seen: &HostPaths<'_>, look: impl Fn(&Path) -> Kind) -> Result<Layout, String> {
    let mut layout = Layout::default();
    for path in seen.needs {
        check(path)?;
        match look(path) {
            Kind::Missing => {}
            kind => layout.show(path, kind, true)?,
        }
    }
    layout.covered.push(seen.run_dir.to_owned());
    for path in [Some(seen.program), seen.loader].into_iter().flatten() {
        check(path)?;
        layout.show(path, Kind::File, true)?;
        layout.executed.push(path.to_owned());
    }
    for (number, path) in seen.images.iter().enumerate() {
        check(path)?;
        layout.show_image(path, number)?;
    }
    check(seen.run_dir)?;
    layout.covered.retain(|path| path != seen.run_dir);
    layout.directory(seen.run_dir)?;
    layout.directory(Path::new("/dev"))?;
    Ok(layout)
}

/// A path that means the same thing here and there.
fn check(path: &Path) -> Result<(), String> {
    let plain = path.components().skip(1).all(|part| matches!(part, Component::Normal(_)));
    if path.is_absolute() && plain && path.parent().is_some() {
        return Ok(());
    }
    Err(format!("{} is not an absolute path without `..`", path.display()))
}

impl Layout {
    fn is_covered(&self, path: &Path) -> bool {
        self.covered.iter().any(|covered| path.starts_with(covered))
    }

    fn show(&mut self, path: &Path, kind: Kind, executable: bool) -> Result<(), String> {
        if self.is_covered(path) {
            return Ok(());
        }
        if let Some(parent) = path.parent() {
            self.directory(parent)?;
        }
        let name = relative(path)?;
        match kind {
            Kind::Link(target) => self.entries.push(Entry::Link { name, target: text(&target)? }),
            kind => {
                self.read.push((path.to_owned(), kind.clone()));
                self.entries.push(Entry::BindMount { source: text(path)?, name, kind, executable });
            }
        }
        self.covered.push(path.to_owned());
        Ok(())
    }

    fn show_image(&mut self, path: &Path, number: usize) -> Result<(), String> {
        if self.is_covered(path) {
            return Ok(());
        }
        if let Some(parent) = path.parent() {
            self.directory(parent)?;
        }
        self.entries.push(Entry::Image { name: relative(path)?, number });
        self.covered.push(path.to_owned());
        Ok(())
    }

    /// A directory and those above it.
    fn directory(&mut self, path: &Path) -> Result<(), String> {
        let Some(parent) = path.parent() else { return Ok(()) };
        if self.is_covered(path) || !self.made.insert(path.to_owned()) {
            return Ok(());
        }
        self.directory(parent)?;
        self.entries.push(Entry::Directory { name: relative(path)? });
        Ok(())
    }
}

pub(super) fn relative(path: &Path) -> Result<CString, String> {
    text(path.strip_prefix("/").unwrap_or(path))
}

pub(super) fn text(path: &Path) -> Result<CString, String> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| format!("{} has a null in it", path.display()))
}

/// What lies at a path of this host.
pub(super) fn look(path: &Path) -> Kind {
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.is_symlink() => std::fs::read_link(path).map_or(Kind::Missing, Kind::Link),
        Ok(meta) if meta.is_dir() => Kind::Directory,
        Ok(_) => Kind::File,
        Err(_) => Kind::Missing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(path: &Path) -> Kind {
        match path.to_str().unwrap() {
            "/lib" => Kind::Link("usr/lib".into()),
            "/usr/lib" => Kind::Directory,
            "/images/kernel" | "/usr/lib/firmware" => Kind::File,
            _ => Kind::Missing,
        }
    }

    fn seen<'a>(images: &'a [&'a Path], needs: &'a [PathBuf]) -> HostPaths<'a> {
        let (program, run_dir) = (Path::new("/usr/bin/vmm"), Path::new("/data/vms/i-1"));
        HostPaths { program, loader: Some(Path::new("/lib/ld.so")), run_dir, images, needs }
    }

    fn names(layout: &Layout) -> Vec<&str> {
        layout.entries.iter().map(|entry| entry.name().to_str().unwrap()).collect()
    }

    #[test]
    fn the_root_has_what_is_named_and_the_way_to_it_and_nothing_else() {
        let images = ["/images/kernel", "/usr/lib/firmware"].map(Path::new);
        let needs = ["/lib", "/lib64", "/usr/lib"].map(PathBuf::from);
        let layout = layout(&seen(&images, &needs), host).unwrap();
        let expected = [
            "lib",
            "usr",
            "usr/lib",
            "usr/bin",
            "usr/bin/vmm",
            "images",
            "images/kernel",
            "data",
            "data/vms",
        ];
        assert_eq!(names(&layout)[..9], expected);
        assert_eq!(names(&layout)[9..], ["data/vms/i-1", "dev"]);
        assert_eq!(layout.executed, ["/usr/bin/vmm", "/lib/ld.so"].map(PathBuf::from));
        let name = c"images/kernel".to_owned();
        assert!(layout.entries.contains(&Entry::Image { name, number: 0 }));
    }

    #[test]
    fn paths_that_mean_something_else_inside_are_refused() {
        for image in ["kernel", "/images/../etc/passwd", "/"] {
            let images = [Path::new(image)];
            let needs = [];
            layout(&seen(&images, &needs), host).unwrap_err();
        }
    }
}
