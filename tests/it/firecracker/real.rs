//! The suite on the real Firecracker, where it and a KVM that boots are present.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_image::BootImage;
use mvm_needs::{Need, can_run};
use mvm_proto::{Digest, InstanceId};
use mvm_vmm::conformance::{self, Subject};
use mvm_vmm::firecracker::{FirecrackerDriver, FirecrackerSettings, JailerSettings};
use mvm_vmm::{Driver, VmSpec};
use tokio::io::AsyncWriteExt;

/// A guest that boots at all does so in a second or two; a KVM that emulates may take minutes, and then says so here.
const BOOT_SECONDS: &str = "MVM_FIRECRACKER_BOOT_SECONDS";
const BOOTS_WITHIN: Duration = Duration::from_secs(60);

fn boots_within(asked: Option<&str>) -> Result<Duration, String> {
    let Some(asked) = asked else { return Ok(BOOTS_WITHIN) };
    match asked.parse() {
        Ok(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds)),
        _ => Err(format!("{BOOT_SECONDS} is {asked:?}, which is no number of seconds")),
    }
}

/// Who a jailed one runs as.
const JAIL_USER: u32 = 61_000;

/// What the real one boots: a folder with `kernel` and `initrd` or `rootfs`, whose guest has the agent's program.
fn image() -> Result<BootImage, String> {
    let folder =
        std::env::var_os("MVM_FIRECRACKER_IMAGE").ok_or("MVM_FIRECRACKER_IMAGE names no image folder")?;
    let file = |name: &str| Some(Path::new(&folder).join(name)).filter(|path| path.is_file());
    let cmdline = file("cmdline").and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
    Ok(BootImage {
        digest: Digest::of(b"the image of the real one"),
        kernel: file("kernel").ok_or("the image folder has no kernel")?,
        initrd: file("initrd"),
        rootfs: file("rootfs"),
        cmdline: cmdline.trim().to_owned(),
    })
}

/// The jailer that comes with it: named, or beside it.
fn jailer(program: Option<&Path>) -> Result<JailerSettings, String> {
    let named = std::env::var_os("MVM_FIRECRACKER_JAILER").map(PathBuf::from);
    let beside = program.and_then(Path::parent).map(|dir| dir.join("jailer"));
    let jailer = named.or(beside).filter(|jailer| jailer.is_file());
    let jailer =
        jailer.ok_or("MVM_FIRECRACKER_JAILER names no jailer, and none is beside MVM_FIRECRACKER")?;
    Ok(JailerSettings::new(jailer, JAIL_USER, JAIL_USER))
}

fn present(jailed: bool) -> Result<(FirecrackerSettings, BootImage), String> {
    let program = std::env::var_os("MVM_FIRECRACKER").map(PathBuf::from);
    let jailer = if jailed { Some(jailer(program.as_deref())?) } else { None };
    let settings = FirecrackerSettings { program, jailer, ..FirecrackerSettings::default() };
    let dir = tempfile::tempdir().map_err(|cause| cause.to_string())?;
    FirecrackerDriver::open(dir.path(), settings.clone()).map_err(|error| error.to_string())?;
    if !Path::new("/dev/kvm").exists() {
        return Err("there is no /dev/kvm".to_owned());
    }
    Ok((settings, image()?))
}

/// Whether a guest comes up: a KVM that is there does not always boot.
async fn boots(driver: &FirecrackerDriver, subject: &Subject) -> Result<(), String> {
    let within = boots_within(std::env::var(BOOT_SECONDS).ok().as_deref())?;
    let spec = VmSpec {
        instance: InstanceId::from_bits(0xb007_0000),
        revision: Digest::of(b"probe"),
        resources: subject.resources,
        image: subject.image.clone(),
        bounds: mvm_vmm::Bounds::default(),
        purpose: mvm_vmm::Purpose::default(),
    };
    let booted = driver.boot(&spec).await.map_err(|error| format!("{error:?}"));
    let spoken = async {
        let mut stream = driver.guest(&spec.instance).await.map_err(|error| error.to_string())?;
        stream.write_all(mvm_proto::guest::OPENING).await.map_err(|error| error.to_string())
    };
    let answer = match booted {
        Ok(()) => tokio::time::timeout(within, spoken).await.unwrap_or(Err("no guest came up".to_owned())),
        Err(error) => Err(error),
    };
    driver.remove(&spec.instance).await.map_err(|error| error.to_string())?;
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn the_real_one_passes_the_suite_where_it_is_present_and_boots() {
    suite(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_real_one_passes_the_suite_behind_its_jailer() {
    suite(true).await;
}

#[test]
fn how_long_a_boot_may_take_is_said_in_seconds() {
    assert_eq!(boots_within(None), Ok(BOOTS_WITHIN));
    assert_eq!(boots_within(Some("900")), Ok(Duration::from_secs(900)));
    for nonsense in ["", "0", "-1", "1m"] {
        boots_within(Some(nonsense)).unwrap_err();
    }
}

#[allow(clippy::print_stdout, reason = "which version passed is read in its output")]
async fn suite(jailed: bool) {
    let dir = tempfile::tempdir().unwrap();
    let what = if jailed { "the real Firecracker behind its jailer" } else { "the real Firecracker" };
    let found = present(jailed);
    if jailed && !can_run(&[Need::Root]) {
        return;
    }
    if !can_run(&[Need::Firecracker(found.as_ref().map(drop).map_err(Clone::clone))]) {
        return;
    }
    let (settings, image) = found.unwrap();
    let subject = Subject::of(image);
    let open = async || FirecrackerDriver::open(dir.path(), settings.clone()).unwrap();
    let driver = open().await;
    if !can_run(&[Need::Kvm(boots(&driver, &subject).await)]) {
        return;
    }
    conformance::suite(&driver, &subject).await.unwrap();
    conformance::guest_suite(&driver, &subject).await.unwrap();
    conformance::outlives_its_owner(open, &subject).await.unwrap();
    println!("the suite on {what}: passed");
}
