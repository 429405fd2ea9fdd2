//! Folders that hold something else than an image.

use std::os::unix::fs::symlink;

use super::*;

/// Imports and gives why not. Whatever was wrong, nothing is left of it.
fn refused(bench: &Bench, input: &Path) -> ImageError {
    let error = bench.import(input).unwrap_err();
    assert_eq!(bench.leftovers(), [""; 0]);
    assert_eq!(bench.store.list().unwrap(), []);
    error
}

fn squashfs(size: u64, real: usize) -> Vec<u8> {
    let mut disk = b"hsqs".to_vec();
    disk.resize(real, 0);
    disk[40..48].copy_from_slice(&size.to_le_bytes());
    disk
}

#[test]
fn a_folder_without_what_an_image_needs_is_refused() {
    let bench = Bench::new();
    let kernel = kernel_file();
    let whole = squashfs(4096, 4096);
    for (name, files, fault) in [
        ("none", vec![], "no file `kernel`"),
        ("alone", vec![("kernel", &kernel[..])], "neither `initrd` nor `rootfs`"),
        ("empty", vec![("kernel", &kernel[..]), ("rootfs", b"")], "rootfs: empty"),
        ("text", vec![("kernel", &kernel[..]), ("initrd", b"hello")], "not an initrd"),
        ("qcow2", vec![("kernel", &kernel[..]), ("rootfs", b"QFI\xfb\0\0\0\x03")], "a qcow2 image"),
        ("noise", vec![("kernel", &kernel[..]), ("rootfs", b"noise")], "not a file system"),
        ("cut", vec![("kernel", &kernel[..]), ("rootfs", &squashfs(9000, 4096))], "truncated: the squashfs"),
        ("lines", vec![("kernel", &kernel[..]), ("rootfs", &whole), ("cmdline", b"a\nb")], "one line"),
        ("script", vec![("kernel", &b"#!/bin/sh"[..]), ("rootfs", &whole)], "not a kernel"),
    ] {
        let error = refused(&bench, &bench.input(name, &files));
        assert!(error.to_string().contains(fault), "{name}: {error}");
        assert_eq!(error.reason(), "InvalidImage", "{name}");
    }
    let missing = refused(&bench, Path::new("/no/such/folder"));
    assert!(missing.to_string().contains("could not open the folder"), "{missing}");
}

#[test]
fn a_disk_alone_is_an_image_whose_kernel_is_told_where_its_root_is() {
    let bench = Bench::new();
    let input = bench.input("disk", &[("kernel", &kernel_file()), ("rootfs", &squashfs(4096, 4096))]);
    let boot = bench.store.boot_image(&bench.import(&input).unwrap().digest).unwrap();
    assert_eq!((boot.initrd, boot.cmdline.as_str()), (None, "root=/dev/vda ro"));
    assert!(boot.rootfs.is_some());
}

#[test]
fn links_may_lead_about_in_a_folder_and_never_out_of_it() {
    let bench = Bench::new();
    let input = bench.good_input("links");
    fs::rename(input.join("kernel"), input.join("vmlinux-6.1")).unwrap();
    symlink("vmlinux-6.1", input.join("kernel")).unwrap();
    fs::rename(input.join("initrd"), bench.folder.path().join("outside")).unwrap();
    for target in ["../outside", "/proc/self/exe", "initrd"] {
        let _ = fs::remove_file(input.join("initrd"));
        symlink(target, input.join("initrd")).unwrap();
        let error = refused(&bench, &input);
        assert!(error.to_string().contains("leads out of the folder"), "{target}: {error}");
    }
    fs::remove_file(input.join("initrd")).unwrap();
    fs::rename(bench.folder.path().join("outside"), input.join("initrd")).unwrap();
    assert!(bench.import(&input).is_ok());
}

#[test]
fn what_is_not_a_regular_file_is_refused_without_waiting_for_it() {
    let bench = Bench::new();
    let input = bench.good_input("pipe");
    fs::remove_file(input.join("initrd")).unwrap();
    let mode = rustix::fs::Mode::from_raw_mode(0o644);
    rustix::fs::mknodat(rustix::fs::CWD, input.join("initrd"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let error = refused(&bench, &input);
    assert!(error.to_string().contains("initrd: not a regular file"), "{error}");
    fs::remove_file(input.join("initrd")).unwrap();
    fs::create_dir(input.join("initrd")).unwrap();
    let error = refused(&bench, &input);
    assert!(error.to_string().contains("initrd: not a regular file"), "{error}");
}

#[test]
fn a_disk_that_is_too_large_is_refused_before_it_is_read() {
    let bench = Bench::new();
    let input = bench.good_input("large");
    fs::File::create(input.join("rootfs")).unwrap().set_len((64 << 30) + 1).unwrap();
    let error = refused(&bench, &input);
    assert!(error.to_string().contains("are the most"), "{error}");
}

#[test]
fn an_image_that_is_not_the_one_asked_for_is_told_and_gets_no_name() {
    let bench = Bench::new();
    let input = bench.good_input("a");
    let asked = ImageRef { digest: Some(Digest::of(b"another")), ..of_folder(&input) };
    assert_eq!(bench.build(&asked).unwrap_err().reason(), "DigestMismatch");
    assert_eq!(bench.store.reference(&asked.flake_ref, &asked.profile).unwrap(), None);
    let right = ImageRef { digest: Some(bench.import(&input).unwrap().digest), ..asked };
    assert!(bench.build(&right).is_ok());
}

#[test]
fn work_that_is_called_off_leaves_nothing() {
    let bench = Bench::new();
    let off = AtomicBool::new(true);
    let image = of_folder(&bench.good_input("a"));
    let error =
        build(&bench.store, &image, &ImageSettings::default(), &Work::new(&|_| {}, &off)).unwrap_err();
    assert_eq!((error.reason(), bench.leftovers()), ("Cancelled", vec![]));
}

#[test]
fn a_guest_program_that_is_missing_or_needs_libraries_is_told_before_anything_is_downloaded() {
    let bench = Bench::new();
    let never = AtomicBool::new(false);
    let build_with = |guest: Option<PathBuf>| {
        let settings = ImageSettings { guest, ..ImageSettings::default() };
        build(&bench.store, &reference("builtin:busybox"), &settings, &Work::new(&|_| {}, &never))
            .unwrap_err()
    };
    assert_eq!(build_with(None).reason(), "GuestMissing");
    let dynamic = bench.folder.path().join("guest");
    fs::write(&dynamic, elf_file(&[(1, vec![0]), (3, b"/lib64/ld-linux.so".to_vec())])).unwrap();
    assert!(build_with(Some(dynamic)).to_string().contains("dynamically linked"));
    assert!(!bench.store.root().join("cache").exists());
}
