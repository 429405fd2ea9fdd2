//! Isolation of instances: creates each one's cgroup and network port before its VM starts, and removes them after it ended.
//!
//! A port passes no traffic before its guest has its identity: [`Isolation::prepare`] creates it closed, and
//! [`Isolation::open`] opens it once the guest has acknowledged its identity. [`network_check`] and [`cgroup_check`] compare
//! the machine with the records once per interval, repair what other programs changed, and remove orphans.

mod cgroup_check;
mod disk_limits;
pub(crate) mod machine;
mod network_check;
mod settings;
mod verify;
mod wanted;

use std::collections::BTreeMap;

use disk_limits::DiskLimits;
use mvm_host::cgroup::{InstanceGroup, InstanceLimits, TenantLimits, VmmCost, VmmKind};
use mvm_host::network::{DEFAULT_MTU, Port, TenantNet, vmm_user};
use mvm_host::sandbox::{Demand, Filter};
use mvm_host::{AnyHost, DiskUse, Host as _, HostError, MemoryUse, Operation, Outcome};
use mvm_proto::document::{EgressMode, IoLimits, Network, SeccompPolicy, Tenant};
use mvm_proto::{DesiredState, InstanceId, TenantId};
use mvm_vmm::{Bounds, DriverKind, Nic, VmmJail};
use parking_lot::{Mutex, MutexGuard};

use crate::instance::record::{Net, Record};
pub(crate) use cgroup_check::CgroupCheck;
pub use machine::{Machine, Unavailable};
pub use mvm_host::network::AddressRange;
pub(crate) use network_check::NetworkCheck;
pub use settings::{Effort, IsolationFlags, IsolationSettings, NetworkMode, UnknownMode};
pub use verify::{NetworkReport, TenantNetworkReport};
use wanted::{Wanted, wanted};

/// Makes and removes what instances are kept within.
#[derive(Debug)]
pub struct Isolation {
    host: AnyHost,
    settings: IsolationSettings,
    driver: DriverKind,
    /// The networks as the last look wanted them, by number.
    nets: Mutex<BTreeMap<u16, TenantNet>>,
    /// What tenants may take together, as the last document said.
    tenants: Mutex<BTreeMap<TenantId, TenantLimits>>,
    /// What pools let each instance do to the disk, as the last document said.
    disks: Mutex<DiskLimits>,
    /// Held while networks are compared with the records, so that none is added or removed meanwhile.
    comparing: tokio::sync::RwLock<()>,
}

impl Isolation {
    #[must_use]
    pub fn new(host: AnyHost, driver: DriverKind, settings: IsolationSettings) -> Self {
        let (nets, tenants, disks) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { host, settings, driver, nets, tenants, disks, comparing: tokio::sync::RwLock::default() }
    }

    /// What this node's network should be, by its document and records.
    fn wanted<'a>(
        &self,
        desired: Option<&DesiredState>,
        records: impl Iterator<Item = (&'a Record, bool)>,
    ) -> Wanted {
        let mut wanted = wanted(desired, self.settings.gateway_dns, records);
        wanted.network.denied.clone_from(&self.settings.deny);
        wanted
    }

