//! Images from Nix flakes, built by the real `nix` without the network, in a store of the test's own.
//!
//! Needs Debian's `nix-bin` and the test image in `target/images`, whose kernel and initrd the flake packs.

#![allow(clippy::unwrap_used)] // A test may end at the first surprise.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use mvm_image::BootImage;
use mvm_image::{Built, ImageError, ImageRef, ImageSettings, NixSettings, Store, Work, build};
use mvm_needs::{Need, can_run};
use tempfile::TempDir;

/// One output that is an image and one that fails. There are no inputs, so that nothing need be fetched.
const FLAKE: &str = r#"{
  outputs = { self }: let
    make = name: script: derivation {
      inherit name;
      system = "x86_64-linux";
      builder = "/bin/sh";
      args = [ "-euc" script ];
      PATH = "/usr/bin:/bin";
      parts = ./parts;
    };
  in {
    packages.x86_64-linux = {
      minimal = make "image" "mkdir $out; cp $parts/* $out/";
      broken = make "broken" "echo the compiler is unhappy; exit 3";
    };
  };
}
"#;

struct Site {
    dir: TempDir,
    image: BootImage,
}

fn test_image() -> BootImage {
    let store = Store::open(&mvm_needs::test_images()).unwrap();
    let newest = store.list().unwrap().into_iter().max_by_key(|digest| store.made_at(digest));
    store.boot_image(&newest.unwrap()).unwrap()
}

impl Site {
    fn where_it_can_run() -> Option<Self> {
        if !can_run(&[Need::Program("nix"), Need::TestImage]) {
            return None;
        }
        let image = test_image();
        let dir = TempDir::new().unwrap();
        let parts = dir.path().join("flake/parts");
        fs::create_dir_all(&parts).unwrap();
        fs::write(dir.path().join("flake/flake.nix"), FLAKE).unwrap();
        fs::copy(&image.kernel, parts.join("kernel")).unwrap();
        fs::copy(image.initrd.as_ref().unwrap(), parts.join("initrd")).unwrap();
        fs::write(parts.join("cmdline"), &image.cmdline).unwrap();
        Some(Self { dir, image })
    }

    fn path(&self, name: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn nix(&self) -> NixSettings {
        let settings = "build-users-group =\nsandbox = false\nsubstitute = false\nflake-registry =\n";
        fs::write(self.path("nix/etc").join("nix.conf"), settings).unwrap();
        let places = [
            ("NIX_STORE_DIR", "nix/store"),
            ("NIX_STATE_DIR", "nix/var/nix"),
            ("NIX_LOG_DIR", "nix/var/log"),
            ("NIX_CONF_DIR", "nix/etc"),
            ("NIX_LOCALSTATE_DIR", "nix/var"),
            ("XDG_CACHE_HOME", "nix/cache"),
            ("HOME", "nix/home"),
        ];
        let environment =
            places.map(|(name, place)| (name.to_owned(), self.path(place).display().to_string()));
        let arguments = vec!["--offline".to_owned()];
        NixSettings { environment: environment.to_vec(), arguments, ..NixSettings::default() }
    }

    fn build(&self, profile: &str) -> Result<(Store, Built), ImageError> {
        let store = Store::open(&self.path("images")).unwrap();
        let flake_ref = format!("flake:{}", self.path("flake").display());
        let image = ImageRef { flake_ref, profile: profile.parse().unwrap(), digest: None };
        let settings = ImageSettings { nix: self.nix(), ..ImageSettings::default() };
        let (quiet, never) = (|_: &str| {}, AtomicBool::new(false));
        let built = build(&store, &image, &settings, &Work::new(&quiet, &never))?;
        Ok((store, built))
    }
}

/// What `nix` puts into its store is read-only, also for whoever removes the folder.
impl Drop for Site {
    fn drop(&mut self) {
        let _ = std::process::Command::new("chmod").args(["-R", "u+w"]).arg(self.dir.path()).status();
    }
}

#[test]
fn a_flake_is_built_offline_into_the_very_image_that_it_packs() {
    let Some(site) = Site::where_it_can_run() else { return };
    let (store, built) = site.build("minimal").unwrap();
    store.verify(&built.digest).unwrap();
    let image = store.boot_image(&built.digest).unwrap();
    assert!(fs::read(&image.kernel).unwrap() == fs::read(&site.image.kernel).unwrap());
    assert!(
        fs::read(image.initrd.unwrap()).unwrap() == fs::read(site.image.initrd.as_ref().unwrap()).unwrap()
    );
    assert_eq!(image.cmdline, site.image.cmdline);
    assert!(built.made_of[0].contains("nix/store"), "{:?}", built.made_of);
    // Again it is the same image.
    assert_eq!(site.build("minimal").unwrap().1.digest, built.digest);
}

#[test]
fn a_flake_that_does_not_build_says_what_nix_said() {
    let Some(site) = Site::where_it_can_run() else { return };
    let text = |error: ImageError| {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        text
    };
    let broken = text(site.build("broken").unwrap_err());
    assert!(broken.contains("the compiler is unhappy"), "{broken}");
    let absent = text(site.build("no-such-output").unwrap_err());
    assert!(absent.contains("no-such-output"), "{absent}");
}
