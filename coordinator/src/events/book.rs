//! Which events are kept: the same thing that happens to the same object for the same reason is one, and there is a limit
//! for each object, for all, and for their age. Pure: time arrives from the caller, and the store is told by it.

use std::collections::BTreeMap;
use std::time::Duration;

use mvm_proto::object::{EventType, Metadata, Object, ObjectEvent};
use mvm_proto::status::fit::shorten;
use mvm_proto::{TenantId, Timestamp};

/// All events together: some 2 MiB of memory, and a bad day of a thousand nodes.
const MAX_EVENTS: usize = 4096;
/// Of one object. There are fewer reasons of ours; a node's own are bounded by this.
const MAX_OF_OBJECT: usize = 24;
/// How long an event is kept after it happened last: long enough to be found the next morning.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
/// What is longer is shortened.
const MAX_REASON_BYTES: usize = 64;
const MAX_MESSAGE_BYTES: usize = 512;

/// The object that something happened to: this one, and no other of its name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Subject {
    /// `Pool`
    kind: String,
    tenant: Option<TenantId>,
    name: String,
    uid: String,
    tenant_uid: String,
}

impl Subject {
    /// `tenant_uid` is that of the object's tenant; empty of an object of the cluster.
    pub(crate) fn new(object: &Object, tenant_uid: &str) -> Self {
        let Metadata { tenant, name, uid, .. } = &object.metadata;
        Self {
            kind: object.kind.clone(),
            tenant: tenant.clone(),
            name: name.clone(),
            uid: uid.clone(),
            tenant_uid: tenant_uid.to_owned(),
        }
    }

    fn of(event: &ObjectEvent) -> Self {
        let ObjectEvent { kind, tenant, name, uid, tenant_uid, .. } = event.clone();
        Self { kind, tenant, name, uid, tenant_uid }
    }
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Happening {
    pub(crate) r#type: EventType,
    /// One word; of what is none only its letters and digits are taken.
    pub(crate) reason: String,
    pub(crate) message: String,
}

/// What becomes of one event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    Put(ObjectEvent),
    Drop(ObjectEvent),
}

/// The events that are kept.
#[derive(Debug, Default)]
pub(crate) struct Book {
    events: BTreeMap<Subject, BTreeMap<String, ObjectEvent>>,
    count: usize,
}

impl Book {
    pub(crate) fn new(events: impl IntoIterator<Item = ObjectEvent>) -> Self {
        let mut book = Self::default();
        events.into_iter().for_each(|event| book.apply(Change::Put(event)));
        book
    }

    /// The events that follow from this, and those that make room for them.
    pub(crate) fn propose(&self, subject: &Subject, happenings: &[Happening], now: Timestamp) -> Vec<Change> {
        let known = self.events.get(subject);
        let mut puts: BTreeMap<String, ObjectEvent> = BTreeMap::new();
        for Happening { r#type, reason, message } in happenings {
            let reason = word(reason);
            let mut message = message.clone();
            shorten(&mut message, MAX_MESSAGE_BYTES);
            // Two conditions that change for one reason are one thing that happens.
            let before = known.and_then(|known| known.get(&reason)).filter(|event| !is_old(event, now));
            let event = ObjectEvent {
                kind: subject.kind.clone(),
                tenant: subject.tenant.clone(),
                name: subject.name.clone(),
                uid: subject.uid.clone(),
                tenant_uid: subject.tenant_uid.clone(),
                r#type: *r#type,
                reason: reason.clone(),
                message,
                count: before.map_or(1, |event| event.count.saturating_add(1)),
                first_at: before.map_or(now, |event| event.first_at),
                last_at: now,
            };
            if puts.len() < MAX_OF_OBJECT || puts.contains_key(&reason) {
                puts.insert(reason, event);
            }
        }
        let is_new = |reason: &&String| known.is_none_or(|known| !known.contains_key(*reason));
        let new = puts.keys().filter(is_new).count();
        let mut drops: Vec<ObjectEvent> = Vec::new();
        let others =
            || known.into_iter().flat_map(BTreeMap::values).filter(|event| !puts.contains_key(&event.reason));
        let surplus = (known.map_or(0, BTreeMap::len) + new).saturating_sub(MAX_OF_OBJECT);
        drops.extend(oldest(others(), surplus));
        let surplus = (self.count + new).saturating_sub(MAX_EVENTS + drops.len());
        if surplus > 0 {
            let elsewhere = self.events.iter().filter(|(of, _)| *of != subject);
            drops.extend(oldest(elsewhere.flat_map(|(_, events)| events.values()), surplus));
        }
        puts.into_values().map(Change::Put).chain(drops.into_iter().map(Change::Drop)).collect()
    }

