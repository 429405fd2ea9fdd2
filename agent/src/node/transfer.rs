//! Moves of sleeping instances that the coordinator orders, step by step: [`NodeHandle::transfer`] carries out one.
//!
//! The source marks the instance ([`Transfer`]), which is durable before a byte leaves; the target takes it in with a mark of its
//! own. What has a mark runs nowhere. The source removes it once the coordinator says that it arrived, and only then the
//! target clears the mark. So it can run on one node at most at every instant, and is whole on one at least. The bytes come by
//! streams of the tunnel, each of which shows a ticket that was given on the session and is good for one stream.

use std::collections::BTreeMap;
use std::time::Duration;

use mvm_planner::Action;
use mvm_proto::moves::{MoveStep, TICKET_BYTES};
use mvm_proto::text::chain;
use mvm_proto::{Digest, InstanceId, NodeId, Phase};
use mvm_vmm::{Driver, Lacking};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::execute::Order;
use crate::instance::archive::Header;
use crate::instance::record::Record;
use crate::instance::records::{Lease, StateError};
use crate::instance::transfer::{Side, Transfer};
use crate::node::actor::{Actor, Place};
use crate::node::error::{ActionError, MoveError};
use crate::node::handle::NodeHandle;
use crate::node::migration::Asked;

/// How long a ticket is good: the coordinator opens its stream at once.
const TICKET_FOR: Duration = Duration::from_secs(300);

/// Not to be guessed, and good for one stream.
pub type Ticket = [u8; TICKET_BYTES];

/// One step of a move, as it was ordered.
#[derive(Debug, Clone)]
pub struct Ordered {
    pub place: Place,
    pub step: MoveStep,
    pub move_id: String,
    /// The node at the other end.
    pub peer: NodeId,
    /// The count in which it has its place.
    pub counts: Phase,
    /// Of `depart` and `expect`.
    pub ticket: Option<Ticket>,
    /// Of `expect`: the snapshot that the instance sleeps in.
    pub snapshot: Option<Digest>,
    pub by: String,
}

/// What came of a step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Moved {
    /// Of `depart`: the snapshot that the instance sleeps in.
    pub snapshot: Option<Digest>,
    /// Of `expect`: it came already.
    pub is_here: bool,
}

/// The one instance that a stream of a move may bring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    pub place: Place,
    pub snapshot: Digest,
    pub transfer: Transfer,
}

impl Expected {
    /// Refuses every other archive than the one that was announced.
    pub(super) fn check(&self, header: &Header) -> Result<(), MoveError> {
        let Record { tenant, pool, id, snapshot, .. } = &header.record;
        let place = Place { tenant: tenant.clone(), pool: pool.clone(), instance: id.clone() };
        let digest = snapshot.as_ref().map(|snapshot| snapshot.digest);
        if place == self.place && digest == Some(self.snapshot) && header.node == self.transfer.peer {
            return Ok(());
        }
        let told = |place: &Place, digest: Option<Digest>, node: &NodeId| {
            format!("{place} with snapshot {} of {node}", digest.map_or("none".to_owned(), |d| d.to_string()))
        };
        Err(MoveError::NotExpected {
            expected: told(&self.place, Some(self.snapshot), &self.transfer.peer),
            found: told(&place, digest, &header.node),
        })
    }
}

/// What the stream of a ticket may do.
#[derive(Debug, Clone)]
pub(crate) enum Granted {
    Export(Asked),
    Import(Expected),
}

#[derive(Debug)]
struct Grant {
    ticket: Ticket,
    until: Instant,
    granted: Granted,
}

/// The tickets that were given and not shown yet: one for each instance, the newest.
#[derive(Debug, Default)]
pub(crate) struct Tickets(Mutex<BTreeMap<InstanceId, Grant>>);

impl Tickets {
    fn give(&self, instance: &InstanceId, ticket: Ticket, granted: Granted) {
        let (now, mut tickets) = (Instant::now(), self.0.lock());
        tickets.retain(|_, grant| grant.until > now);
        tickets.insert(instance.clone(), Grant { ticket, until: now + TICKET_FOR, granted });
    }

