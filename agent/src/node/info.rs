//! What this machine is: names from the kernel, capacity from `/proc` and the data directory's file system.
//!
//! Read once at start. [`measure`] does the reading; the parsing below it is pure.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use mvm_proto::Timestamp;
use mvm_proto::document::SCHEMA_VERSION;
use mvm_proto::status::{self, Capacity, Feature, NodeInfo};
use mvm_vmm::{Capability, Driver, DriverKind};

/// Memory kept back for the host itself: the kernel, this agent and the VMMs' own needs.
const HOST_RESERVE_MIB: u64 = 512;

/// The host never keeps back more than this share of a small machine's memory (one in so many parts).
const HOST_RESERVE_DIVISOR: u64 = 4;

/// One bridge's /24 has 252 addresses for instances; a node of a few tenants stays well under this.
const DEFAULT_MAX_INSTANCES: u32 = 1000;

/// Where instances have their files, in the data directory.
const INSTANCES_DIR: &str = "vms";

/// How many vcpus are offered per processor: microVMs are mostly idle, and cgroups hold them to their weight.
const VCPU_OVERCOMMIT: u32 = 4;

/// The capacity of a node whose driver runs no guest: as large as a large host, the same on every machine.
const IMAGINED: Capacity = Capacity {
    vcpus: 512,
    mem_mib: 1024 * 1024,
    disk_mib: 16 * 1024 * 1024,
    max_instances: DEFAULT_MAX_INSTANCES,
};

const MIB: u64 = 1024 * 1024;

/// The operator's word on how much of the machine instances may use; what is absent is measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CapacityCaps {
    pub vcpus: Option<u32>,
    pub mem_mib: Option<u64>,
    pub disk_mib: Option<u64>,
    pub max_instances: Option<u32>,
}

/// What the machine offers, with the settings' caps applied, and what it is called.
#[must_use]
pub fn measure(data_dir: &Path, driver: DriverKind, caps: &CapacityCaps, started_at: Timestamp) -> NodeInfo {
    let uname = nix::sys::utsname::uname().ok();
    let text = |value: Option<&std::ffi::OsStr>| {
        value.map_or_else(String::new, |v| v.to_string_lossy().into_owned())
    };
    let (processors, memory_mib) = if driver.uses_host_resources() { machine() } else { (0, 0) };
    NodeInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        hostname: text(uname.as_ref().map(|u| u.nodename())),
        kernel: text(uname.as_ref().map(|u| u.release())),
        arch: text(uname.as_ref().map(|u| u.machine())),
        boot_id: read_trimmed("/proc/sys/kernel/random/boot_id"),
        started_at: started_at.to_string(),
        driver: driver.to_string(),
        // A driver that runs no guest needs nothing to run it on; what the others found is known once they probed.
        accelerator: if driver.uses_host_resources() { "" } else { "none" }.to_owned(),
        capacity: offered(data_dir, driver).map(|offered| capped(offered, caps)),
        processors,
        memory_mib,
        cpu: cpu_model(),
        schema_versions: vec![SCHEMA_VERSION],
        features: Feature::ALL.iter().map(ToString::to_string).collect(),
        ..NodeInfo::default()
    }
}

/// What a driver can do, and what it lacks with the reason.
pub(crate) fn capabilities(driver: &impl Driver) -> Vec<status::Capability> {
    let told = |capability: Capability| status::Capability {
        name: capability.as_str().to_owned(),
        lacking: driver.lacks(capability).map_or_else(String::new, |lacking| lacking.reason.to_owned()),
    };
    Capability::ALL.into_iter().map(told).collect()
}

/// The processor's model, as far as the kernel tells.
fn cpu_model() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    model.map_or_else(String::new, |(_, name)| name.trim().to_owned())
}

/// Processors and memory (MiB) of this machine itself.
#[must_use]
pub fn machine() -> (u32, u64) {
    let processors =
        std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX));
    (processors, total_memory_mib(&fs::read_to_string("/proc/meminfo").unwrap_or_default()))
}