    fn nets(&self) -> MutexGuard<'_, BTreeMap<u16, TenantNet>> {
        self.nets.lock()
    }

    /// The network that a new instance of this pool is in; absent when instances have none.
    #[must_use]
    pub fn net_of(&self, network: &Network) -> Option<Net> {
        let net = Net { id: network.tenant_net_id, subnet: network.ipv4_subnet };
        (self.settings.network == NetworkMode::Bridges).then_some(net)
    }

    /// The resolvers for guests in this network; empty where there are none.
    #[must_use]
    pub fn resolvers(&self, net: Option<Net>) -> Vec<String> {
        let asked = net.filter(|_| self.settings.gateway_dns);
        asked.map(|net| net.subnet.gateway().to_string()).into_iter().collect()
    }

    /// Whether guests with a network are told whom to ask for names; true where none has one.
    #[must_use]
    pub fn gives_resolvers(&self) -> bool {
        self.settings.gateway_dns || self.settings.network != NetworkMode::Bridges
    }

    /// The bounds of an instance whose VM is about to start. Asked again, they are the same.
    pub async fn prepare(&self, record: &Record) -> Result<Bounds, HostError> {
        let mut bounds = Bounds { jail: self.jail(record), ..Bounds::default() };
        if self.settings.cgroups != Effort::None {
            let (group, mut limits) = (group_of(record), self.limits(record));
            let tenant_limits = self.tenant_limits(&record.tenant);
            let tenant = record.tenant.clone();
            self.host.perform(&Operation::EnsureTenantGroup { tenant, limits: tenant_limits }).await?;
            loop {
                let ensure = Operation::EnsureGroup { group: group.clone(), limits: limits.clone() };
                let outcome = self.host.perform(&ensure).await?;
                bounds.direct_disk = matches!(outcome, Outcome::Grouped { disk_limited: true });
                // A document that came meanwhile found no group to change.
                let now = self.limits(record);
                if std::mem::replace(&mut limits, now) == limits {
                    break;
                }
            }
            bounds.group = Some(group);
        }
        let _not_compared = self.comparing.read().await;
        if let Some((net, port)) = self.place(record) {
            bounds.nic = Some(Nic { tap: port.tap(), mac: port.mac().to_string() });
            self.host.perform(&Operation::EnsureNet { net: net.clone() }).await?;
            self.host.perform(&Operation::EnsurePort { net, port }).await?;
        }
        Ok(bounds)
    }

    /// The bounds that an instance would have, without making any: what of them its machine is made of.
    #[must_use]
    pub fn planned(&self, record: &Record) -> Bounds {
        let nic = self.place(record).map(|(_, port)| Nic { tap: port.tap(), mac: port.mac().to_string() });
        Bounds { nic, ..Bounds::default() }
    }

    /// Lets packets pass, now that the guest has its own name and addresses.
    pub async fn open(&self, record: &Record) -> Result<(), HostError> {
        let Some((_, port)) = self.place(record) else { return Ok(()) };
        self.host.perform(&Operation::OpenPort { port }).await.map(|_| ())
    }

    /// Takes the bounds away, now that the VM is gone.
    pub async fn release(&self, record: &Record) -> Result<(), HostError> {
        let not_compared = self.comparing.read().await;
        if let Some((_, port)) = self.place(record) {
            self.host.perform(&Operation::RemovePort { port }).await?;
        }
        // What is in a group may take long to be gone, and is no part of the network.
        drop(not_compared);
        if self.settings.cgroups != Effort::None {
            self.host.perform(&Operation::RemoveGroup { group: group_of(record) }).await?;
        }
        Ok(())
    }

    /// What an instance has on disk, by looking; absent: nothing at all.
    pub async fn disk_use(&self, instance: &InstanceId) -> Result<Option<DiskUse>, HostError> {
        match self.host.perform(&Operation::MeasureDisk { instance: instance.clone() }).await? {
            Outcome::Disk(found) => Ok(found),
            other => Err(HostError::Refused(format!("{other:?} is not a measurement"))),
        }
    }

    /// What these instances' VMMs cost in memory, by looking; those without one are left out.
    pub async fn memory_use(&self, instances: Vec<InstanceId>) -> Result<Vec<MemoryUse>, HostError> {
        match self.host.perform(&Operation::MeasureMemory { instances }).await? {
            Outcome::Memory(found) => Ok(found),
            other => Err(HostError::Refused(format!("{other:?} is not a measurement"))),
        }
    }

    fn place(&self, record: &Record) -> Option<(TenantNet, Port)> {
        let net = record.net.filter(|_| self.settings.network == NetworkMode::Bridges)?;
        // One that the document does not name any more is connected to nothing but its own.
        let known = self.nets().get(&net.id).filter(|known| known.subnet == net.subnet).cloned();
        let tenant_net = known.unwrap_or_else(|| closed_net(record, net));
        Some((tenant_net, port_of(record, net)))
    }

    /// Its user follows from its place in its tenant's network, which no other instance has.
    fn jail(&self, record: &Record) -> Option<VmmJail> {
        let demand = match self.settings.jail {
            Effort::None => return None,
            Effort::BestEffort => Demand::BestEffort,
            Effort::Required => Demand::All,
        };
        let filter = match record.seccomp {
            SeccompPolicy::Baseline => Filter::Baseline,
            SeccompPolicy::Strict => Filter::Strict,
        };
        Some(VmmJail { user: vmm_user(record.net_id, record.offset), filter, demand })
    }

    fn tenants(&self) -> MutexGuard<'_, BTreeMap<TenantId, TenantLimits>> {
        self.tenants.lock()
    }

    /// What a tenant may take together. One that the document does not name any more is held by its instances' limits.
    fn tenant_limits(&self, tenant: &TenantId) -> TenantLimits {
        let unlimited = || TenantLimits::new(u32::MAX, u64::MAX, u32::MAX, self.vmm_cost(0));
        self.tenants().get(tenant).copied().unwrap_or_else(unlimited)
    }

    /// The sums of a tenant's quotas, and what the VMMs of as many instances take.
    fn limits_of(&self, tenant: &Tenant) -> TenantLimits {
        let quotas = &tenant.quotas;
        let largest = tenant.pools.iter().map(|pool| pool.instance_resources.mem_mib).max().unwrap_or(0);
        let in_memory = quotas.max_running.saturating_add(quotas.max_warm);
        TenantLimits::new(quotas.max_vcpus, quotas.max_mem_mib, in_memory, self.vmm_cost(largest))
    }

    fn limits(&self, record: &Record) -> InstanceLimits {
        let size = record.resources;
        let limits = InstanceLimits::new(size.vcpus, size.mem_mib, self.vmm_cost(size.mem_mib));
        InstanceLimits { io: self.io_limits(record), ..limits }
    }

    fn disks(&self) -> MutexGuard<'_, DiskLimits> {
        self.disks.lock()
    }

    /// What an instance may do to the disk: as its pool says, or last said.
    fn io_limits(&self, record: &Record) -> Option<IoLimits> {
        let named = self.disks().get(&record.tenant, &record.pool);
        named.unwrap_or_else(|| record.io_limits.as_deref().copied())
    }

    /// What a VMM takes beside a guest of this size. Of QEMU's two ways to run one, the dearer.
    fn vmm_cost(&self, mem_mib: u64) -> VmmCost {
        let kind = match self.driver {
            DriverKind::Firecracker => VmmKind::Firecracker,
            DriverKind::Qemu | DriverKind::Fake => VmmKind::QemuTcg,
        };
        kind.cost(mem_mib)
    }
}

fn group_of(record: &Record) -> InstanceGroup {
    InstanceGroup { tenant: record.tenant.clone(), pool: record.pool.clone(), instance: record.id.clone() }
}

fn port_of(record: &Record, net: Net) -> Port {
    Port {
        tenant: record.tenant.clone(),
        instance: record.id.clone(),
        net_id: net.id,
        offset: record.offset,
        address: record.address,
        owner_uid: vmm_user(net.id, record.offset),
    }
}

fn closed_net(record: &Record, net: Net) -> TenantNet {
    TenantNet {
        tenant: record.tenant.clone(),
        net_id: net.id,
        subnet: net.subnet,
        egress: EgressMode::None,
        dns: false,
        isolate_ports: false,
        mtu: DEFAULT_MTU,
    }
}

#[cfg(test)]
mod tests;