    fn withdraw(&self, instance: &InstanceId) {
        self.0.lock().remove(instance);
    }

    /// Uses a ticket up. Another than the one that was given leaves that good.
    fn take(&self, instance: &InstanceId, ticket: &[u8]) -> Option<Granted> {
        let mut tickets = self.0.lock();
        let is_it = |grant: &Grant| grant.until > Instant::now() && grant.ticket[..] == *ticket;
        tickets.get(instance).is_some_and(is_it).then(|| tickets.remove(instance))?.map(|grant| grant.granted)
    }
}

impl Actor {
    async fn transfer(&self, ordered: &Ordered) -> Result<Moved, MoveError> {
        match ordered.step {
            MoveStep::Depart => self.depart(ordered).await,
            MoveStep::Stay => self.stay(ordered).await,
            MoveStep::Expect => self.expect(ordered),
            MoveStep::Discard => self.discard(ordered).await,
            MoveStep::Release => self.release_moved(ordered).await,
            MoveStep::Activate => self.activate(ordered).await,
        }
    }

    async fn depart(&self, ordered: &Ordered) -> Result<Moved, MoveError> {
        let (id, mark) = (&ordered.place.instance, ordered.mark(Side::Source));
        let record = self.find(&ordered.place)?;
        if record.claimed {
            return Err(MoveError::Claimed(id.clone()));
        }
        // A later order of the coordinator's replaces an earlier one, whatever became of that.
        if record.transfer.as_ref().is_some_and(|transfer| transfer.side == Side::Target) {
            return Err(MoveError::NotMoving(id.clone()));
        }
        let marked = |record: &Record| record.transfer.as_deref() == Some(&mark);
        if matches!(record.phase, Phase::Running | Phase::Warm) {
            self.put_to_sleep(ordered, &mark).await?;
        }
        let record = self.find(&ordered.place)?;
        let asked = Asked {
            place: ordered.place.clone(),
            by: ordered.by.clone(),
            transfer: record.transfer.as_deref().cloned(),
        };
        let (lease, record) = self.sleeper(&asked, |record| record.intent.is_none()).await?;
        let snapshot = record.snapshot.as_ref().map(|snapshot| snapshot.digest);
        if !marked(&record) {
            let reason = format!("moves to {}, asked by {}", ordered.peer, ordered.by);
            let marked = self.executor.mark_transfer(&lease, Some(mark.clone()), &reason).await;
            marked.map_err(|cause| MoveError::NotRecorded(id.clone(), cause))?;
        }
        if let Some(ticket) = ordered.ticket {
            self.tickets.give(id, ticket, Granted::Export(Asked { transfer: Some(mark), ..asked }));
        }
        Ok(Moved { snapshot, is_here: false })
    }

    /// Marks an instance that is up, and puts it to sleep: it keeps its place in its count meanwhile, so nothing is started for
    /// it here.
    async fn put_to_sleep(&self, ordered: &Ordered, mark: &Transfer) -> Result<(), MoveError> {
        let id = &ordered.place.instance;
        if let Err(Lacking { reason, .. }) = self.executor.driver.migration() {
            return Err(MoveError::Immovable { instance: id.clone(), reason });
        }
        let lease = self.lease(id, Phase::Sleeping).await?;
        if self.find(&ordered.place)?.phase == Phase::Sleeping {
            return Ok(());
        }
        self.check_room(id, Phase::Sleeping)?;
        let reason = format!("moves to {}, asked by {}", ordered.peer, ordered.by);
        let not_recorded = |cause| MoveError::NotRecorded(id.clone(), cause);
        let marked = self.executor.mark_transfer(&lease, Some(mark.clone()), &reason).await;
        marked.map_err(not_recorded)?;
        let order = Order {
            action: Action::Sleep,
            staging: None,
            reason,
            spec: self.spec(&ordered.place.tenant, &ordered.place.pool),
            on_demand: false,
            asked_by: Some(ordered.by.clone()),
            for_move: true,
        };
        if let Err(cause) = self.executor.execute(&lease, &order).await {
            let reason = "its move was given up: it could not be put to sleep";
            self.executor.mark_transfer(&lease, None, reason).await.map_err(not_recorded)?;
            return Err(MoveError::Step { instance: id.clone(), cause });
        }
        Ok(())
    }

