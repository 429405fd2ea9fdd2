//! What could run guests here, and on what.

use std::path::{Path, PathBuf};

use mvm_proto::text::chain;
use mvm_vmm::choice;
use mvm_vmm::firecracker::{FirecrackerSettings, settings::find};
use mvm_vmm::probe::{Probe, Verdict};
use mvm_vmm::qemu::Binary;
use mvm_vmm::{DriverChoice, DriverKind, VmmSettings};

use super::Check;

const VMM: &str = "vmm";
const KVM: &str = "kvm";

pub(super) async fn examine(choice: DriverChoice, vmm: &VmmSettings, data_dir: &Path) -> Vec<Check> {
    if choice == DriverChoice::Only(DriverKind::Fake) {
        let found = "the fake driver runs no guest: instances exist on paper only";
        return vec![Check::warning(VMM, found, "leave --driver fake out")];
    }
    let path = std::env::var_os("PATH");
    let settings = FirecrackerSettings::with_programs(vmm);
    let firecracker = find(&settings, path.as_deref())
        .map(|(program, version)| format!("Firecracker {version} ({})", program.display()))
        .map_err(|error| error.to_string());
    let program = choice::qemu_program(vmm);
    let qemu = match &program {
        Err(missing) => Err(missing.clone()),
        Ok(program) => match Binary::examine(program).await {
            Ok(binary) => {
                let sandbox = if binary.sandbox { "" } else { ", without its sandbox" };
                Ok(format!("QEMU {}{sandbox} ({})", binary.version, program.display()))
            }
            Err(error) => Err(chain(&error)),
        },
    };
    let kvm = match (&qemu, program) {
        (Ok(_), Ok(program)) => kvm(&probe(data_dir, &program).await),
        _ => Check::warning(
            KVM,
            "not tested: the test guest needs QEMU",
            "install it: apt-get install --no-install-recommends qemu-system-x86",
        ),
    };
    vec![judge(choice, firecracker, qemu), kvm]
}

/// In the data directory, where an agent finds the answer; elsewhere when there is none, which leaves no trace.
async fn probe(data_dir: &Path, program: &Path) -> Verdict {
    if data_dir.is_dir() {
        return Probe::start(data_dir, program).settled().await;
    }
    let elsewhere = Elsewhere::make();
    match &elsewhere {
        Ok(dir) => Probe::start(&dir.0, program).settled().await,
        Err(cause) => Verdict::Not { reason: format!("could not create a folder to try it in: {cause}") },
    }
}

/// A directory that is gone when the probe is over.
struct Elsewhere(PathBuf);

impl Elsewhere {
    fn make() -> std::io::Result<Self> {
        let dir = std::env::temp_dir().join(format!("mvm-doctor-{:016x}", fastrand::u64(..)));
        mvm_pki::files::create_private_dir(&dir)?;
        Ok(Self(dir))
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        // An empty directory in a temporary place does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// `choice`: one that was named must be there; else either will do.
fn judge(choice: DriverChoice, firecracker: Result<String, String>, qemu: Result<String, String>) -> Check {
    const INSTALL: &str = "apt-get install --no-install-recommends qemu-system-x86";
    match (choice, firecracker, qemu) {
        (DriverChoice::Only(DriverKind::Firecracker), Err(missing), _) => Check::failed(
            VMM,
            format!("--driver firecracker: {missing}"),
            "name it by --firecracker, or leave --driver out",
        ),
        (DriverChoice::Only(DriverKind::Qemu), _, Err(missing)) => {
            Check::failed(VMM, format!("--driver qemu: {missing}"), format!("install it: {INSTALL}"))
        }
        (_, Ok(firecracker), Ok(qemu)) => Check::ok(VMM, format!("{firecracker}; {qemu}")),
        (_, Ok(one), Err(_)) | (_, Err(_), Ok(one)) => Check::ok(VMM, one),
        (_, Err(firecracker), Err(qemu)) => Check::failed(
            VMM,
            format!("no program that runs microVMs: {qemu}; {firecracker}"),
            format!("install one: {INSTALL}"),
        ),
    }
}

fn kvm(verdict: &Verdict) -> Check {
    match verdict {
        Verdict::Works { cpu } => Check::ok(KVM, format!("runs guests (processor model {cpu})")),
        Verdict::Not { reason } => Check::warning(
            KVM,
            format!("{reason}; guests are emulated, which is many times slower"),
            "use a machine with hardware virtualisation (on a VM: switch nested virtualisation on), load kvm_amd or \
             kvm_intel, and let the agent open /dev/kvm (root, or group kvm)",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Health;
    use super::*;

    #[test]
    fn one_vmm_is_enough_and_none_is_a_failure_with_a_fix() {
        let there = |name: &str| Ok(name.to_owned());
        let missing = || Err("not in PATH".to_owned());
        let auto = DriverChoice::Auto;
        assert_eq!(judge(auto, there("Firecracker"), missing()).health, Health::Ok);
        assert_eq!(judge(auto, missing(), there("QEMU")).health, Health::Ok);
        let none = judge(auto, missing(), missing());
        assert_eq!(none.health, Health::Failed);
        assert!(none.fix.unwrap().contains("qemu-system-x86"));
    }

    #[test]
    fn the_driver_that_was_named_must_be_there_itself() {
        let (there, missing) = (|| Ok("there".to_owned()), || Err("not in PATH".to_owned()));
        let (firecracker, qemu) =
            (DriverChoice::Only(DriverKind::Firecracker), DriverChoice::Only(DriverKind::Qemu));
        assert_eq!(judge(firecracker, missing(), there()).health, Health::Failed);
        assert_eq!(judge(qemu, there(), missing()).health, Health::Failed);
        assert_eq!(judge(qemu, missing(), there()).health, Health::Ok);
    }

    #[test]
    fn a_kvm_that_runs_no_guest_is_a_warning_because_emulation_works() {
        let not = Verdict::Not { reason: "no guest got to its end".to_owned() };
        assert_eq!(kvm(&not).health, Health::Warning);
        assert_eq!(kvm(&Verdict::Works { cpu: "host".to_owned() }).health, Health::Ok);
    }
}
