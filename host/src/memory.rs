//! What VMMs cost in memory: the kernel's own sum, which counts a page that several map in shares.

use std::collections::BTreeSet;
use std::fs;

use mvm_proto::InstanceId;

use super::data_dir::DataDir;
use super::files::failed;
use super::{HostError, MemoryUse, process};

/// Looks for all VMMs once, and at the memory of those that are asked for. One that ends meanwhile costs nothing.
pub(super) fn measure(data: &DataDir, instances: &[InstanceId]) -> Result<Vec<MemoryUse>, HostError> {
    let asked: BTreeSet<&InstanceId> = instances.iter().collect();
    let vmms = process::scan(data).map_err(failed("look for processes in", &data.vms_path()))?;
    let mut found = Vec::new();
    for vmm in vmms.into_iter().filter(|vmm| asked.contains(&vmm.instance)) {
        let sums = fs::read_to_string(format!("/proc/{}/smaps_rollup", vmm.process.pid));
        if let Some(bytes) = sums.ok().as_deref().and_then(proportional_bytes) {
            found.push(MemoryUse { instance: vmm.instance, bytes });
        }
    }
    Ok(found)
}

/// The line `Pss:` of the text of `/proc/PID/smaps_rollup`.
fn proportional_bytes(sums: &str) -> Option<u64> {
    let line = sums.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_read_and_not_one_of_its_parts() {
        let sums = "\
55e0-7ffd ---p 00000000 00:00 0                          [rollup]
Rss:               71680 kB
Pss:               27648 kB
Pss_Dirty:         18432 kB
Pss_Anon:          18432 kB
";
        assert_eq!(proportional_bytes(sums), Some(27 << 20));
        assert_eq!(proportional_bytes("Rss: 1 kB\nPss_Anon: 1 kB\n"), None);
        assert_eq!(proportional_bytes("Pss: many kB\n"), None);
    }

    #[test]
    fn a_real_process_costs_something() {
        let sums = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
        assert!(proportional_bytes(&sums).unwrap() > 4096);
    }
}