    async fn stay(&self, ordered: &Ordered) -> Result<Moved, MoveError> {
        let id = &ordered.place.instance;
        self.tickets.withdraw(id);
        let lease = self.lease(id, ordered.counts).await?;
        let record = self.find(&ordered.place)?;
        if record.transfer.as_deref() == Some(&ordered.mark(Side::Source)) && !record.is_leaving() {
            let reason = format!("stays: its move to {} was given up", ordered.peer);
            let cleared = self.executor.mark_transfer(&lease, None, &reason).await;
            cleared.map_err(|cause| MoveError::NotRecorded(id.clone(), cause))?;
            self.bring_up(&lease, ordered, reason).await;
        }
        Ok(Moved::default())
    }

    fn expect(&self, ordered: &Ordered) -> Result<Moved, MoveError> {
        let (place, transfer) = (ordered.place.clone(), ordered.mark(Side::Target));
        if let Some(record) = self.records().get(&place.instance) {
            return match record.transfer {
                // Reserved only, while an earlier stream still brings it.
                Some(found) if *found == transfer && record.phase == Phase::Created => {
                    Err(ActionError::Busy(record.id).into())
                }
                Some(found) if *found == transfer => Ok(Moved { snapshot: None, is_here: true }),
                _ => Err(MoveError::Taken(StateError::Exists(record.id))),
            };
        }
        let (Some(ticket), Some(snapshot)) = (ordered.ticket, ordered.snapshot) else {
            return Err(MoveError::NoTicket);
        };
        let instance = place.instance.clone();
        self.tickets.give(&instance, ticket, Granted::Import(Expected { place, snapshot, transfer }));
        Ok(Moved::default())
    }

    async fn discard(&self, ordered: &Ordered) -> Result<Moved, MoveError> {
        let id = &ordered.place.instance;
        self.tickets.withdraw(id);
        let lease = self.lease(id, Phase::Destroyed).await?;
        match self.records().get(id) {
            Some(record) if record.transfer.as_deref() == Some(&ordered.mark(Side::Target)) => {
                let removed = self.executor.remove_exported(&lease).await;
                removed.map_err(|cause| MoveError::Step { instance: id.clone(), cause })?;
            }
            // It did not come, or not by this move.
            _ => {}
        }
        Ok(Moved::default())
    }

    async fn release_moved(&self, ordered: &Ordered) -> Result<Moved, MoveError> {
        let id = &ordered.place.instance;
        self.tickets.withdraw(id);
        // Another of its name may come back here once it is released: that one has no mark, or another.
        if self.records().get(id).is_none() {
            return Ok(Moved::default());
        }
        let transfer = Some(ordered.mark(Side::Source));
        let asked = Asked { place: ordered.place.clone(), by: ordered.by.clone(), transfer };
        let fits = |record: &Record| record.intent.is_none() || record.is_leaving();
        let (lease, record) = self.sleeper(&asked, fits).await?;
        self.let_go(&asked, &lease, &record).await?;
        Ok(Moved::default())
    }

    async fn activate(&self, ordered: &Ordered) -> Result<Moved, MoveError> {
        let id = &ordered.place.instance;
        let lease = self.lease(id, ordered.counts).await?;
        let record = self.find(&ordered.place)?;
        match record.transfer.as_deref() {
            // It was, and this is asked again.
            None => {}
            Some(found) if *found == ordered.mark(Side::Target) => {
                let reason = format!("moved here from {}", ordered.peer);
                let cleared = self.executor.mark_transfer(&lease, None, &reason).await;
                cleared.map_err(|cause| MoveError::NotRecorded(id.clone(), cause))?;
                self.bring_up(&lease, ordered, reason).await;
            }
            Some(_) => return Err(MoveError::NotMoving(id.clone())),
        }
        Ok(Moved::default())
    }
}

