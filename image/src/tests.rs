//! What the image store promises, with small stand-ins for kernels and disks. Real ones are in the workspace's tests.

mod bad_input;
mod collecting;
mod parts;
mod resolving;
mod sealing;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use super::*;

/// A folder with a store in it, and a place for input.
pub(super) struct Bench {
    pub(super) folder: tempfile::TempDir,
    pub(super) store: Store,
}

impl Bench {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&folder.path().join("images")).unwrap();
        Self { folder, store }
    }

    /// A folder to import, with these files.
    pub(super) fn input(&self, name: &str, files: &[(&str, &[u8])]) -> PathBuf {
        let folder = self.folder.path().join(name);
        fs::create_dir_all(&folder).unwrap();
        for (name, content) in files {
            fs::write(folder.join(name), content).unwrap();
        }
        folder
    }

    /// A folder that makes a good image.
    pub(super) fn good_input(&self, name: &str) -> PathBuf {
        self.input(name, &[("kernel", &kernel_file()), ("initrd", name_as_cpio(name).as_slice())])
    }

    /// Another initrd in a folder of before.
    pub(super) fn change(&self, name: &str, content: &str) {
        fs::write(self.folder.path().join(name).join("initrd"), name_as_cpio(content)).unwrap();
    }

    pub(super) fn import(&self, folder: &Path) -> Result<Built, ImageError> {
        self.build(&of_folder(folder))
    }

    pub(super) fn build(&self, image: &ImageRef) -> Result<Built, ImageError> {
        let never = AtomicBool::new(false);
        build(&self.store, image, &ImageSettings::default(), &Work::new(&|_| {}, &never))
    }

    /// Whatever lies in the store and is no image.
    pub(super) fn leftovers(&self) -> Vec<String> {
        let names = fs::read_dir(self.store.root().join("sha256")).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.len() != 64).collect()
    }
}

pub(super) fn of_folder(folder: &Path) -> ImageRef {
    reference(&format!("path:{}", folder.display()))
}

pub(super) fn reference(text: &str) -> ImageRef {
    ImageRef { flake_ref: text.to_owned(), profile: "default".parse().unwrap(), digest: None }
}

fn name_as_cpio(name: &str) -> Vec<u8> {
    let mut tree = cpio::Tree::default();
    tree.file("name", 0o644, name);
    let mut archive = Vec::new();
    tree.write(&mut archive).unwrap();
    archive
}

/// The least that a VMM could enter: an ELF file with something to load and the note that says where.
pub(super) fn kernel_file() -> Vec<u8> {
    let note: Vec<u8> =
        [&4_u32.to_le_bytes()[..], &4_u32.to_le_bytes(), &18_u32.to_le_bytes(), b"Xen\0", &[0; 4]].concat();
    elf_file(&[(1, b"code to load".to_vec()), (4, note)])
}

/// An ELF file with these segments.
pub(super) fn elf_file(segments: &[(u32, Vec<u8>)]) -> Vec<u8> {
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(64, 0);
    file[18] = 62;
    file[32] = 64; // The segments' table follows the header.
    file[54] = 56;
    file[56] = u8::try_from(segments.len()).unwrap();
    let mut at = 64 + 56 * segments.len();
    for (kind, content) in segments {
        let mut entry = [0; 56];
        entry[..4].copy_from_slice(&kind.to_le_bytes());
        entry[8..16].copy_from_slice(&u64::try_from(at).unwrap().to_le_bytes());
        entry[32..40].copy_from_slice(&u64::try_from(content.len()).unwrap().to_le_bytes());
        entry[48] = 4;
        file.extend_from_slice(&entry);
        at += content.len();
    }
    segments.iter().for_each(|(_, content)| file.extend_from_slice(content));
    file
}

/// A loader with a packed kernel inside, as distributions ship them.
pub(super) fn bzimage(payload: &[u8]) -> Vec<u8> {
    let mut file = vec![0; 2 * 512];
    file[0x1f1] = 1;
    file[0x202..0x206].copy_from_slice(b"HdrS");
    file[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    file[0x24c..0x250].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
    file.extend_from_slice(payload);
    file
}

pub(super) fn gzip(content: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(content).unwrap();
    packed.finish().unwrap()
}
