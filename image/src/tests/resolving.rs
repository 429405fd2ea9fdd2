//! What the agent is told while images come and go.

use std::time::Duration;

use tokio::time::timeout;

use super::*;

const PATIENCE: Duration = Duration::from_secs(30);

fn open(bench: &Bench) -> Images {
    let settings = ImageSettings {
        first_retry: Duration::ZERO,
        longest_retry: Duration::ZERO,
        ..ImageSettings::default()
    };
    Images::open(bench.store.root(), settings).unwrap()
}

/// The same, where a folder that changed is imported at the next look.
fn open_quiet(bench: &Bench) -> Images {
    let settings = ImageSettings { folder_quiet: Duration::ZERO, ..ImageSettings::default() };
    Images::open(bench.store.root(), settings).unwrap()
}

/// Builds that end from here on.
fn from_now(images: &Images) -> tokio::sync::watch::Receiver<u64> {
    let mut changed = images.changed();
    changed.mark_unchanged();
    changed
}

/// Asks, and once more whenever a build has ended, until the answer is final.
async fn settled(images: &Images, image: &ImageRef) -> Resolution {
    let mut changed = images.changed();
    loop {
        match images.resolve(image) {
            Resolution::Working { .. } => timeout(PATIENCE, changed.changed()).await.unwrap().unwrap(),
            settled => return settled,
        }
    }
}

#[tokio::test]
async fn an_image_is_built_in_the_background_and_known_from_then_on() {
    let bench = Bench::new();
    let image = of_folder(&bench.good_input("a"));
    let images = open(&bench);
    assert!(matches!(images.resolve(&image), Resolution::Working { .. }));
    let Resolution::Ready(digest) = settled(&images, &image).await else { panic!("not built") };
    assert_eq!(images.boot_image(&digest, &image.flake_ref).unwrap().digest, digest);
    // Its folder is not looked at again, by this agent or the next.
    fs::remove_dir_all(image.flake_ref.strip_prefix("path:").unwrap()).unwrap();
    assert_eq!(images.resolve(&image), Resolution::Ready(digest));
    assert_eq!(open(&bench).resolve(&image), Resolution::Ready(digest));
}

#[tokio::test]
async fn an_image_that_is_asked_for_by_digest_and_there_is_ready_without_building() {
    let bench = Bench::new();
    let digest = bench.import(&bench.good_input("a")).unwrap().digest;
    let image = ImageRef { digest: Some(digest), ..reference("github:org/repo?rev=abc") };
    assert_eq!(open(&bench).resolve(&image), Resolution::Ready(digest));
}

#[tokio::test]
async fn another_image_than_the_one_asked_for_is_not_used() {
    let bench = Bench::new();
    let image = ImageRef { digest: Some(Digest::of(b"other")), ..of_folder(&bench.good_input("a")) };
    let settings = ImageSettings::default();
    let images = Images::open(bench.store.root(), settings).unwrap();
    let Resolution::Unavailable { reason, message } = settled(&images, &image).await else { panic!("used") };
    assert_eq!(reason, "DigestMismatch");
    assert!(message.contains(&Digest::of(b"other").to_string()), "{message}");
    // The answer stays until it is time to try again.
    assert!(matches!(images.resolve(&image), Resolution::Unavailable { reason: "DigestMismatch", .. }));
}

#[tokio::test]
async fn a_build_that_failed_is_tried_again_and_heals() {
    let bench = Bench::new();
    let input = bench.good_input("a");
    let (image, hidden) = (of_folder(&input), bench.folder.path().join("hidden"));
    fs::rename(&input, &hidden).unwrap();
    let images = Images::open(
        bench.store.root(),
        ImageSettings { first_retry: Duration::from_millis(50), ..ImageSettings::default() },
    )
    .unwrap();
    assert!(matches!(settled(&images, &image).await, Resolution::Unavailable { reason: "StoreFailed", .. }));
    fs::rename(&hidden, &input).unwrap();
    let mut ticks = tokio::time::interval(Duration::from_millis(20));
    let healed = timeout(PATIENCE, async {
        loop {
            ticks.tick().await;
            if let Resolution::Ready(digest) = images.resolve(&image) {
                return digest;
            }
        }
    });
    assert!(bench.store.contains(&healed.await.unwrap()));
}

#[tokio::test]
async fn what_can_not_be_had_says_why() {
    let bench = Bench::new();
    let settings = ImageSettings {
        nix: NixSettings { program: PathBuf::from("no-such-nix"), ..NixSettings::default() },
        ..ImageSettings::default()
    };
    let images = Images::open(bench.store.root(), settings).unwrap();
    for (text, expected, advice) in [
        ("oci:alpine", "NotSupported", "must not be a container image"),
        ("builtin:other", "InvalidReference", "builtin:busybox"),
        ("builtin:busybox", "GuestMissing", "scripts/build-guest"),
        ("github:org/repo", "NixMissing", "install Debian's nix-bin"),
    ] {
        let Resolution::Unavailable { reason, message } = settled(&images, &reference(text)).await else {
            panic!("{text} is there")
        };
        assert_eq!(reason, expected, "{text}");
        assert!(message.contains(advice), "{text}: {message}");
    }
}

