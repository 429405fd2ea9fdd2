//! The trait that QEMU, Firecracker and the fake implement. The agent calls it, and sees nothing else of a VMM.

use std::future::Future;
use std::time::Duration;

use mvm_proto::{InstanceId, Timestamp};
use tokio::sync::broadcast;

use crate::{
    Balloon, Capability, Compression, ConsolePiece, DriverError, DriverKind, Forks, GuestStream, Lacking,
    Migration, SnapshotOptions, SnapshotRef, Vm, VmExit, VmSpec,
};

/// What a VMM forked is seen as its instance's only when the VMM is gone: ending one looks again this often at most.
pub(crate) const GENERATIONS: usize = 3;

/// Runs microVMs on this host. Every call is idempotent: asking twice is asking once.
///
/// Calls for different instances may overlap; the caller never overlaps calls for one instance.
pub trait Driver: Send + Sync + 'static {
    fn kind(&self) -> DriverKind;

    /// Every live VM of this driver on this host, also one that an earlier agent started. The end of one that it knew is
    /// told by [`Self::exits`] before the VM is missing here.
    fn list(&self) -> impl Future<Output = Result<Vec<Vm>, DriverError>> + Send;

    /// Every instance that has anything on this host, a VM or files.
    fn instances(&self) -> impl Future<Output = Result<Vec<InstanceId>, DriverError>> + Send;

    /// Takes over the VM of `instance` if it lives: after a restart of the agent, its VMs are there but not its handles.
    fn adopt(&self, instance: &InstanceId) -> impl Future<Output = Result<Option<Vm>, DriverError>> + Send;

    /// Boots a VM, or finds the one that already runs from the same revision. A paused one stays paused.
    fn boot(&self, spec: &VmSpec) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Stops the vCPUs; memory stays. The guest must already be drained.
    fn pause(&self, instance: &InstanceId) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Lets the vCPUs run. A guest that gave memory back can have it again from then on.
    fn resume(&self, instance: &InstanceId) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Writes a paused guest's memory and device state, encrypted if that is asked for. The VM lives on, paused, until
    /// it is killed.
    fn snapshot(
        &self,
        instance: &InstanceId,
        options: &SnapshotOptions,
    ) -> impl Future<Output = Result<SnapshotRef, DriverError>> + Send;

    /// Has a snapshot that is being written end early, if it can: [`Self::snapshot`] then fails, and leaves nothing. The
    /// only call that may overlap another for the same instance. Where nothing is being written nothing is done.
    fn stop_snapshot(&self, instance: &InstanceId) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// A paused VM made from a snapshot, which says itself how it is encoded; the snapshot stays until it is discarded.
    /// Without its key it fails with [`DriverError::Key`].
    fn restore(
        &self,
        spec: &VmSpec,
        snapshot: &SnapshotRef,
        options: &SnapshotOptions,
    ) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Deletes the instance's snapshot, if there is one.
    fn discard_snapshot(&self, instance: &InstanceId)
    -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Asks the guest to shut down and waits up to `grace`, then kills. A paused guest is killed at once.
    fn stop(
        &self,
        instance: &InstanceId,
        grace: Duration,
    ) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Ends the VM now.
    fn kill(&self, instance: &InstanceId) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Removes everything the driver keeps for an instance: VM, snapshot, console, disk.
    fn remove(&self, instance: &InstanceId) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// A stream to the guest's own program. Fails with [`DriverError::NoVm`] when there is no VM; a guest that is not
    /// up yet, or paused, is no error: what is sent waits.
    fn guest(&self, instance: &InstanceId) -> impl Future<Output = Result<GuestStream, DriverError>> + Send;

    /// Tells every VM's end, as it happens. One that is missed shows in [`Driver::list`].
    fn exits(&self) -> broadcast::Receiver<VmExit>;

    /// Processor time that the VMM of `instance` has taken since it was started; absent: it has none, or it is not known.
    fn cpu_time(&self, instance: &InstanceId) -> Option<Duration>;

    /// The end of what the guest wrote to its console, at most `max_bytes`.
    fn console(
        &self,
        instance: &InstanceId,
        max_bytes: usize,
    ) -> impl Future<Output = Result<Vec<u8>, DriverError>> + Send;

    /// What is kept of all that the guest ever wrote to its console, from this byte on; at most `max_bytes`, and less than
    /// there is where that lies in several places. Nothing comes back for a moment in which it can't be told.
    fn console_from(
        &self,
        instance: &InstanceId,
        from: u64,
        max_bytes: usize,
    ) -> impl Future<Output = Result<ConsolePiece, DriverError>> + Send;

    /// From which byte on the console was written since this time: never too late a one, and the first where none is known.
    fn console_since(
        &self,
        instance: &InstanceId,
        since: Timestamp,
    ) -> impl Future<Output = Result<u64, DriverError>> + Send;

    fn forks(&self) -> Result<&dyn Forks, Lacking>;

    fn balloon(&self) -> Result<&dyn Balloon, Lacking>;

    fn compression(&self) -> Result<&dyn Compression, Lacking>;

    /// Whether [`Self::snapshot`] can encrypt. Then none of a guest's memory is ever on a disk in clear.
    fn encryption(&self) -> Result<(), Lacking>;

    fn migration(&self) -> Result<&dyn Migration, Lacking>;

    fn lacks(&self, capability: Capability) -> Option<Lacking> {
        match capability {
            Capability::Forks => self.forks().err(),
            Capability::Balloon => self.balloon().err(),
            Capability::Compression => self.compression().err(),
            Capability::Encryption => self.encryption().err(),
            Capability::Migration => self.migration().err(),
        }
    }
}