    /// The store has this change.
    pub(crate) fn apply(&mut self, change: Change) {
        match change {
            Change::Put(event) => {
                let of_object = self.events.entry(Subject::of(&event)).or_default();
                self.count += usize::from(of_object.insert(event.reason.clone(), event).is_none());
            }
            Change::Drop(event) => {
                let subject = Subject::of(&event);
                let Some(of_object) = self.events.get_mut(&subject) else { return };
                self.count -= usize::from(of_object.remove(&event.reason).is_some());
                if of_object.is_empty() {
                    self.events.remove(&subject);
                }
            }
        }
    }

    /// What is to be forgotten.
    pub(crate) fn too_old(&self, now: Timestamp) -> Vec<Change> {
        let all = self.events.values().flat_map(BTreeMap::values);
        all.filter(|event| is_old(event, now)).cloned().map(Change::Drop).collect()
    }

    /// All that is not too old, the newest last.
    pub(crate) fn kept(&self, now: Timestamp) -> impl Iterator<Item = &ObjectEvent> {
        let all = self.events.values().flat_map(BTreeMap::values);
        let mut kept: Vec<_> = all.filter(|event| !is_old(event, now)).collect();
        kept.sort_by_key(|event| event.last_at);
        kept.into_iter()
    }
}

fn is_old(event: &ObjectEvent, now: Timestamp) -> bool {
    now.since(event.last_at) > KEPT_FOR
}

fn oldest<'a>(events: impl Iterator<Item = &'a ObjectEvent>, count: usize) -> Vec<ObjectEvent> {
    if count == 0 {
        return Vec::new();
    }
    let mut events: Vec<_> = events.collect();
    events.sort_by_key(|event| event.last_at);
    events.into_iter().take(count).cloned().collect()
}

