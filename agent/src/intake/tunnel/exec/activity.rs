//! The hold of a stream on its instance: taken when the stream opens, lapsed when nothing moves for as long as the pool lets
//! an instance idle, and taken again with the next byte.

use std::time::Duration;

use mvm_proto::Problem;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::guest::ExecHandle;
use crate::instance::records::Hold;
use crate::node::Place;
use crate::node::handle::NodeHandle;
use crate::node::hold::Held;

pub(super) struct Activity {
    node: NodeHandle,
    place: Place,
    may_wake: bool,
    /// It keeps its instance up for as long as bytes move.
    counts: bool,
    window: Duration,
    /// The instance had to be woken for it.
    pub(super) has_woken: bool,
    state: Mutex<State>,
    renewed: Notify,
}

struct State {
    hold: Option<Hold>,
    moved_at: Instant,
}

impl Activity {
    /// Brings the instance up and holds it.
    pub(super) async fn begin(
        node: &NodeHandle,
        place: &Place,
        may_wake: bool,
        counts: bool,
    ) -> Result<Self, Problem> {
        let Held { hold, woken } =
            node.hold(place, may_wake).await.map_err(|error| Problem::from(&*error))?;
        Ok(Self {
            node: node.clone(),
            place: place.clone(),
            may_wake,
            counts,
            window: node.hold_window(place),
            has_woken: woken,
            state: Mutex::new(State { hold: Some(hold), moved_at: Instant::now() }),
            renewed: Notify::new(),
        })
    }

    /// Output came: the instance runs.
    pub(super) fn moved(&self, handle: &ExecHandle) {
        let mut state = self.state.lock();
        state.moved_at = Instant::now();
        if state.hold.is_none() && self.counts {
            // Where it was put to rest this very moment, the guest link tells.
            state.hold = self.node.records().hold(&self.place.instance).map(|(hold, _)| hold);
            handle.count_as_work(true);
            self.renewed.notify_one();
        }
    }

    /// The caller says something: an instance that rests by now is woken, if that is allowed.
    pub(super) async fn wanted(&self, handle: &ExecHandle) -> Result<(), Problem> {
        {
            let mut state = self.state.lock();
            state.moved_at = Instant::now();
            if state.hold.is_some() || !self.counts {
                return Ok(());
            }
        }
        let held =
            self.node.hold(&self.place, self.may_wake).await.map_err(|error| Problem::from(&*error))?;
        self.state.lock().hold = Some(held.hold);
        handle.count_as_work(true);
        self.renewed.notify_one();
        Ok(())
    }

    /// Lets the hold lapse whenever nothing moved for long enough. Runs for ever.
    pub(super) async fn lapse(&self, handle: &ExecHandle) {
        if !self.counts {
            self.let_go(handle);
            return std::future::pending().await;
        }
        loop {
            let until = self.state.lock().moved_at + self.window;
            sleep_until(until).await;
            if self.state.lock().moved_at + self.window <= Instant::now() {
                self.let_go(handle);
                self.renewed.notified().await;
            }
        }
    }

    fn let_go(&self, handle: &ExecHandle) {
        self.state.lock().hold = None;
        handle.count_as_work(false);
    }
}
