//! The settings of a [`QemuDriver`](super::QemuDriver).

use std::path::PathBuf;
use std::time::Duration;

use super::args::Accelerator;
use crate::programs::find_program;
use crate::settings::VmmSettings;

/// What distributions call it.
const PROGRAM: &str = "qemu-system-x86_64";

/// How a [`QemuDriver`] finds what it runs.
#[derive(Debug, Clone)]
pub struct QemuSettings {
    pub program: PathBuf,
    pub accelerator: AcceleratorChoice,
    /// From the start of the process to its first answer: 30 ms when quiet, seconds behind many boots at once.
    pub start_within: Duration,
    /// For one command. QEMU answers in a millisecond; on a busy host it may wait for a processor.
    pub answer_within: Duration,
}

/// What guests are to run on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum AcceleratorChoice {
    /// KVM where a probe boots a guest on it, else emulation.
    #[default]
    Probed,
    Only(Accelerator),
}

impl QemuSettings {
    /// The QEMU that the operator named, else the one in `PATH`.
    #[must_use]
    pub fn new(vmm: &VmmSettings) -> Self {
        let path = std::env::var_os("PATH");
        let found = find_program(vmm.qemu.as_deref(), PROGRAM, path.as_deref());
        // One that is missing now may be installed later; starting it says what is missing.
        let program = found.unwrap_or_else(|_| vmm.qemu.clone().unwrap_or_else(|| PathBuf::from(PROGRAM)));
        Self {
            program,
            accelerator: AcceleratorChoice::default(),
            start_within: Duration::from_secs(20),
            answer_within: Duration::from_secs(10),
        }
    }

    /// The same with this accelerator, whatever a probe would say.
    #[must_use]
    pub fn on(self, accelerator: Accelerator) -> Self {
        Self { accelerator: AcceleratorChoice::Only(accelerator), ..self }
    }
}
