//! Makes a tenant's network for a trial: what this kernel lacks shows at an agent's start, and not in the pass that needs
//! it.
//!
//! A thread moves into a network namespace of its own and makes there what [`super::Fabric`] makes for a tenant with one
//! instance. The namespace goes with the thread, and all that is in it.

use std::thread;

use mvm_proto::InstanceId;
use mvm_proto::document::EgressMode;
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};

use super::{firewall_error, link_error};
use crate::HostError;
use crate::firewall::Firewall;
use crate::links::Links;
use crate::network::{DEFAULT_MTU, Port, TenantNet};

const TENANT: &str = "trial";
const SUBNET: &str = "10.128.1.0/24";

/// Fails where this kernel can't make a tenant's bridge, port and rules. A process without the right to a network
/// namespace learns nothing, which is no failure.
pub fn try_network() -> Result<(), HostError> {
    let thread = thread::Builder::new().name("try-network".to_owned()).spawn(in_own_namespace);
    let tried = thread.map_err(|cause| failed("start a thread", &cause))?.join();
    tried.unwrap_or_else(|_| Err(HostError::Network { reason: "the trial panicked".to_owned() }))
}

fn in_own_namespace() -> Result<(), HostError> {
    match unshare(CloneFlags::CLONE_NEWNET) {
        Ok(()) => {}
        Err(Errno::EPERM) => return Ok(()),
        Err(cause) => return Err(failed("make a network namespace to try it in", &cause)),
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|cause| failed("start a runtime", &cause))?.block_on(try_here())
}

async fn try_here() -> Result<(), HostError> {
    let net = TenantNet {
        tenant: TENANT.parse().map_err(|cause| failed("name the trial's tenant", &cause))?,
        net_id: 1,
        subnet: SUBNET.parse().map_err(|cause| failed("choose the trial's subnet", &cause))?,
        egress: EgressMode::Nat,
        dns: true,
        isolate_ports: true,
        mtu: DEFAULT_MTU,
    };
    let offset = *net.subnet.instance_offsets().start();
    let port = Port {
        tenant: net.tenant.clone(),
        instance: InstanceId::from_bits(1),
        net_id: net.net_id,
        offset,
        address: net.subnet.instance_address(offset).unwrap_or_else(|| net.subnet.gateway()),
        owner_uid: rustix::process::geteuid().as_raw(),
    };
    let links = Links::connect().map_err(link_error)?;
    links.ensure_bridge(&net).await.map_err(link_error)?;
    links.ensure_tap(&port, &net).await.map_err(link_error)?;
    let mut firewall = Firewall::open().map_err(firewall_error)?;
    firewall.rebuild(std::slice::from_ref(&net), std::slice::from_ref(&port)).map_err(firewall_error)
}

fn failed(attempt: &str, cause: &dyn std::fmt::Display) -> HostError {
    HostError::Network { reason: format!("could not {attempt}: {cause}") }
}
