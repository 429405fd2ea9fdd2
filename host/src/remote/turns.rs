//! Orders the helper's requests, and limits how many run at once.
//!
//! Requests that change an instance run one after the other, in the order of their arrival: an agent that stopped waiting for a
//! removal and creates the same directory again must find it created. Requests that only read do not wait for those, but for
//! each other, so that an agent that gives up and asks again does not occupy one thread after another. Requests of different
//! instances run in parallel.

use std::collections::{BTreeSet, HashMap};

use mvm_proto::InstanceId;
use tokio::sync::oneshot;

use super::message::Call;
use crate::{Access, Operation};

/// Ends of turns are forgotten at the latest when there are this many.
const PRUNED_AT: usize = 1024;

/// What requests of one instance wait for: those of the same lane. So none has more than one thread for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Lane {
    Change,
    Look,
    /// Looks at all that is in a directory, which may take long.
    Measure,
}

/// The last request in each lane of each instance.
#[derive(Debug, Default)]
pub(super) struct Turns {
    last: HashMap<(Lane, InstanceId), oneshot::Receiver<()>>,
    /// How many there may be before those that are over are looked for.
    prune_at: usize,
}

/// The turn of one request: begins when those before it are over, and is over when this is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    before: Vec<oneshot::Receiver<()>>,
    _over: Vec<oneshot::Sender<()>>,
}

impl Turns {
    /// Must be called in the order in which requests come.
    pub(super) fn take(&mut self, call: &Call) -> Turn {
        let mut turn = Turn { before: Vec::new(), _over: Vec::new() };
        // Each once: a request would wait for itself.
        let (lane, instances) = lane(call);
        for instance in instances.into_iter().collect::<BTreeSet<_>>() {
            let (over, after) = oneshot::channel();
            turn.before.extend(self.last.insert((lane, instance.clone()), after));
            turn._over.push(over);
        }
        if self.last.len() > self.prune_at.max(PRUNED_AT) {
            self.last.retain(|_, last| matches!(last.try_recv(), Err(oneshot::error::TryRecvError::Empty)));
            self.prune_at = self.last.len() * 2;
        }
        turn
    }
}

impl Turn {
    pub(super) async fn begin(&mut self) {
        while let Some(before) = self.before.last_mut() {
            // Nothing is ever sent: the other end is dropped.
            let _ = before.await;
            self.before.pop();
        }
    }
}

/// The lane of a request, and of which instances.
fn lane(call: &Call) -> (Lane, Vec<&InstanceId>) {
    match call {
        Call::Perform(operation) => match &**operation {
            Operation::MeasureDisk { instance } => (Lane::Measure, vec![instance]),
            operation => (Lane::Change, changed(operation)),
        },
        Call::Open { instance, name: _, access: Access::Create } => (Lane::Change, vec![instance]),
        Call::Open { instance, .. }
        | Call::Connect { instance, .. }
        | Call::Names { instance }
        | Call::JailRoot { instance } => (Lane::Look, vec![instance]),
        Call::Vmms | Call::RunDirs | Call::WaitEnd(_) | Call::Forget { .. } => (Lane::Look, Vec::new()),
    }
}

/// The instances that an operation changes something of.
fn changed(operation: &Operation) -> Vec<&InstanceId> {
    match operation {
        Operation::MakeRunDir { instance }
        | Operation::RemoveRunDir { instance }
        | Operation::RemoveFile { instance, .. }
        | Operation::WriteFile { instance, .. }
        | Operation::MakeDir { instance, .. }
        | Operation::Rename { instance, .. }
        | Operation::TrimLog { instance, .. }
        | Operation::PunchLog { instance, .. }
        | Operation::MakeReadOnly { instance, .. }
        | Operation::LinkFile { instance, .. }
        | Operation::MakeDisk { instance, .. }
        | Operation::DigHoles { instance, .. }
        | Operation::AdmitVmm { instance, .. } => vec![instance],
        Operation::MakeJail { jail, .. }
        | Operation::ShareWithJail { jail, .. }
        | Operation::UnshareFromJail { jail, .. }
        | Operation::RemoveJail { jail } => vec![&jail.instance],
        Operation::ShareMemory { instance, template, .. } => vec![instance, template],
        Operation::SpawnVmm(spawn) => vec![&spawn.instance],
        Operation::EnsureGroup { group, .. }
        | Operation::LimitIo { group, .. }
        | Operation::RemoveGroup { group } => vec![&group.instance],
        // A VMM is ended whatever else is done for it. Networks and tenants' groups have locks of their own.
        Operation::EndProcess { .. }
        | Operation::MeasureDisk { .. }
        | Operation::MeasureMemory { .. }
        | Operation::EnsureTenantGroup { .. }
        | Operation::RemoveTenantGroup { .. }
        | Operation::ConfirmGroup { .. }
        | Operation::LookAtGroups
        | Operation::TryNetwork
        | Operation::EnsureNet { .. }
        | Operation::RemoveNet { .. }
        | Operation::EnsurePort { .. }
        | Operation::OpenPort { .. }
        | Operation::RemovePort { .. }
        | Operation::RemoveLink { .. }
        | Operation::ProbeNet { .. }
        | Operation::KeepNetwork { .. } => Vec::new(),
    }
}

