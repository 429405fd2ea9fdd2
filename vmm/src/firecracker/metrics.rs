//! What Firecracker says about itself in its metrics file: one line of JSON per flush, the newest last.
//!
//! Counters count since the previous line, so that a sum needs several lines added up. Only what the
//! agent reports or reasons with is read; the rest of a line is long and changes between versions.

use serde::Deserialize;

/// One flush of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Metrics {
    pub utc_timestamp_ms: u64,
    pub vmm: VmmMetrics,
    pub vcpu: VcpuMetrics,
    pub vsock: VsockMetrics,
    pub block: BlockMetrics,
    pub seccomp: SeccompMetrics,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct VmmMetrics {
    pub panic_count: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct VcpuMetrics {
    /// Exits that KVM could not handle; the process ends with code 0 nonetheless.
    pub failures: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct VsockMetrics {
    pub conns_added: u64,
    pub rx_bytes_count: u64,
    pub tx_bytes_count: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct BlockMetrics {
    pub read_bytes: u64,
    pub write_bytes: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct SeccompMetrics {
    pub num_faults: u64,
}

impl Metrics {
    /// The newest whole line; a line that is still being written is no line yet.
    #[must_use]
    pub fn newest(text: &str) -> Option<Self> {
        text.lines().rev().find_map(|line| serde_json::from_str(line).ok())
    }

    /// What in here explains an end, if anything does.
    #[must_use]
    pub fn troubles(&self) -> Vec<String> {
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
            r#"{"utc_timestamp_ms":2,"vcpu":{"failures":1},"vsock":{"conns_added":3},"new_device":{}}"#,
            "\n",
            r#"{"utc_timestamp_ms":3,"vcp"#,
        );
        let metrics = Metrics::newest(text).unwrap();
        assert_eq!((metrics.utc_timestamp_ms, metrics.vsock.conns_added), (2, 3));
        assert_eq!(metrics.troubles(), ["vCPU failures: 1"]);
        assert_eq!(Metrics::newest("not json\n"), None);
    }
}
