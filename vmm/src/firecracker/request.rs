//! Every request that the driver makes of Firecracker's API, as values: pure, so that what is sent can be read in a
//! test. Field names, enumerations and ranges are those of the 1.16 description.

use hyper::Method;
use serde::Serialize;

/// What Firecracker reads at most, unless it was started otherwise.
pub(super) const MAX_PAYLOAD_BYTES: usize = 51_200;

pub(super) const MAX_VCPUS: u32 = 32;

/// One call, ready to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    pub method: Method,
    pub path: String,
    pub body: Option<String>,
}

/// A value that Firecracker would refuse, or would take and fail with later.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadRequest {
    #[error("{0} vCPUs: Firecracker takes 1 to {MAX_VCPUS}")]
    Vcpus(u32),
    #[error("a request of {0} bytes: Firecracker reads {MAX_PAYLOAD_BYTES}")]
    TooLong(usize),
    #[error("a request that has no JSON form")]
    NotJson,
}

impl Request {
    fn get(path: &str) -> Self {
        Self { method: Method::GET, path: path.to_owned(), body: None }
    }

    fn with(method: Method, path: &str, body: &impl Serialize) -> Result<Self, BadRequest> {
        let body = serde_json::to_string(body).map_err(|_| BadRequest::NotJson)?;
        if body.len() > MAX_PAYLOAD_BYTES {
            return Err(BadRequest::TooLong(body.len()));
        }
        Ok(Self { method, path: path.to_owned(), body: Some(body) })
    }

    #[must_use]
    pub(super) fn describe() -> Self {
        Self::get("/")
    }

    /// Only where the balloon was given an interval.
    #[must_use]
    pub(super) fn balloon_statistics() -> Self {
        Self::get("/balloon/statistics")
    }
}

/// `PUT /machine-config`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct MachineConfig {
    pub vcpu_count: u32,
    pub mem_size_mib: u64,
    pub track_dirty_pages: bool,
}

impl MachineConfig {
    pub(super) fn request(&self) -> Result<Request, BadRequest> {
        if self.vcpu_count == 0 || self.vcpu_count > MAX_VCPUS {
            return Err(BadRequest::Vcpus(self.vcpu_count));
        }
        Request::with(Method::PUT, "/machine-config", self)
    }
}

/// `PUT /boot-source`. Firecracker itself appends `pci=off`, `root=` and its `virtio_mmio.device=`s.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct BootSource {
    pub kernel_image_path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initrd_path: Option<String>,
    pub boot_args: String,
}

impl BootSource {
    pub(super) fn request(&self) -> Result<Request, BadRequest> {
        Request::with(Method::PUT, "/boot-source", self)
    }
}

/// What a guest's flush does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum CacheType {
    /// Nothing: the guest is told that there is no cache, and never flushes.
    Unsafe,
    /// Waits until the host's disk has it.
    Writeback,
}

/// `PUT /drives/{id}`; the file is opened at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Drive {
    pub drive_id: String,
    pub path_on_host: String,
    pub is_root_device: bool,
    pub is_read_only: bool,
    /// Said always: the default is the first.
    pub cache_type: CacheType,
}

impl Drive {
    pub(super) fn request(&self) -> Result<Request, BadRequest> {
        Request::with(Method::PUT, &format!("/drives/{}", self.drive_id), self)
    }
}

/// The only network card that a guest has.
pub(super) const NIC: &str = "eth0";

/// `PUT /network-interfaces/eth0`; the TAP is opened at once, by name, by its owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct NetworkInterface {
    pub host_dev_name: String,
    pub guest_mac: String,
}

impl NetworkInterface {
    pub(super) fn request(&self) -> Result<Request, BadRequest> {
        let body = serde_json::json!({
            "iface_id": NIC,
            "host_dev_name": self.host_dev_name,
            "guest_mac": self.guest_mac,
        });
        Request::with(Method::PUT, &format!("/network-interfaces/{NIC}"), &body)
    }
}

/// `PUT /vsock`; the socket appears at once, before the guest runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Vsock {
    pub guest_cid: u32,
    pub uds_path: String,
}

