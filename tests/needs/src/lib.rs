//! Whether a test that needs privileges, programs or hardware can run on this machine.
//!
//! Every crate's tests ask [`can_run`], and nothing else decides: `tests/tidy.rs` refuses other ways to leave a test
//! early. Where `CI` is set a need that is not met fails the test, but for what [`Need::ci_may_lack`] lists; elsewhere
//! the test says on stderr that it did not run and why, and passes.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sched::{CloneFlags, unshare};

/// What a test may need of the machine it runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Need {
    Root,
    /// Mounts in a namespace of its own: many containers refuse them to root too.
    Mounts,
    NetworkNamespaces,
    /// `/dev/net/tun`, which TAPs are made with.
    Tun,
    /// A program in `PATH`.
    Program(&'static str),
    /// A `PATH` without this program, for tests of what happens where it is not installed.
    NoProgram(&'static str),
    /// The checker of alert rules, of Debian's package `prometheus`; see [`promtool`].
    Promtool,
    /// The image that tests boot, in `target/images`.
    TestImage,
    /// What microVMs are emulated with: QEMU and the test image.
    MicroVms,
    /// A KVM that boots guests. Only the test can tell: many machines have `/dev/kvm` and boot nothing.
    Kvm(Result<(), String>),
    /// The real Firecracker and an image for it, as the test found them.
    Firecracker(Result<(), String>),
}

impl Need {
    /// All that a CI machine may lack: hardware that is not rented everywhere, and what runs on nothing else.
    fn ci_may_lack(&self) -> bool {
        matches!(self, Self::Kvm(_) | Self::Firecracker(_))
    }

    /// What is missing and how to get it; `None` when it is there.
    fn missing(&self) -> Option<String> {
        let unless = |there: bool, missing: &str| (!there).then(|| missing.to_owned());
        match self {
            Self::Root => unless(nix::unistd::geteuid().is_root(), "root; run the tests as root"),
            Self::Mounts => {
                let mounts = "mount -t tmpfs tmpfs /tmp";
                let namespace = ["--mount", "--propagation", "private", "sh", "-c", mounts];
                let tried = Command::new("unshare").args(namespace).output();
                let able = tried.is_ok_and(|output| output.status.success());
                unless(able, "the right to mount; run the tests as root, in a container with CAP_SYS_ADMIN")
            }
            Self::NetworkNamespaces => {
                // A thread of its own: what it leaves, nothing else does.
                let tried = std::thread::spawn(|| unshare(CloneFlags::CLONE_NEWNET)).join();
                let able = tried.is_ok_and(|left| left.is_ok());
                unless(able, "network namespaces; run the tests as root, in a container with CAP_SYS_ADMIN")
            }
            Self::Tun => unless(Path::new("/dev/net/tun").exists(), "/dev/net/tun; run `modprobe tun`"),
            Self::Program(name) => {
                unless(is_in_path(name), &format!("the program {name}; run `scripts/setup`"))
            }
            Self::NoProgram(name) => {
                unless(!is_in_path(name), &format!("a PATH without {name}; take it out"))
            }
            Self::Promtool => unless(promtool().is_file(), "the program promtool; run `scripts/setup`"),
            Self::TestImage => unless(test_image().is_some(), "an image in target/images; run `make image`"),
            Self::MicroVms => {
                [Self::Program("qemu-system-x86_64"), Self::TestImage].iter().find_map(Self::missing)
            }
            Self::Kvm(found) => {
                found.as_ref().err().map(|why| format!("a KVM that boots guests ({why}); run on bare metal"))
            }
            Self::Firecracker(found) => {
                found.as_ref().err().map(|why| format!("Firecracker ({why}); see docs/microvms.md"))
            }
        }
    }
}

fn is_in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).is_file())
}

/// Where `scripts/setup` unpacks the checker of alert rules.
#[must_use]
pub fn promtool() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/prometheus/usr/bin/promtool")
}

/// Where `make image` builds what tests boot.
#[must_use]
pub fn test_images() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/images")
}

