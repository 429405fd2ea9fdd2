//! Tells when groups meet their limits.
//!
//! The kernel marks `memory.events` and `pids.events` as changed, which inotify passes on; so does making a group.
//! Throttling is not announced by anything and is found when all is read, which happens at least every so often.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use super::Cgroups;
use super::error::{CgroupError, failed};
use super::file;
use super::group::Group;
use super::usage::{LimitEvent, Usages, changes};

/// A guest that meets a limit over and over must not keep the agent busy: what it does in this time is told at once.
const LEAST_PAUSE: Duration = Duration::from_millis(100);

/// Watches all groups of ours, those made later included.
#[derive(Debug)]
pub struct CgroupEvents {
    cgroups: Arc<Cgroups>,
    inotify: AsyncFd<OwnedFd>,
    /// Whose directory or file each watch is on; the topmost group of ours belongs to no tenant.
    watches: HashMap<i32, Option<Group>>,
    known: Usages,
    /// Groups to look at; kept here so that nothing is lost when a wait is given up.
    due: BTreeSet<Group>,
    all_due: bool,
    looked: Option<Instant>,
}

impl CgroupEvents {
    /// From now on: what groups met before is not told. Must be made inside a tokio runtime.
    pub fn new(cgroups: Arc<Cgroups>) -> Result<Self, CgroupError> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(io::Error::from);
        let inotify = inotify
            .and_then(|inotify| file::awaitable(inotify, Interest::READABLE))
            .map_err(failed("watch control groups"))?;
        let (watches, known, due) = Default::default();
        let mut events = Self { cgroups, inotify, watches, known, due, all_due: false, looked: None };
        if let Some(root) = events.cgroups.root()
            && let Ok(watch) = add_watch(events.inotify.get_ref(), root, WatchFlags::CREATE)
        {
            events.watches.insert(watch, None);
        }
        // Watched first and read then: what happens in between is not told twice, and nothing after it is missed.
        for tenant in events.cgroups.below(None)?.groups {
            events.adopt(tenant);
        }
        events.known = events.cgroups.observe()?.groups;
        Ok(events)
    }

    /// The limits that were met since the last call, as soon as there are any; none after `at_most`, at which all is
    /// read anew. Giving up the wait loses nothing.
    pub async fn next(&mut self, at_most: Duration) -> Result<Vec<LimitEvent>, CgroupError> {
        let deadline = Instant::now() + at_most;
        loop {
            if self.due.is_empty() && !self.all_due {
                match tokio::time::timeout_at(deadline, self.inotify.readable()).await {
                    Ok(ready) => drop(ready.map_err(failed("wait for control groups"))?),
                    Err(_) => self.all_due = true,
                }
                if let Some(looked) = self.looked {
                    tokio::time::sleep_until((looked + LEAST_PAUSE).min(deadline)).await;
                }
                self.drain()?;
            }
            let all = self.all_due;
            let met = if all { self.look_at_all().await? } else { self.look_at_due() };
            self.looked = Some(Instant::now());
            let late = Instant::now() >= deadline;
            if !met.is_empty() || (all && late) {
                return Ok(met);
            }
            self.all_due |= late;
        }
    }

    fn look_at_due(&mut self) -> Vec<LimitEvent> {
        let usage = |group: Group| self.cgroups.usage(&group).map(|usage| (group, usage));
        let after: Usages = std::mem::take(&mut self.due).into_iter().filter_map(usage).collect();
        let met = changes(&self.known, &after);
        self.known.extend(after);
        met
    }

    async fn look_at_all(&mut self) -> Result<Vec<LimitEvent>, CgroupError> {
        let cgroups = Arc::clone(&self.cgroups);
        let observed = tokio::task::spawn_blocking(move || cgroups.observe()).await;
        let after = observed.map_err(|cause| failed("read control groups")(cause.into()))??.groups;
        let met = changes(&self.known, &after);
        let before = std::mem::replace(&mut self.known, after);
        (self.all_due, self.due) = (false, BTreeSet::new());
        let new: Vec<Group> =
            self.known.keys().filter(|group| !before.contains_key(*group)).cloned().collect();
        new.iter().for_each(|group| self.watch(group));
        Ok(met)
    }

    /// Takes note of what inotify has to tell. All of it: tokio is told that nothing is left, so something that comes
    /// after the last reading wakes it anew.
    fn drain(&mut self) -> Result<(), CgroupError> {
        let mut made = Vec::new();
        let (watches, known, due) = (&mut self.watches, &mut self.known, &mut self.due);
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let drained = self.inotify.try_io(Interest::READABLE, |inotify| {
            let mut reader = Reader::new(inotify, &mut buffer);
            loop {
                let event = match reader.next() {
                    Ok(event) => event,
                    Err(rustix::io::Errno::INTR) => continue,
                    Err(cause) => return Err::<(), io::Error>(cause.into()),
                };
                let (kind, whose) = (event.events(), watches.get(&event.wd()));
                if kind.contains(ReadFlags::QUEUE_OVERFLOW) {
                    self.all_due = true;
                } else if kind.contains(ReadFlags::IGNORED) {
                    // Gone; one with its name is another group.
                    if let Some(Some(group)) = watches.remove(&event.wd()) {
                        known.remove(&group);
                    }
                } else if kind.contains(ReadFlags::CREATE) {
                    let name = event.file_name().and_then(|name| name.to_str().ok());
                    let child = name.zip(whose).and_then(|(name, whose)| Group::child(whose.as_ref(), name));
                    made.extend(child);
                } else {
                    due.extend(whose.cloned().flatten());
                }
            }
        });
        made.into_iter().for_each(|group| self.adopt(group));
        match drained {
            Err(cause) if cause.kind() != io::ErrorKind::WouldBlock => {
                Err(failed("read what happened to control groups")(cause))
            }
            _ => Ok(()),
        }
    }

    /// Watches a group, and those that were made below it before it was.
    fn adopt(&mut self, group: Group) {
        self.watch(&group);
        let below = self.cgroups.below(Some(&group)).unwrap_or_default().groups;
        self.due.insert(group);
        below.into_iter().for_each(|group| self.adopt(group));
    }

    /// A watch that can't be had (there are limits on them) costs promptness only.
    fn watch(&mut self, group: &Group) {
        let Some(directory) = self.cgroups.directory(group) else { return };
        let mut add = |path: &Path, flags: WatchFlags| {
            if let Ok(watch) = add_watch(self.inotify.get_ref(), path, flags) {
                self.watches.insert(watch, Some(group.clone()));
            }
        };
        if matches!(group, Group::Tenant(_) | Group::Pool(..)) {
            add(&directory, WatchFlags::CREATE);
        }
        if matches!(group, Group::Tenant(_) | Group::Instance(_)) {
            add(&directory.join("memory.events"), WatchFlags::MODIFY);
            add(&directory.join("pids.events"), WatchFlags::MODIFY);
        }
    }
}

fn add_watch(inotify: &OwnedFd, path: &Path, flags: WatchFlags) -> io::Result<i32> {
    Ok(inotify::add_watch(inotify, path, flags)?)
}