impl Actor {
    /// Wakes an instance that has its place among those that run. What can't be done now its count asks for again.
    async fn bring_up(&self, lease: &Lease, ordered: &Ordered, reason: String) {
        let id = &ordered.place.instance;
        let sleeps = self.records().get(id).is_some_and(|record| record.phase == Phase::Sleeping);
        if ordered.counts != Phase::Running || !sleeps {
            return;
        }
        let order = Order {
            action: Action::Wake,
            staging: None,
            reason,
            spec: self.spec(&ordered.place.tenant, &ordered.place.pool),
            on_demand: false,
            asked_by: Some(ordered.by.clone()),
            for_move: true,
        };
        let woken = match self.check_room(id, Phase::Running) {
            Ok(()) => self.executor.execute(lease, &order).await.map(drop).map_err(|error| chain(&error)),
            Err(error) => Err(chain(&error)),
        };
        if let Err(error) = woken {
            self.executor.events.publish(
                "MoveFailed",
                ordered.place.to_string(),
                format!("not woken: {error}"),
            );
        }
    }
}

impl Ordered {
    fn mark(&self, side: Side) -> Transfer {
        Transfer { move_id: self.move_id.clone(), side, peer: self.peer.clone(), counts: self.counts }
    }
}

impl NodeHandle {
    /// Carries out one step of a move. Runs on when the session that ordered it ends.
    pub async fn transfer(&self, ordered: Ordered) -> Result<Moved, MoveError> {
        let (subject, step, peer) = (ordered.place.to_string(), ordered.step, ordered.peer.clone());
        let actor = self.shared.actor.clone();
        let done = tokio::spawn(async move { actor.transfer(&ordered).await }).await?;
        match (&done, step) {
            (Ok(_), MoveStep::Release) => {
                self.events().publish("InstanceReleased", &subject, format!("it is on {peer} now"));
            }
            (Ok(_), MoveStep::Activate) => {
                self.events().publish("InstanceMoved", &subject, format!("came from {peer}"));
            }
            (Err(error), _) => {
                self.events().publish("MoveFailed", &subject, format!("{step}: {}", chain(error)));
            }
            _ => {}
        }
        self.trigger();
        done
    }

    /// What the ticket of a stream is good for; it is used up.
    pub(crate) fn take_ticket(&self, instance: &InstanceId, ticket: &[u8]) -> Result<Granted, MoveError> {
        self.shared.actor.tickets.take(instance, ticket).ok_or(MoveError::NoTicket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_ticket_is_good_for_one_stream_for_a_while_and_until_the_next_is_given() {
        let (tickets, id) = (Tickets::default(), InstanceId::from_bits(1));
        let place =
            Place { tenant: "acme".parse().unwrap(), pool: "web".parse().unwrap(), instance: id.clone() };
        let granted = || Granted::Export(Asked { place: place.clone(), by: "a".into(), transfer: None });
        tickets.give(&id, [1; TICKET_BYTES], granted());
        assert!(tickets.take(&id, &[2; TICKET_BYTES]).is_none() && tickets.take(&id, &[]).is_none());
        assert!(tickets.take(&InstanceId::from_bits(2), &[1; TICKET_BYTES]).is_none());
        assert!(tickets.take(&id, &[1; TICKET_BYTES]).is_some());
        assert!(tickets.take(&id, &[1; TICKET_BYTES]).is_none(), "it was used");
        tickets.give(&id, [1; TICKET_BYTES], granted());
        tickets.give(&id, [2; TICKET_BYTES], granted());
        assert!(tickets.take(&id, &[1; TICKET_BYTES]).is_none(), "a newer one was given");
        tokio::time::advance(TICKET_FOR).await;
        assert!(tickets.take(&id, &[2; TICKET_BYTES]).is_none(), "it is too old");
    }
}
