//! Finds out whether KVM runs guests on this machine, by running one.
//!
//! A `/dev/kvm` that opens proves little: there are machines on which QEMU refuses it with the usual processor model,
//! and machines on which it runs guests a thousand times slower than emulation would. So a guest of a few bytes counts
//! to fifty million and ends its VMM with a number of its own: some 50 ms on a KVM worth having. The answer is kept
//! in `probe.json` for as long as this machine and this QEMU stay what they are. [`judge`] is pure; the agent's start
//! does not wait, a first boot does: VMs of one node should not differ by when they were booted.

mod guest;

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::qemu::Accelerator;

/// Where the answer is kept, below the data directory.
const FILE: &str = "probe.json";
const GUEST_FILE: &str = "probe-guest.elf";
const KVM: &str = "/dev/kvm";

/// Sixty times what a good KVM needs, and less than anyone minds to wait for a first boot.
const DEADLINE: Duration = Duration::from_secs(3);

/// In order of preference. The second hides one register that some nested KVMs can't set.
const CPUS: [&str; 2] = ["host", "host,-arch-capabilities"];

/// Whether KVM may be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// With this processor model.
    Works { cpu: String },
    /// For a person: why not.
    Not { reason: String },
}

impl Verdict {
    #[must_use]
    pub fn accelerator(&self) -> Accelerator {
        match self {
            Self::Works { cpu } => Accelerator::Kvm { cpu: cpu.clone() },
            Self::Not { .. } => Accelerator::Tcg,
        }
    }

    /// As the choice of a driver wants it.
    pub fn as_result(&self) -> Result<(), String> {
        match self {
            Self::Works { .. } => Ok(()),
            Self::Not { reason } => Err(reason.clone()),
        }
    }
}

/// What one attempt came to.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Attempt {
    Ran,
    /// Not done within the deadline.
    Slow,
    Failed(String),
}

/// Decides from what was tried, in the order in which it was tried.
fn judge(device: Result<(), String>, attempts: &[(&str, Attempt)]) -> Verdict {
    if let Err(cause) = device {
        return Verdict::Not { reason: cause };
    }
    if let Some((cpu, _)) = attempts.iter().find(|(_, attempt)| *attempt == Attempt::Ran) {
        return Verdict::Works { cpu: (*cpu).to_owned() };
    }
    if attempts.iter().any(|(_, attempt)| *attempt == Attempt::Slow) {
        return Verdict::Not { reason: format!("a guest on KVM did not get to its end within {DEADLINE:?}") };
    }
    let why = attempts.iter().map(|(cpu, attempt)| match attempt {
        Attempt::Failed(said) => format!("with -cpu {cpu}: {said}"),
        other => format!("with -cpu {cpu}: {other:?}"),
    });
    Verdict::Not { reason: format!("no guest ran on KVM; {}", why.collect::<Vec<_>>().join("; ")) }
}

/// For which machine and QEMU an answer holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Key {
    boot_id: String,
    program: PathBuf,
    modified_ns: u128,
    bytes: u64,
}

