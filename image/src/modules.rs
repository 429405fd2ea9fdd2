//! Which kernel modules a guest needs, in the order in which they can be loaded.
//!
//! A kernel's package has no `modules.dep` (it is made when the package is installed, and nothing is installed here),
//! so each module's dependencies are read from its `.modinfo` section.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::ImageError;
use super::compression::Compression;
use super::elf::Elf;
use super::error::OnPath;

/// The modules below a kernel's module folder, by name.
#[derive(Debug)]
pub(super) struct Modules {
    root: PathBuf,
    files: BTreeMap<String, PathBuf>,
}

/// One module, unpacked.
#[derive(Debug)]
pub(super) struct Module {
    pub(super) name: String,
    pub(super) content: Vec<u8>,
}

impl Modules {
    pub(super) fn below(root: &Path) -> Result<Self, ImageError> {
        let mut files = BTreeMap::new();
        let mut folders = vec![root.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).on("read", &folder)? {
                let entry = entry.on("read", &folder)?;
                let kind = entry.file_type().on("read", &entry.path())?;
                if kind.is_dir() {
                    folders.push(entry.path());
                } else if let Some(name) =
                    entry.file_name().to_str().and_then(module_name).filter(|_| kind.is_file())
                {
                    files.insert(name, entry.path());
                }
            }
        }
        Ok(Self { root: root.to_owned(), files })
    }

    /// These modules and all they depend on, dependencies first. What is built into the kernel is no file, and left out.
    pub(super) fn with_dependencies(&self, wanted: &[&str]) -> Result<Vec<Module>, ImageError> {
        let mut loaded = Vec::new();
        for name in wanted {
            self.load(name, &mut Vec::new(), &mut loaded)?;
        }
        Ok(loaded)
    }

    fn load(&self, name: &str, above: &mut Vec<String>, loaded: &mut Vec<Module>) -> Result<(), ImageError> {
        let name = name.replace('-', "_");
        if loaded.iter().any(|module| module.name == name) || above.contains(&name) {
            return Ok(());
        }
        let Some(path) = self.files.get(&name) else {
            // A module of our list may be built in; a dependency that is named is a module, and must be there.
            return match above.last() {
                None => Ok(()),
                Some(by) => Err(ImageError::invalid(
                    &self.root,
                    format!("{by} needs the module {name}, which is not there"),
                )),
            };
        };
        let content = std::fs::read(path).on("read", path)?;
        let content = match Compression::of(&content) {
            Some(packing) => packing.unpack(&content, path)?,
            None => content,
        };
        let needs = dependencies(&content).ok_or_else(|| ImageError::invalid(path, "not a kernel module"))?;
        above.push(name.clone());
        for dependency in needs {
            self.load(&dependency, above, loaded)?;
        }
        above.pop();
        loaded.push(Module { name, content });
        Ok(())
    }
}

/// `virtio_net.ko`, packed or not, is `virtio_net`; the kernel makes no difference between `-` and `_`.
fn module_name(file: &str) -> Option<String> {
    let (name, packing) = file.split_once(".ko")?;
    matches!(packing, "" | ".xz" | ".zst" | ".gz").then(|| name.replace('-', "_"))
}

fn dependencies(module: &[u8]) -> Option<Vec<String>> {
    let words = Elf::parse(module)?.section(b".modinfo")?;
    let depends = words.split(|&b| b == 0).find_map(|word| word.strip_prefix(b"depends="))?;
    let names = std::str::from_utf8(depends).ok()?.split(',').filter(|name| !name.is_empty());
    Some(names.map(str::to_owned).collect())
}
