//! What a driver is told to boot, and what it says of a VM.

use mvm_host::cgroup::InstanceGroup;
use mvm_host::sandbox::{Demand, Filter};
use mvm_image::BootImage;
use mvm_proto::document::Resources;
use mvm_proto::{Digest, InstanceId};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};

/// What a VMM is told to boot. Everything in it is decided before the driver is called.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSpec {
    pub instance: InstanceId,
    /// What the guest is made of; a snapshot of another revision is never restored.
    pub revision: Digest,
    pub resources: Resources,
    pub image: BootImage,
    /// What the VM is kept within.
    #[serde(default)]
    pub bounds: Bounds,
    #[serde(default)]
    pub purpose: Purpose,
}

/// What a VM is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// To run as an instance.
    #[default]
    Instance,
    /// To be saved once and forked from. It never runs after that.
    Template,
}

/// What a VM is kept within, and its only ways out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// Absent: it has no network card.
    pub nic: Option<Nic>,
    /// The control group that its VMM is born in; absent: the agent's own.
    #[serde(default)]
    pub group: Option<InstanceGroup>,
    /// How its VMM is confined; absent: not at all, or by a jailer with settings of its own.
    #[serde(default)]
    pub jail: Option<VmmJail>,
    /// What it may do to the host's disk is limited: then its data disk goes past the host's page cache. A page there is
    /// charged to the cgroup that first read it, which need not be this VMM's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub direct_disk: bool,
}

/// The user that a VMM runs as, and its sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmmJail {
    /// A user, and a group of the same number, that no other process of this machine has.
    pub user: u32,
    pub filter: Filter,
    pub demand: Demand,
}

/// A network card, and the TAP behind it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    pub tap: String,
    pub mac: String,
}

/// A stream to the program inside a guest, fresh and not yet greeted. At most one per guest is served at a time.
pub type GuestStream = Box<dyn GuestBytes>;

/// What a [`GuestStream`] can do.
pub trait GuestBytes: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> GuestBytes for T {}

/// A VM ended, on request or by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmExit {
    pub instance: InstanceId,
    /// For people: the exit code or signal as far as known, and the end of the VMM's own log.
    pub detail: String,
}

/// A part of what a guest wrote to its console, of all that it ever wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ConsolePiece {
    /// Of the first byte: later than asked for where that is no longer kept.
    pub offset: u64,
    pub data: Vec<u8>,
    /// How much was written in all. Less than was read before: the console began anew.
    pub end: u64,
}

/// What a VM does now. There is none for an instance that has no VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VmState {
    Running,
    Paused,
}

/// A live VM, as the driver sees it on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vm {
    pub instance: InstanceId,
    pub revision: Digest,
    pub state: VmState,
}