/// A reason is a part of a key, and nodes say some of them.
fn word(reason: &str) -> String {
    let letters: String = reason.chars().filter(char::is_ascii_alphanumeric).take(MAX_REASON_BYTES).collect();
    if letters.is_empty() { "Unknown".to_owned() } else { letters }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn at(minutes: i64) -> Timestamp {
        Timestamp::from_unix_ms(minutes * 60_000)
    }

    fn pool(name: &str) -> Subject {
        of_uid(name, "uid-1")
    }

    fn of_uid(name: &str, uid: &str) -> Subject {
        let metadata = json!({ "name": name, "tenant": "acme", "uid": uid });
        let pool = json!({ "api_version": "mvm/v1", "kind": "Pool", "metadata": metadata, "spec": {}, "status": {} });
        Subject::new(&serde_json::from_value(pool).unwrap(), "tenant-1")
    }

    fn happens(reason: &str, message: &str) -> Happening {
        let (reason, message) = (reason.to_owned(), message.to_owned());
        Happening { r#type: EventType::Warning, reason, message }
    }

    fn note(book: &mut Book, of: &str, reason: &str, message: &str, now: Timestamp) {
        let changes = book.propose(&pool(of), &[happens(reason, message)], now);
        changes.into_iter().for_each(|change| book.apply(change));
    }

    fn told(book: &Book, now: Timestamp) -> Vec<(String, u64, String)> {
        let short = |event: &ObjectEvent| (event.reason.clone(), event.count, event.message.clone());
        book.kept(now).map(short).collect()
    }

    #[test]
    fn the_same_for_the_same_reason_is_one_event_with_its_first_and_last_time() {
        let mut book = Book::default();
        note(&mut book, "web", "Unplaced", "1 lacks", at(0));
        note(&mut book, "web", "Scheduled", "1 on n1", at(1));
        note(&mut book, "web", "Unplaced", "2 lack", at(2));
        note(&mut book, "db", "Unplaced", "3 lack", at(3));
        let one = |reason: &str, count, message: &str| (reason.to_owned(), count, message.to_owned());
        let expected =
            [one("Scheduled", 1, "1 on n1"), one("Unplaced", 2, "2 lack"), one("Unplaced", 1, "3 lack")];
        assert_eq!(told(&book, at(3)), expected);
        let first = book.kept(at(3)).nth(1).unwrap();
        assert_eq!(
            (first.first_at, first.last_at, first.object()),
            (at(0), at(2), "pool/acme/web".to_owned())
        );
    }

    #[test]
    fn what_happens_to_another_object_of_the_name_is_another_event() {
        let mut book = Book::default();
        for uid in ["uid-1", "uid-2"] {
            let changes = book.propose(&of_uid("web", uid), &[happens("Lost", "")], at(0));
            changes.into_iter().for_each(|change| book.apply(change));
        }
        let kept: Vec<_> = book.kept(at(0)).map(|event| (event.uid.as_str(), event.count)).collect();
        assert_eq!(kept, [("uid-1", 1), ("uid-2", 1)]);
    }

    #[test]
    fn what_is_proposed_and_not_stored_is_not_kept() {
        let book = Book::default();
        assert_eq!(book.propose(&pool("web"), &[happens("Lost", "")], at(0)).len(), 1);
        assert_eq!(told(&book, at(0)), []);
    }

    #[test]
    fn of_one_object_and_of_all_only_the_newest_are_kept() {
        let mut book = Book::default();
        for n in 0..100 {
            note(&mut book, "web", &format!("Reason{n}"), "", at(n));
        }
        assert_eq!(book.count, MAX_OF_OBJECT);
        assert_eq!(told(&book, at(100))[0].0, "Reason76");
        for n in 0..5000 {
            note(&mut book, &format!("p{n}"), "Lost", "", at(200 + n / 100));
        }
        assert_eq!((book.count, book.kept(at(251)).count()), (MAX_EVENTS, MAX_EVENTS));
        assert!(book.kept(at(251)).all(|event| event.name != "web" && event.name != "p0"));
    }

    #[test]
    fn what_happened_long_ago_is_forgotten_and_counts_from_one_when_it_happens_again() {
        let mut book = Book::default();
        note(&mut book, "web", "Lost", "", at(0));
        let (day, later) = (at(24 * 60), at(24 * 60 + 1));
        assert_eq!((book.too_old(day).len(), told(&book, day).len()), (0, 1));
        assert_eq!((book.too_old(later).len(), told(&book, later).len()), (1, 0));
        note(&mut book, "web", "Lost", "", later);
        assert_eq!(told(&book, later), [("Lost".to_owned(), 1, String::new())]);
        book.apply(book.too_old(at(9000)).remove(0));
        assert_eq!((book.count, book.events.len()), (0, 0));
    }

    #[test]
    fn what_a_node_says_can_be_no_key_of_its_own_and_is_bounded() {
        let mut book = Book::default();
        note(&mut book, "web", "../../meta/\u{1}epoch", &"é".repeat(1000), at(0));
        note(&mut book, "web", "", "", at(1));
        let kept: Vec<_> = book.kept(at(1)).collect();
        assert_eq!((kept[0].reason.as_str(), kept[1].reason.as_str()), ("metaepoch", "Unknown"));
        assert!(kept[0].message.len() <= MAX_MESSAGE_BYTES);
        let many: Vec<_> = (0..100).map(|n| happens(&format!("R{n}"), "")).collect();
        let changes = book.propose(&pool("other"), &many, at(2));
        assert_eq!(changes.len(), MAX_OF_OBJECT);
    }
}
