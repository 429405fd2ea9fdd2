//! Content gives the name, and what was sealed stays as it was.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use super::*;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn the_same_content_is_the_same_image_wherever_it_came_from() {
    let bench = Bench::new();
    let (first, again) = (bench.good_input("a"), bench.input("b", &[]));
    for file in ["kernel", "initrd"] {
        fs::copy(first.join(file), again.join(file)).unwrap();
    }
    let digests = [bench.import(&first), bench.import(&again)].map(|built| built.unwrap().digest);
    assert_eq!(digests[0], digests[1]);
    assert_eq!(bench.store.list().unwrap(), [digests[0]]);
    assert_ne!(bench.import(&bench.good_input("other")).unwrap().digest, digests[0]);
}

#[test]
fn an_image_is_read_only_and_says_what_it_boots_from() {
    let bench = Bench::new();
    let input = bench.good_input("a");
    fs::write(input.join("cmdline"), "quiet\n").unwrap();
    let digest = bench.import(&input).unwrap().digest;
    let boot = bench.store.boot_image(&digest).unwrap();
    assert_eq!((boot.digest, boot.cmdline.as_str(), boot.rootfs), (digest, "quiet", None));
    assert_eq!(mode(&boot.kernel), 0o444);
    assert_eq!(mode(boot.kernel.parent().unwrap()), 0o555);
    assert_eq!(fs::read(&boot.kernel).unwrap(), kernel_file());
    assert_eq!(fs::read(boot.initrd.unwrap()).unwrap(), fs::read(input.join("initrd")).unwrap());
    assert_eq!(bench.store.verify(&digest).unwrap().digest(), digest);
    assert_eq!(bench.leftovers(), [""; 0]);
}

#[test]
fn a_file_changed_after_sealing_is_found_by_verifying_and_one_of_another_size_by_booting() {
    let bench = Bench::new();
    let digest = bench.import(&bench.good_input("a")).unwrap().digest;
    let initrd = bench.store.boot_image(&digest).unwrap().initrd.unwrap();
    let tamper = |content: &[u8]| {
        fs::set_permissions(&initrd, Permissions::from_mode(0o644)).unwrap();
        fs::write(&initrd, content).unwrap();
        fs::set_permissions(&initrd, Permissions::from_mode(0o444)).unwrap();
    };
    let mut content = fs::read(&initrd).unwrap();
    content[200] ^= 1;
    tamper(&content);
    assert!(bench.store.boot_image(&digest).is_ok());
    let error = bench.store.verify(&digest).unwrap_err();
    assert!(error.to_string().contains("initrd is not what was sealed"), "{error}");
    tamper(b"070701");
    let error = bench.store.boot_image(&digest).unwrap_err();
    assert_eq!(error.reason(), "ImageDamaged");
}

#[test]
fn a_file_that_can_be_written_again_is_no_longer_trusted() {
    let bench = Bench::new();
    let digest = bench.import(&bench.good_input("a")).unwrap().digest;
    let kernel = bench.store.boot_image(&digest).unwrap().kernel;
    fs::set_permissions(&kernel, Permissions::from_mode(0o644)).unwrap();
    let error = bench.store.boot_image(&digest).unwrap_err();
    assert!(error.to_string().contains("no longer sealed (mode 644)"), "{error}");
}

#[test]
fn a_manifest_of_another_image_is_refused() {
    let bench = Bench::new();
    let [one, two] = ["a", "b"].map(|name| bench.import(&bench.good_input(name)).unwrap().digest);
    let manifest = bench.store.folder(&one).join("manifest.json");
    fs::set_permissions(&manifest, Permissions::from_mode(0o644)).unwrap();
    fs::copy(bench.store.folder(&two).join("manifest.json"), &manifest).unwrap();
    assert_eq!(bench.store.boot_image(&one).unwrap_err().reason(), "ImageDamaged");
}

#[test]
fn what_a_crashed_maker_left_is_swept_and_what_a_living_one_makes_is_not() {
    let bench = Bench::new();
    let making = bench.store.begin().unwrap();
    let abandoned = bench.store.root().join("sha256/.making-0000000000000000");
    fs::create_dir(&abandoned).unwrap();
    fs::write(abandoned.join("kernel"), "half").unwrap();
    fs::create_dir(bench.store.root().join("sha256/.doomed-0000000000000000")).unwrap();
    Store::open(bench.store.root()).unwrap();
    assert_eq!(bench.leftovers().len(), 1);
    drop(making);
    assert_eq!(bench.leftovers(), [""; 0]);
}

#[test]
fn many_makers_of_one_image_at_once_all_get_it() {
    let bench = Bench::new();
    let input = bench.good_input("a");
    let digests = std::thread::scope(|scope| {
        let makers: Vec<_> = (0..8).map(|_| scope.spawn(|| bench.import(&input).unwrap().digest)).collect();
        makers.into_iter().map(|maker| maker.join().unwrap()).collect::<BTreeSet<_>>()
    });
    assert_eq!(bench.store.list().unwrap(), digests.into_iter().collect::<Vec<_>>());
    assert_eq!(bench.leftovers(), [""; 0]);
}
