//! Reads Firecracker's metrics file, one line of JSON per flush and the newest last, to explain how a VMM ended.
//!
//! Only the counters of failures are read; the rest of a line is long and changes between versions.

use serde::Deserialize;

/// One flush of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Metrics {
    pub vmm: VmmMetrics,
    pub vcpu: VcpuMetrics,
    pub seccomp: SeccompMetrics,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct VmmMetrics {
    pub panic_count: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct VcpuMetrics {
    /// Exits that KVM could not handle; the process ends with code 0 nonetheless.
    pub failures: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct SeccompMetrics {
    pub num_faults: u64,
}

impl Metrics {
    /// The newest whole line; a line that is still being written is no line yet.
    #[must_use]
    pub(super) fn newest(text: &str) -> Option<Self> {
        text.lines().rev().find_map(|line| serde_json::from_str(line).ok())
    }

    /// What in here explains an end, if anything does.
    #[must_use]
    pub(super) fn troubles(&self) -> Vec<String> {
        let counted = [
            (self.vmm.panic_count, "the VMM panicked"),
            (self.vcpu.failures, "vCPU failures"),
            (self.seccomp.num_faults, "system calls refused by seccomp"),
        ];
        counted
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{what}: {count}"))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_whole_line_is_read_whatever_else_is_in_it() {
        let text = concat!(
            r#"{"utc_timestamp_ms":1,"vcpu":{"failures":0,"exit_io_in":5}}"#,
            "\n",
            r#"{"utc_timestamp_ms":2,"vcpu":{"failures":1},"new_device":{}}"#,
            "\n",
            r#"{"utc_timestamp_ms":3,"vcp"#,
        );
        let metrics = Metrics::newest(text).unwrap();
        assert_eq!(metrics.troubles(), ["vCPU failures: 1"]);
        assert_eq!(Metrics::newest("not json\n"), None);
    }
}
