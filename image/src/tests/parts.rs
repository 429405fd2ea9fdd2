//! Kernels, archives, modules and references, each by itself.

use super::*;
use crate::modules::Modules;

fn lz4(content: &[u8]) -> Vec<u8> {
    // One block of literals alone is a block, too.
    let mut block = Vec::new();
    let mut length = content.len();
    block.push(if length < 15 { u8::try_from(length << 4).unwrap() } else { 0xf0 });
    if length >= 15 {
        length -= 15;
        while length >= 255 {
            block.push(255);
            length -= 255;
        }
        block.push(u8::try_from(length).unwrap());
    }
    block.extend_from_slice(content);
    let size = u32::try_from(block.len()).unwrap().to_le_bytes();
    [&[0x02, 0x21, 0x4c, 0x18], &size[..], &block].concat()
}

#[test]
fn a_kernel_comes_out_of_its_loader_however_it_was_packed() {
    let (kernel, path) = (kernel_file(), Path::new("kernel"));
    let size = u32::try_from(kernel.len()).unwrap().to_le_bytes();
    let with_size = |packed: Vec<u8>| [packed, size.to_vec()].concat();
    for file in [kernel.clone(), bzimage(&gzip(&kernel)), bzimage(&with_size(lz4(&kernel)))] {
        assert_eq!(kernel::bootable(file, path).unwrap(), kernel);
    }
}

#[test]
fn what_is_no_kernel_is_refused_for_what_it_is() {
    let (whole, path) = (bzimage(&gzip(&kernel_file())), Path::new("kernel"));
    let cut = |bytes: &[u8], by: usize| bytes[..bytes.len() - by].to_vec();
    let program = elf_file(&[(1, b"code".to_vec())]);
    for (file, fault) in [
        (b"#!/bin/sh\n".to_vec(), "not a kernel"),
        (Vec::new(), "not a kernel"),
        (program, "no PVH note"),
        (elf_file(&[]), "truncated"),
        (cut(&kernel_file(), 30), "truncated"),
        (cut(&whole, 1), "truncated"),
        (whole[..0x203].to_vec(), "not a kernel"),
        (whole[..0x210].to_vec(), "truncated"),
        (bzimage(b"BZh91AY"), "packed in a way that is not known"),
        (bzimage(&gzip(b"no ELF file")), "not a kernel"),
        (bzimage(&[&[0x02, 0x21, 0x4c, 0x18][..], &[0xff; 12]].concat()), "damaged or truncated"),
    ] {
        let error = kernel::bootable(file, path).unwrap_err();
        assert!(error.to_string().contains(fault), "{error}, not {fault}");
    }
}

#[test]
fn no_bytes_make_the_reader_of_kernels_panic() {
    let mut random = fastrand::Rng::with_seed(7);
    for whole in [kernel_file(), bzimage(&gzip(&kernel_file())), bzimage(&lz4(&kernel_file()))] {
        for _ in 0..3000 {
            let mut file = whole.clone();
            for _ in 0..random.usize(1..6) {
                let at = random.usize(..file.len());
                file[at] = random.u8(..);
            }
            file.truncate(random.usize(..=file.len()));
            let _ = kernel::bootable(file, Path::new("kernel"));
        }
    }
}

#[test]
fn an_archive_is_the_same_whatever_order_its_files_came_in() {
    let archive = |paths: &[&str]| {
        let mut tree = cpio::Tree::default();
        paths.iter().for_each(|path| tree.file(path, 0o644, *path));
        tree.link("bin/sh", "busybox");
        tree.character_device("dev/console", 0o600, 5, 1);
        let mut bytes = Vec::new();
        tree.write(&mut bytes).unwrap();
        bytes
    };
    let bytes = archive(&["init", "bin/busybox", "etc/a/b"]);
    assert_eq!(bytes, archive(&["etc/a/b", "bin/busybox", "init"]));
    assert_eq!(bytes.len() % 512, 0);
    let text = String::from_utf8_lossy(&bytes);
    let order = [
        "bin\0",
        "bin/busybox\0",
        "bin/sh\0",
        "dev\0",
        "dev/console\0",
        "etc\0",
        "etc/a\0",
        "etc/a/b\0",
        "TRAILER!!!",
    ];
    let places: Vec<_> = order.iter().map(|name| text.find(name).unwrap()).collect();
    assert!(places.is_sorted(), "{places:?}");
}

/// A module that says what it depends on: an ELF file with that one section and the sections' names.
fn module(depends: &str) -> Vec<u8> {
    let (info, names) = (format!("license=GPL\0depends={depends}\0"), b"\0.modinfo\0".as_slice());
    let mut file = elf_file(&[]);
    let (info_at, names_at) = (file.len() as u64, (file.len() + info.len()) as u64);
    file.extend_from_slice(info.as_bytes());
    file.extend_from_slice(names);
    let table = file.len() as u64;
    for (name, at, size) in [(1_u32, info_at, info.len()), (0, names_at, names.len())] {
        let mut header = [0; 64];
        header[..4].copy_from_slice(&name.to_le_bytes());
        header[24..32].copy_from_slice(&at.to_le_bytes());
        header[32..40].copy_from_slice(&(size as u64).to_le_bytes());
        file.extend_from_slice(&header);
    }
    file[40..48].copy_from_slice(&table.to_le_bytes());
    (file[58], file[60], file[62]) = (64, 2, 1);
    file
}

#[test]
fn modules_come_after_what_they_depend_on_and_once() {
    let folder = tempfile::tempdir().unwrap();
    let below = folder.path().join("6.1/kernel");
    fs::create_dir_all(&below).unwrap();
    for (name, depends) in [
        ("virtio-net", "net_failover,virtio"),
        ("net_failover", "failover"),
        ("failover", ""),
        ("virtio", ""),
        ("broken", "gone"),
    ] {
        fs::write(below.join(format!("{name}.ko")), module(depends)).unwrap();
    }
    let modules = Modules::below(folder.path()).unwrap();
    let loaded = modules.with_dependencies(&["virtio", "virtio_net", "built_in"]).unwrap();
    let names: Vec<_> = loaded.iter().map(|module| module.name.as_str()).collect();
    assert_eq!(names, ["virtio", "failover", "net_failover", "virtio_net"]);
    let error = modules.with_dependencies(&["broken"]).unwrap_err();
    assert!(error.to_string().contains("broken needs the module gone"), "{error}");
}