#[tokio::test]
async fn a_folder_that_changed_is_imported_again_and_its_older_image_serves_until_then() {
    let bench = Bench::new();
    let image = of_folder(&bench.good_input("a"));
    let images = open_quiet(&bench);
    let Resolution::Ready(first) = settled(&images, &image).await else { panic!("not built") };
    assert_eq!(images.resolve(&image), Resolution::Ready(first), "nothing changed");
    bench.change("a", "another initrd");
    let mut changed = from_now(&images);
    assert_eq!(images.resolve(&image), Resolution::Ready(first), "until the new one is there");
    timeout(PATIENCE, changed.changed()).await.unwrap().unwrap();
    let Resolution::Ready(second) = images.resolve(&image) else { panic!("not imported again") };
    assert_ne!(second, first);
    // Seen by an agent that was away meanwhile, too.
    drop(images);
    bench.change("a", "a third");
    let images = open_quiet(&bench);
    let mut changed = from_now(&images);
    assert_eq!(images.resolve(&image), Resolution::Ready(second));
    images.resolve(&image);
    timeout(PATIENCE, changed.changed()).await.unwrap().unwrap();
    assert!(!matches!(images.resolve(&image), Resolution::Ready(digest) if digest == second));
}

#[tokio::test]
async fn a_folder_that_changed_to_what_is_no_image_says_so_until_it_is_mended() {
    let bench = Bench::new();
    let image = of_folder(&bench.good_input("a"));
    let images = open_quiet(&bench);
    let Resolution::Ready(first) = settled(&images, &image).await else { panic!("not built") };
    bench.input("a", &[("initrd", b"no archive")]);
    let mut changed = from_now(&images);
    images.resolve(&image);
    timeout(PATIENCE, changed.changed()).await.unwrap().unwrap();
    for _ in 0..2 {
        let Resolution::Outdated { digest, reason, message } = images.resolve(&image) else {
            panic!("not told")
        };
        assert_eq!((digest, reason), (first, "InvalidImage"));
        assert!(message.contains("not an initrd") && message.contains(&first.to_string()), "{message}");
    }
    bench.change("a", "mended");
    images.resolve(&image);
    timeout(PATIENCE, changed.changed()).await.unwrap().unwrap();
    assert!(matches!(images.resolve(&image), Resolution::Ready(digest) if digest != first));
}

#[tokio::test]
async fn a_folder_is_left_alone_while_it_is_being_filled_and_where_a_digest_pins_it() {
    let bench = Bench::new();
    let image = of_folder(&bench.good_input("a"));
    let busy = Images::open(
        bench.store.root(),
        ImageSettings { folder_quiet: Duration::from_secs(3600), ..ImageSettings::default() },
    )
    .unwrap();
    let Resolution::Ready(first) = settled(&busy, &image).await else { panic!("not built") };
    let images = open_quiet(&bench);
    let pinned = ImageRef { digest: Some(first), ..image.clone() };
    bench.change("a", "another initrd");
    for (images, image) in [(&busy, &image), (&images, &pinned)] {
        let changed = from_now(images);
        for _ in 0..3 {
            assert_eq!(images.resolve(image), Resolution::Ready(first));
        }
        assert!(!changed.has_changed().unwrap());
    }
    // Whoever may import it does, so that the test could have failed.
    assert!(matches!(images.resolve(&image), Resolution::Ready(digest) if digest == first));
    let mut changed = from_now(&images);
    images.resolve(&image);
    timeout(PATIENCE, changed.changed()).await.unwrap().unwrap();
    assert!(matches!(images.resolve(&image), Resolution::Ready(digest) if digest != first));
}

#[tokio::test]
async fn what_failed_is_told_with_its_reference_also_while_it_is_tried_again() {
    let bench = Bench::new();
    let image = of_folder(&bench.input("a", &[("initrd", b"070701")]));
    let images = open(&bench);
    let mut changed = images.changed();
    let first = settled(&images, &image).await;
    let Resolution::Unavailable { reason, message } = &first else { panic!("{first:?}") };
    assert_eq!(*reason, "InvalidImage");
    assert!(message.contains(&image.flake_ref) && message.contains("no file `kernel`"), "{message}");
    // The wait is over at once: each of these begins or meets another try.
    for _ in 0..3 {
        changed.mark_unchanged();
        assert_eq!(images.resolve(&image), first);
        timeout(PATIENCE, changed.changed()).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn an_image_removed_behind_the_agents_back_is_built_again() {
    let bench = Bench::new();
    let image = of_folder(&bench.good_input("a"));
    let images = open(&bench);
    let Resolution::Ready(digest) = settled(&images, &image).await else { panic!("not built") };
    remove(&bench.store, &digest, true).unwrap();
    assert_eq!(images.boot_image(&digest, &image.flake_ref).unwrap_err().reason(), "ImageMissing");
    assert_eq!(settled(&images, &image).await, Resolution::Ready(digest));
    assert!(images.boot_image(&digest, &image.flake_ref).is_ok());
}

#[test]
fn imagined_images_are_always_there() {
    let images = Images::imagined(Vouched::unchecked());
    let image = reference("github:org/repo");
    let Resolution::Ready(digest) = images.resolve(&image) else { panic!("not imagined") };
    assert_eq!(images.boot_image(&digest, &image.flake_ref).unwrap().digest, digest);
}