impl Vsock {
    pub(super) fn request(&self) -> Result<Request, BadRequest> {
        Request::with(Method::PUT, "/vsock", self)
    }
}

/// `PUT /entropy`: a virtio-rng device without a limit.
pub(super) fn entropy() -> Result<Request, BadRequest> {
    Request::with(Method::PUT, "/entropy", &serde_json::json!({}))
}

/// `PUT /balloon`. It needs the guest's cooperation and is never a limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Balloon {
    pub amount_mib: u64,
    pub deflate_on_oom: bool,
    pub stats_polling_interval_s: u32,
}

impl Balloon {
    pub(super) fn request(&self) -> Result<Request, BadRequest> {
        Request::with(Method::PUT, "/balloon", self)
    }

    /// `PATCH /balloon`; refused until the guest's driver is up.
    pub(super) fn resize(amount_mib: u64) -> Result<Request, BadRequest> {
        Request::with(Method::PATCH, "/balloon", &serde_json::json!({ "amount_mib": amount_mib }))
    }
}

/// `PUT /metrics`, once per process: a snapshot does not carry it. From then on a line is written each minute, too.
pub(super) fn metrics(metrics_path: &str) -> Result<Request, BadRequest> {
    Request::with(Method::PUT, "/metrics", &serde_json::json!({ "metrics_path": metrics_path }))
}

/// `PUT /serial`: where the console goes when the process has no standard output of ours.
pub(super) fn serial(serial_out_path: &str) -> Result<Request, BadRequest> {
    Request::with(Method::PUT, "/serial", &serde_json::json!({ "serial_out_path": serial_out_path }))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum Action {
    /// Once in the life of a process.
    InstanceStart,
    /// Heard only by a guest with i8042 and its keyboard driver.
    SendCtrlAltDel,
}

impl Action {
    pub(super) fn request(self) -> Result<Request, BadRequest> {
        Request::with(Method::PUT, "/actions", &serde_json::json!({ "action_type": self }))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum TargetState {
    Paused,
    Resumed,
}

impl TargetState {
    pub(super) fn request(self) -> Result<Request, BadRequest> {
        Request::with(Method::PATCH, "/vm", &serde_json::json!({ "state": self }))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum SnapshotType {
    Full,
    /// Only what changed; its memory file is sparse and no snapshot by itself.
    Diff,
}

/// `PUT /snapshot/create`; the VM must be paused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct SnapshotCreate {
    pub snapshot_type: SnapshotType,
    pub snapshot_path: String,
    pub mem_file_path: String,
}

impl SnapshotCreate {
    pub(super) fn request(&self) -> Result<Request, BadRequest> {
        Request::with(Method::PUT, "/snapshot/create", self)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct NetworkOverride {
    pub iface_id: String,
    pub host_dev_name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct MemoryBackend {
    pub backend_type: &'static str,
    pub backend_path: String,
}

/// `PUT /snapshot/load`; only in a process that was told nothing else than its log and metrics.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct SnapshotLoad {
    pub snapshot_path: String,
    /// The file is mapped privately: it must stay as it is for as long as the VM lives.
    pub mem_backend: MemoryBackend,
    /// A snapshot does not carry it, so that it is said again. Only where it is wanted: a version that does not know the
    /// field refuses it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub track_dirty_pages: bool,
    pub resume_vm: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub network_overrides: Vec<NetworkOverride>,
}

impl SnapshotLoad {
    /// Loads and stays paused.
    #[must_use]
    pub(super) fn paused(snapshot_path: &str, mem_file: &str, track_dirty_pages: bool) -> Self {
        Self {
            snapshot_path: snapshot_path.to_owned(),
            mem_backend: MemoryBackend { backend_type: "File", backend_path: mem_file.to_owned() },
            track_dirty_pages,
            resume_vm: false,
            network_overrides: Vec::new(),
        }
    }

    pub(super) fn request(&self) -> Result<Request, BadRequest> {
        Request::with(Method::PUT, "/snapshot/load", self)
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