/// The directory of the newest image that tests boot.
#[must_use]
pub fn test_image() -> Option<PathBuf> {
    let images = std::fs::read_dir(test_images().join("sha256").canonicalize().ok()?).ok()?;
    let images = images.flatten().map(|image| image.path()).filter(|image| image.join("kernel").is_file());
    images.max_by_key(|image| image.metadata().and_then(|meta| meta.modified()).ok())
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Runs,
    DoesNotRun(String),
    Fails(String),
}

fn verdict(needs: &[Need], in_ci: bool, missing: impl Fn(&Need) -> Option<String>) -> Verdict {
    let lacking = |need: &Need| missing(need).map(|what| (need.ci_may_lack(), what));
    match needs.iter().find_map(lacking) {
        None => Verdict::Runs,
        Some((false, what)) if in_ci => {
            Verdict::Fails(format!("it must run in CI, and this machine lacks {what}"))
        }
        Some((_, what)) => Verdict::DoesNotRun(format!("this machine lacks {what}")),
    }
}

/// Whether the test can run here. Says on stderr when it can't, and panics where it must.
///
/// # Panics
/// In CI, when the machine lacks what every CI machine must have.
#[must_use]
pub fn can_run(needs: &[Need]) -> bool {
    let in_ci = std::env::var_os("CI").is_some_and(|value| value != "false");
    let test = std::thread::current();
    let test = test.name().unwrap_or("a test");
    match verdict(needs, in_ci, Need::missing) {
        Verdict::Runs => true,
        Verdict::DoesNotRun(why) => {
            // Past the harness, which keeps back what a test prints that passes.
            let _ = writeln!(std::io::stderr(), "{test}: did not run: {why}");
            false
        }
        Verdict::Fails(why) => panic!("{test}: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lacks(missing: &'static [Need]) -> impl Fn(&Need) -> Option<String> {
        |need| missing.contains(need).then(|| format!("{need:?}"))
    }

    #[test]
    fn what_a_ci_machine_may_lack_is_a_kvm_that_boots_and_firecracker_and_nothing_else() {
        let why = || Err("why".to_owned());
        for need in [Need::Kvm(why()), Need::Firecracker(why())] {
            let said = need.missing().unwrap();
            assert!(said.contains("why"), "{said}");
            let verdict = verdict(&[need], true, Need::missing);
            assert_eq!(verdict, Verdict::DoesNotRun(format!("this machine lacks {said}")));
        }
        let musts = [
            Need::Root,
            Need::Mounts,
            Need::NetworkNamespaces,
            Need::Tun,
            Need::Program("no-such-program"),
            Need::NoProgram("sh"),
            Need::Promtool,
            Need::TestImage,
            Need::MicroVms,
        ];
        for need in musts {
            let lacking = |asked: &Need| (*asked == need).then(|| "it; run `scripts/setup`".to_owned());
            let fails = "it must run in CI, and this machine lacks it; run `scripts/setup`".to_owned();
            assert_eq!(
                verdict(std::slice::from_ref(&need), true, lacking),
                Verdict::Fails(fails),
                "{need:?}"
            );
            let not_run = "this machine lacks it; run `scripts/setup`".to_owned();
            assert_eq!(
                verdict(std::slice::from_ref(&need), false, lacking),
                Verdict::DoesNotRun(not_run),
                "{need:?}"
            );
        }
    }

    #[test]
    fn a_test_runs_where_all_its_needs_are_met() {
        let needs = [Need::Root, Need::Tun];
        assert_eq!(verdict(&needs, true, lacks(&[Need::Mounts])), Verdict::Runs);
        assert_eq!(verdict(&[], true, lacks(&[Need::Root])), Verdict::Runs);
        let fails = "it must run in CI, and this machine lacks Tun".to_owned();
        assert_eq!(verdict(&needs, true, lacks(&[Need::Tun])), Verdict::Fails(fails));
    }

    #[test]
    fn a_program_that_is_missing_is_named_with_what_installs_it() {
        let said = Need::Program("no-such-program").missing().unwrap();
        assert_eq!(said, "the program no-such-program; run `scripts/setup`");
        assert_eq!(Need::Program("sh").missing(), None);
        assert_eq!(Need::Kvm(Ok(())).missing(), None);
    }
}