/// What instances may use of this machine; none where that can't be told. Those of a driver that runs no guest use nothing of it.
fn offered(data_dir: &Path, driver: DriverKind) -> Option<Capacity> {
    if !driver.uses_host_resources() {
        return Some(IMAGINED);
    }
    let (processors, memory) = machine();
    // Before the first start the data directory is not there yet; it will lie on its parent's file system.
    let there = data_dir.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."));
    let files = nix::sys::statvfs::statvfs(there).ok()?;
    let free = files.blocks_available().saturating_mul(files.fragment_size());
    // What instances have written already is promised to them, and is not less for that.
    let disk = free.saturating_add(allocated_below(&data_dir.join(INSTANCES_DIR))) / MIB;
    Some(Capacity {
        vcpus: processors.saturating_mul(VCPU_OVERCOMMIT),
        mem_mib: offered_memory_mib(memory),
        disk_mib: disk,
        max_instances: DEFAULT_MAX_INSTANCES,
    })
}

/// Bytes on the disk of all files below a folder; what has several names counts once. What can't be read counts nothing.
fn allocated_below(folder: &Path) -> u64 {
    let (mut seen, mut folders, mut bytes) = (BTreeSet::new(), vec![folder.to_owned()], 0u64);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let Ok(file) = entry.metadata() else { continue };
            if file.is_dir() {
                folders.push(entry.path());
            } else if seen.insert((file.dev(), file.ino())) {
                bytes = bytes.saturating_add(file.blocks().saturating_mul(512));
            }
        }
    }
    bytes
}

/// The operator's word goes, except that no word makes disk space.
fn capped(offered: Capacity, caps: &CapacityCaps) -> Capacity {
    Capacity {
        vcpus: caps.vcpus.unwrap_or(offered.vcpus),
        mem_mib: caps.mem_mib.unwrap_or(offered.mem_mib),
        disk_mib: caps.disk_mib.map_or(offered.disk_mib, |cap| cap.min(offered.disk_mib)),
        max_instances: caps.max_instances.unwrap_or(offered.max_instances),
    }
}

/// What is left for instances of a machine with this much memory.
fn offered_memory_mib(total: u64) -> u64 {
    total - HOST_RESERVE_MIB.min(total / HOST_RESERVE_DIVISOR)
}

/// `MemTotal` of `/proc/meminfo` in MiB; 0 when there is none.
fn total_memory_mib(meminfo: &str) -> u64 {
    meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))
        .and_then(|rest| rest.split_ascii_whitespace().next())
        .and_then(|kib| kib.parse::<u64>().ok())
        .map_or(0, |kib| kib / 1024)
}

/// A node id made of the host name, for a node that runs from a file without a certificate.
#[must_use]
pub fn node_id_from_hostname(hostname: &str) -> Option<mvm_proto::NodeId> {
    let label = hostname.split('.').next().unwrap_or_default().to_ascii_lowercase().replace('_', "-");
    label.trim_matches('-').parse().ok()
}

fn read_trimmed(path: &str) -> String {
    fs::read_to_string(path).map_or_else(|_| String::new(), |text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_the_kernels_table_and_some_is_kept_for_the_host() {
        assert_eq!(total_memory_mib("MemTotal:       16384000 kB\nMemFree: 1 kB\n"), 16_000);
        assert_eq!(total_memory_mib("garbage"), 0);
        assert_eq!(
            (offered_memory_mib(16_000), offered_memory_mib(1_000), offered_memory_mib(0)),
            (15_488, 750, 0)
        );
    }

    #[test]
    fn a_cap_is_the_capacity_but_a_disk_cap_never_invents_space() {
        let caps = CapacityCaps {
            vcpus: Some(3),
            mem_mib: Some(99),
            disk_mib: Some(u64::MAX),
            max_instances: Some(7),
        };
        let found =
            measure(Path::new("/"), DriverKind::Qemu, &caps, Timestamp::from_unix_ms(0)).capacity.unwrap();
        assert_eq!((found.vcpus, found.mem_mib, found.max_instances), (3, 99, 7));
        assert!(found.disk_mib < u64::MAX);
    }

    #[test]
    fn what_instances_have_written_is_counted_once_whatever_its_names() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(allocated_below(&dir.path().join("none")), 0);
        let folder = dir.path().join("i-1").join("root");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("disk"), vec![1; 1 << 20]).unwrap();
        let once = allocated_below(dir.path());
        assert!((1 << 20..2 << 20).contains(&once), "{once}");
        fs::hard_link(folder.join("disk"), dir.path().join("template")).unwrap();
        assert_eq!(allocated_below(dir.path()), once);
    }

    #[test]
    fn host_names_become_node_ids_where_they_can() {
        let id = |name| node_id_from_hostname(name).map(|id| id.to_string());
        assert_eq!(id("Web_01.example.org").as_deref(), Some("web-01"));
        assert_eq!((id(""), id("-"), id("naïve")), (None, None, None));
    }
}
