//! From limits to the files that hold them. Nothing here touches a file.
//!
//! A tenant's group holds its quota's sums, an instance's group what one microVM may take: the guest's memory and
//! processors, and what its VMM needs to run it. So a guest that uses all it was promised is never killed, and a VMM
//! that is taken over gets no more than that.

use mvm_proto::document::IoLimits;
use serde::{Deserialize, Serialize};

/// Over which time a share of processors is measured: the kernel's own default. Shorter ones cost more switches,
/// longer ones let a guest stand still for longer.
pub const CPU_PERIOD_US: u64 = 100_000;

/// The kernel refuses less in a period, and more than this in any.
const CPU_QUOTA_US: (u64, u64) = (1_000, (1 << 44) - 1);

/// As many as there can be: the kernel calls that `max`.
const ALL_PIDS: u64 = 4_194_304;

/// Half of what the kernel can count in bytes; nothing has that much, and what is above reads back as `max`.
const ALL_MEMORY: u64 = 1 << 62;

const MIB: u64 = 1 << 20;

/// What a VMM takes besides its guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmmCost {
    pub mem_mib: u64,
    /// Its threads besides one for each processor of the guest. Threads count as processes.
    pub pids: u32,
}

/// What can run a guest, as far as its cost differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VmmKind {
    Firecracker,
    QemuKvm,
    /// Its code buffer must be bounded (`-accel tcg,tb-size=64`): left alone it grows to a gibibyte.
    QemuTcg,
}

impl VmmKind {
    /// Measured, with a margin: a guest must never be killed for what its VMM does.
    ///
    /// QEMU 7.2 under TCG, 15 s into a busy guest of 256 MiB, had 134 MiB beyond the guest's pages: 44 of the kernel's
    /// file (clean, given back when needed), 48 of code buffer (64 when full), 42 of text, heap and stacks. Without TCG
    /// the code buffer falls away. Firecracker promises under 5. Page tables, the guest's own and those that map it,
    /// are the kernel's and grow with the guest: two times 1/512, charged as 1/128. QEMU's pool for files has up to
    /// 64 threads; a few serve migration, RCU and signals.
    #[must_use]
    pub fn cost(self, guest_mem_mib: u64) -> VmmCost {
        let (fixed_mib, pids) = match self {
            Self::Firecracker => (32, 16),
            Self::QemuKvm => (128, 96),
            Self::QemuTcg => (192, 96),
        };
        VmmCost { mem_mib: fixed_mib + guest_mem_mib.div_ceil(128), pids }
    }
}

/// The most that all of a tenant's instances on this node may take together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantLimits {
    /// In thousandths of a processor.
    pub milli_cpus: u64,
    pub mem_mib: u64,
    /// How many can be in memory at once: each brings a VMM.
    pub max_instances: u32,
    /// Of the dearest VMM that the tenant's instances can get.
    pub vmm: VmmCost,
    /// Over all instances, besides the threads that `vmm` counts: one for each processor.
    pub max_vcpus: u32,
}

impl TenantLimits {
    /// From a quota: what instances may have together, and how many of them may be in memory.
    #[must_use]
    pub fn new(max_vcpus: u32, mem_mib: u64, max_instances: u32, vmm: VmmCost) -> Self {
        Self { milli_cpus: u64::from(max_vcpus) * 1000, mem_mib, max_instances, vmm, max_vcpus }
    }

    #[must_use]
    pub fn settings(&self) -> Vec<Setting> {
        let instances = u64::from(self.max_instances);
        let overhead = instances.saturating_mul(self.vmm.mem_mib);
        let threads = instances.saturating_mul(self.vmm.pids.into()).saturating_add(self.max_vcpus.into());
        let mut settings = memory(self.mem_mib.saturating_add(overhead));
        settings.push(Setting::needed("cpu.max", cpu_max(self.milli_cpus)));
        settings.push(Setting::needed("pids.max", pids_max(threads)));
        settings
    }
}