/// Whether a request may take long: it works through a tree or a whole file, waits for the disk, for a program or for the
/// kernel to end what is left in a group.
pub(super) fn is_slow(call: &Call) -> bool {
    let Call::Perform(operation) = call else { return false };
    match &**operation {
        Operation::RemoveRunDir { .. }
        | Operation::RemoveFile { .. }
        | Operation::MakeDir { .. }
        | Operation::Rename { .. }
        | Operation::MakeJail { .. }
        | Operation::ShareWithJail { .. }
        | Operation::UnshareFromJail { .. }
        | Operation::RemoveJail { .. }
        | Operation::MakeDisk { .. }
        | Operation::DigHoles { .. }
        | Operation::MeasureDisk { .. }
        | Operation::MeasureMemory { .. }
        | Operation::SpawnVmm(_)
        | Operation::EnsureGroup { .. }
        | Operation::RemoveGroup { .. }
        | Operation::ShareMemory { .. }
        | Operation::TrimLog { .. }
        | Operation::PunchLog { .. }
        | Operation::TryNetwork => true,
        Operation::MakeRunDir { .. }
        | Operation::WriteFile { .. }
        | Operation::LinkFile { .. }
        | Operation::MakeReadOnly { .. }
        | Operation::AdmitVmm { .. }
        | Operation::EndProcess { .. }
        | Operation::EnsureTenantGroup { .. }
        | Operation::RemoveTenantGroup { .. }
        | Operation::LimitIo { .. }
        | Operation::ConfirmGroup { .. }
        | Operation::LookAtGroups
        | Operation::EnsureNet { .. }
        | Operation::RemoveNet { .. }
        | Operation::EnsurePort { .. }
        | Operation::OpenPort { .. }
        | Operation::RemovePort { .. }
        | Operation::RemoveLink { .. }
        | Operation::ProbeNet { .. }
        | Operation::KeepNetwork { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn call(operation: Operation) -> Call {
        Call::Perform(Box::new(operation))
    }

    fn begun(turn: &mut Turn) -> bool {
        let mut begin = std::pin::pin!(turn.begin());
        begin.as_mut().poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(())
    }

    fn make(number: u32) -> Call {
        call(Operation::MakeRunDir { instance: InstanceId::from_bits(number) })
    }

    #[test]
    fn requests_of_one_instance_wait_for_each_other_in_the_order_in_which_they_came() {
        let mut turns = Turns::default();
        let [mut first, mut second, mut other] = [1, 1, 2].map(|number| turns.take(&make(number)));
        let (instance, template) = (InstanceId::from_bits(1), InstanceId::from_bits(2));
        let (memory, name) = ("snapshot/memory".to_owned(), "base".to_owned());
        let mut both = turns.take(&call(Operation::ShareMemory { instance, template, memory, name }));
        let looks = || Call::Names { instance: InstanceId::from_bits(1) };
        let measures = call(Operation::MeasureDisk { instance: InstanceId::from_bits(1) });
        let [mut looks, mut looks_again, mut measures] =
            [looks(), looks(), measures].map(|call| turns.take(&call));
        assert!(begun(&mut first) && begun(&mut other));
        assert!(begun(&mut looks) && begun(&mut measures) && !begun(&mut looks_again));
        drop(looks);
        assert!(begun(&mut looks_again));
        assert!(!begun(&mut second) && !begun(&mut both));
        drop(first);
        assert!(begun(&mut second) && !begun(&mut both));
        drop(other);
        assert!(!begun(&mut both));
        drop(second);
        assert!(begun(&mut both));
    }

    #[test]
    fn no_request_waits_for_itself() {
        let (memory, name) = ("snapshot/memory".to_owned(), "base".to_owned());
        let (instance, template) = (InstanceId::from_bits(1), InstanceId::from_bits(1));
        let twice = call(Operation::ShareMemory { instance, template, memory, name });
        assert!(begun(&mut Turns::default().take(&twice)));
    }

    #[test]
    fn what_is_over_is_forgotten() {
        let mut turns = Turns::default();
        let mut kept = turns.take(&make(0));
        for number in 1..10_000 {
            drop(turns.take(&make(number)));
        }
        assert!(turns.last.len() <= PRUNED_AT + 1, "{}", turns.last.len());
        assert!(begun(&mut kept));
        assert!(!begun(&mut turns.take(&make(0))), "the first is not over");
        drop(kept);
    }
}