impl Key {
    fn of(program: &Path) -> Option<Self> {
        let meta = std::fs::metadata(program).ok()?;
        let modified = meta.modified().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
        Some(Self {
            boot_id: mvm_host::boot_id().ok()?.to_owned(),
            program: program.to_owned(),
            modified_ns: modified.as_nanos(),
            bytes: meta.len(),
        })
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Recorded {
    key: Key,
    kvm: Verdict,
}

/// The answer of an earlier probe, if it still holds.
#[must_use]
pub fn recorded(data_dir: &Path, program: &Path) -> Option<Verdict> {
    let recorded: Recorded = serde_json::from_slice(&std::fs::read(data_dir.join(FILE)).ok()?).ok()?;
    (Some(recorded.key) == Key::of(program)).then_some(recorded.kvm)
}

/// A probe in the background. Clones share it.
#[derive(Debug, Clone)]
pub struct Probe {
    verdict: watch::Receiver<Option<Verdict>>,
}

impl Probe {
    /// Begins, unless the answer is known. Needs a runtime.
    #[must_use]
    pub fn start(data_dir: &Path, program: &Path) -> Self {
        let known = recorded(data_dir, program);
        let missing = known.is_none();
        let (tell, verdict) = watch::channel(known);
        if missing {
            let (data_dir, program) = (data_dir.to_owned(), program.to_owned());
            tokio::spawn(async move {
                let verdict = probe(&data_dir, &program).await;
                tracing::info!(?verdict, "probed KVM");
                tell.send_replace(Some(verdict));
            });
        }
        Self { verdict }
    }

    /// What it came to. A probe that was given up says no.
    pub async fn settled(&self) -> Verdict {
        let mut verdict = self.verdict.clone();
        let settled = verdict.wait_for(Option::is_some).await;
        let settled = settled.ok().and_then(|verdict| verdict.clone());
        settled.unwrap_or_else(|| Verdict::Not { reason: "the probe was given up".to_owned() })
    }
}

/// Whether this process may use KVM at all, which says nothing of how well it works.
pub(crate) fn open_device() -> Result<(), String> {
    let opened = OpenOptions::new().read(true).write(true).open(KVM);
    opened.map(|_| ()).map_err(|cause| format!("{KVM} can't be opened: {cause}"))
}

/// Tries KVM, and keeps the answer.
async fn probe(data_dir: &Path, program: &Path) -> Verdict {
    let device = open_device();
    let mut attempts = Vec::new();
    if device.is_ok() {
        let kernel = data_dir.join(GUEST_FILE);
        match std::fs::write(&kernel, guest::elf()) {
            Ok(()) => attempts = try_all(program, &kernel).await,
            Err(cause) => attempts.push((CPUS[0], Attempt::Failed(cause.to_string()))),
        }
        // It is written anew each time; one that stays does no harm.
        let _ = std::fs::remove_file(&kernel);
    }
    let kvm = judge(device, &attempts);
    if let Some(key) = Key::of(program)
        && let Ok(text) = serde_json::to_vec_pretty(&Recorded { key, kvm: kvm.clone() })
        && let Err(cause) = mvm_pki::files::write_private(data_dir.join(FILE), &text)
    {
        tracing::warn!(error = %cause, "could not keep the probe's answer; it is asked again at the next start");
    }
    kvm
}

async fn try_all(program: &Path, kernel: &Path) -> Vec<(&'static str, Attempt)> {
    let mut attempts = Vec::new();
    for cpu in CPUS {
        let attempt = try_one(program, kernel, cpu).await;
        // One that started and was slow is slow with any processor model.
        let over = matches!(attempt, Attempt::Ran | Attempt::Slow);
        attempts.push((cpu, attempt));
        if over {
            break;
        }
    }
    attempts
}

async fn try_one(program: &Path, kernel: &Path, cpu: &str) -> Attempt {
    let mut command = Command::new(program);
    command
        .args(["-M", "microvm,acpi=on", "-accel", "kvm", "-cpu", cpu, "-m", "16"])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
        .args(["-device", &format!("isa-debug-exit,iobase={},iosize=4", guest::EXIT_PORT), "-kernel"])
        .arg(kernel)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let began = Instant::now();
    match timeout(DEADLINE, command.output()).await {
        Err(_) => Attempt::Slow,
        Ok(Err(cause)) => Attempt::Failed(cause.to_string()),
        Ok(Ok(output)) if output.status.code() == Some(guest::EXIT_CODE) => {
            tracing::debug!(cpu, took = ?began.elapsed(), "a guest ran on KVM");
            Attempt::Ran
        }
        Ok(Ok(output)) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let first = said.lines().next().unwrap_or("QEMU said nothing").to_owned();
            Attempt::Failed(format!("{}: {first}", output.status))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_is_used_only_when_a_guest_got_to_its_end_on_it() {
        let failed = || Attempt::Failed("failed to set MSR 0x10a".to_owned());
        let works = |cpu: &str| Verdict::Works { cpu: cpu.to_owned() };
        assert_eq!(judge(Ok(()), &[("host", Attempt::Ran)]), works("host"));
        assert_eq!(judge(Ok(()), &[("host", failed()), ("other", Attempt::Ran)]), works("other"));
        let reason = |verdict: Verdict| verdict.as_result().unwrap_err();
        assert!(reason(judge(Err("Permission denied".to_owned()), &[])).contains("Permission denied"));
        assert!(reason(judge(Ok(()), &[("host", failed()), ("other", Attempt::Slow)])).contains("3s"));
        assert!(reason(judge(Ok(()), &[("host", failed())])).contains("MSR"));
    }

    #[test]
    fn an_answer_holds_for_the_program_it_was_given_for() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("qemu");
        std::fs::write(&program, b"one").unwrap();
        let kvm = Verdict::Works { cpu: "host".to_owned() };
        let current = Recorded { key: Key::of(&program).unwrap(), kvm: kvm.clone() };
        std::fs::write(dir.path().join(FILE), serde_json::to_vec(&current).unwrap()).unwrap();
        assert_eq!(recorded(dir.path(), &program), Some(kvm));
        std::fs::write(&program, b"another").unwrap();
        assert_eq!(recorded(dir.path(), &program), None);
    }
}