/// The most that one instance may take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceLimits {
    /// In thousandths of a processor.
    pub milli_cpus: u64,
    /// The guest's memory.
    pub mem_mib: u64,
    pub vmm_overhead_mib: u64,
    pub pids: u32,
    /// Its share where all want more than there is: 1 to 10000, and 100 is everyone's.
    pub cpu_weight: u16,
    /// What it may do to the disk; absent: all.
    #[serde(default)]
    pub io: Option<IoLimits>,
}

impl InstanceLimits {
    /// What a guest of this size needs under this VMM, and no more.
    #[must_use]
    pub fn new(vcpus: u32, mem_mib: u64, vmm: VmmCost) -> Self {
        Self {
            milli_cpus: u64::from(vcpus) * 1000,
            mem_mib,
            vmm_overhead_mib: vmm.mem_mib,
            pids: vmm.pids.saturating_add(vcpus),
            cpu_weight: 100,
            io: None,
        }
    }

    /// All but what it may do to the disk, whose file is not like these.
    #[must_use]
    pub fn settings(&self) -> Vec<Setting> {
        let mut settings = memory(self.mem_mib.saturating_add(self.vmm_overhead_mib));
        // A VMM that lost one of its threads or children is of no use: all of it goes, or none.
        settings.push(Setting::optional("memory.oom.group", "1".to_owned()));
        settings.push(Setting::needed("cpu.max", cpu_max(self.milli_cpus)));
        settings.push(Setting::needed("cpu.weight", self.cpu_weight.clamp(1, 10_000).to_string()));
        settings.push(Setting::needed("pids.max", pids_max(self.pids.into())));
        settings
    }
}

/// One file of a group and what belongs in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    pub file: &'static str,
    pub value: String,
    /// Whether the limit holds without it: kernels without swap accounting have no `memory.swap.max`.
    pub needed: bool,
}

impl Setting {
    pub(super) fn needed(file: &'static str, value: String) -> Self {
        Self { file, value, needed: true }
    }

    fn optional(file: &'static str, value: String) -> Self {
        Self { file, value, needed: false }
    }

    /// The controller that the file belongs to.
    #[must_use]
    pub fn controller(&self) -> &'static str {
        self.file.split('.').next().unwrap_or_default()
    }

    /// Whether what was read from the file is what belongs in it. Memory is counted in pages, whatever was asked for,
    /// and a file with a line for each device is about this device only.
    #[must_use]
    pub fn is_met_by(&self, found: &str, page_size: u64) -> bool {
        let (wanted, found) = (self.value.trim(), found.trim());
        match self.controller() {
            "memory" => match (wanted.parse::<u64>(), found.parse::<u64>()) {
                (Ok(wanted), Ok(found)) if wanted > 1 => wanted / page_size == found / page_size,
                _ => wanted == found,
            },
            "io" => {
                let device = wanted.split(' ').next().unwrap_or_default();
                let line = found.lines().find(|line| line.split(' ').next() == Some(device));
                // A device without a limit has no line.
                line.map_or(wanted.split(' ').skip(1).all(|item| item.ends_with("=max")), |line| {
                    line == wanted
                })
            }
            _ => wanted == found,
        }
    }
}

fn memory(mib: u64) -> Vec<Setting> {
    let bytes = mib.checked_mul(MIB).filter(|bytes| *bytes < ALL_MEMORY);
    let max = bytes.map_or("max".to_owned(), |bytes| bytes.to_string());
    // Without this, memory that is over the limit would go to the host's swap, where all tenants meet.
    vec![Setting::needed("memory.max", max), Setting::optional("memory.swap.max", "0".to_owned())]
}

/// A quota of nothing is not a thing the kernel knows: the least there is then.
fn cpu_max(milli_cpus: u64) -> String {
    let quota = milli_cpus.saturating_mul(CPU_PERIOD_US / 1000).clamp(CPU_QUOTA_US.0, CPU_QUOTA_US.1);
    format!("{quota} {CPU_PERIOD_US}")
}

fn pids_max(pids: u64) -> String {
    if pids >= ALL_PIDS { "max".to_owned() } else { pids.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: VmmCost = VmmCost { mem_mib: 50, pids: 20 };

    fn lines(settings: &[Setting]) -> Vec<String> {
        settings.iter().map(|setting| format!("{} {}", setting.file, setting.value)).collect()
    }

    #[test]
    fn an_instance_gets_its_guests_memory_and_its_vmms_and_no_swap() {
        let limits = InstanceLimits::new(2, 256, COST);
        assert_eq!(
            lines(&limits.settings()),
            [
                "memory.max 320864256",
                "memory.swap.max 0",
                "memory.oom.group 1",
                "cpu.max 200000 100000",
                "cpu.weight 100",
                "pids.max 22",
            ]
        );
    }

    #[test]
    fn a_tenant_gets_its_quota_and_a_vmm_for_each_instance() {
        let limits = TenantLimits::new(4, 1024, 8, COST);
        assert_eq!(
            lines(&limits.settings()),
            ["memory.max 1493172224", "memory.swap.max 0", "cpu.max 400000 100000", "pids.max 164"]
        );
    }

    #[test]
    fn limits_that_no_kernel_takes_become_the_nearest_that_it_takes() {
        let most = TenantLimits::new(u32::MAX, u64::MAX, u32::MAX, COST);
        assert_eq!(
            lines(&most.settings()),
            ["memory.max max", "memory.swap.max 0", "cpu.max 17592186044415 100000", "pids.max max"]
        );
        let least = TenantLimits::new(0, 0, 0, COST);
        assert_eq!(
            lines(&least.settings()),
            ["memory.max 0", "memory.swap.max 0", "cpu.max 1000 100000", "pids.max 0"]
        );
        let mut weightless = InstanceLimits::new(1, 1, COST);
        for (weight, written) in [(0, "cpu.weight 1"), (u16::MAX, "cpu.weight 10000")] {
            weightless.cpu_weight = weight;
            assert_eq!(lines(&weightless.settings())[4], written);
        }
    }

    #[test]
    fn what_is_read_back_may_differ_by_less_than_a_page_and_by_nothing_else() {
        let memory = Setting::needed("memory.max", "10000".to_owned());
        for (found, met) in
            [("8192\n", true), ("10000", true), ("4096\n", false), ("max\n", false), ("", false)]
        {
            assert_eq!(memory.is_met_by(found, 4096), met, "{found:?}");
        }
        let flag = Setting::needed("memory.oom.group", "1".to_owned());
        assert!(flag.is_met_by("1\n", 4096) && !flag.is_met_by("0\n", 4096));
        let swap = Setting::needed("memory.swap.max", "0".to_owned());
        assert!(
            swap.is_met_by("0\n", 4096) && !swap.is_met_by("4096\n", 4096) && !swap.is_met_by("max", 4096)
        );
        let cpu = Setting::needed("cpu.max", "20000 100000".to_owned());
        assert!(cpu.is_met_by("20000 100000\n", 4096) && !cpu.is_met_by("max 100000\n", 4096));
    }

    #[test]
    fn a_disks_limit_is_found_among_those_of_other_disks() {
        let io = Setting::needed("io.max", "8:16 rbps=1 wbps=max riops=max wiops=max".to_owned());
        assert!(io.is_met_by(
            "8:0 rbps=9 wbps=max riops=max wiops=max\n8:16 rbps=1 wbps=max riops=max wiops=max\n",
            1
        ));
        assert!(!io.is_met_by("8:0 rbps=9 wbps=max riops=max wiops=max\n", 1));
        assert!(!io.is_met_by("8:16 rbps=2 wbps=max riops=max wiops=max\n", 1));
        let unlimited = Setting::needed("io.max", "8:16 rbps=max wbps=max riops=max wiops=max".to_owned());
        assert!(unlimited.is_met_by("", 1));
    }

    #[test]
    fn a_dearer_way_to_run_a_guest_is_allowed_more() {
        let cost = |kind: VmmKind| kind.cost(1024).mem_mib;
        assert!(cost(VmmKind::Firecracker) < cost(VmmKind::QemuKvm));
        assert!(cost(VmmKind::QemuKvm) < cost(VmmKind::QemuTcg));
        assert_eq!(VmmKind::QemuTcg.cost(128).mem_mib, 193);
    }
}
