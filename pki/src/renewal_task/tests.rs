//! The renewal task on paused time, against a real authority.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use rustls_pki_types::CertificateDer;

use super::*;
use crate::authority::{Authority, LeafProfile, RootAuthority};
use crate::identity::{Identity, Role};

const LIFE: Duration = Duration::from_secs(3600);

fn start_time() -> Timestamp {
    Timestamp::from_unix_ms(1_800_000_000_000)
}

/// An authority, a credential that it issued, and a task that keeps it; the clock follows tokio's.
struct World {
    root: RootAuthority,
    authority: Arc<Authority>,
    profile: LeafProfile,
    live: LiveCredential,
    anchors: LiveAnchors,
    started: Instant,
    asked: Arc<AtomicU32>,
    keys: Arc<Mutex<Vec<Vec<u8>>>>,
    down: Arc<AtomicBool>,
    disk_full: Arc<AtomicBool>,
    shutdown: CancellationToken,
}

struct Asker {
    authority: Arc<Authority>,
    profile: LeafProfile,
    started: Instant,
    asked: Arc<AtomicU32>,
    keys: Arc<Mutex<Vec<Vec<u8>>>>,
    down: Arc<AtomicBool>,
}

impl Renew for Asker {
    async fn renew(&self, _: &LeafKey, csr_der: Vec<u8>) -> Result<Renewed, BoxError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if self.down.load(Ordering::SeqCst) {
            return Err("the authority is away".into());
        }
        let now = start_time() + self.started.elapsed();
        let issued = self.authority.issue(&csr_der, &self.profile, now)?;
        self.keys.lock().unwrap().push(crate::certificate::facts(&issued.chain[0]).unwrap().public_key);
        Ok(Renewed { chain_pem: issued.chain_pem(), ..Renewed::default() })
    }
}

impl World {
    fn new() -> Self {
        let cluster = "c".parse().unwrap();
        let root = RootAuthority::create(&cluster, start_time()).unwrap();
        let authority = Arc::new(root.create_issuing(start_time()).unwrap());
        let identity = Identity::new(cluster, Role::Node, "n").unwrap();
        let profile = LeafProfile { identity, dns: vec![], ips: vec![], life: LIFE };
        let live = LiveCredential::new(issue(&authority, &profile, start_time()));
        let anchors = LiveAnchors::new(root.anchors());
        Self {
            root,
            authority,
            profile,
            live,
            anchors,
            started: Instant::now(),
            asked: Arc::default(),
            keys: Arc::default(),
            down: Arc::default(),
            disk_full: Arc::default(),
            shutdown: CancellationToken::new(),
        }
    }

    fn spawn(&self) -> tokio::task::JoinHandle<()> {
        let asker = Asker {
            authority: self.authority.clone(),
            profile: self.profile.clone(),
            started: self.started,
            asked: self.asked.clone(),
            keys: self.keys.clone(),
            down: self.down.clone(),
        };
        let (started, disk_full) = (self.started, self.disk_full.clone());
        let save = move |_: &Credential, _: &Anchors| match disk_full.load(Ordering::SeqCst) {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => Ok(()),
        };
        let renewal = Renewal {
            live: self.live.clone(),
            anchors: self.anchors.clone(),
            save,
            renew: asker,
            names: CsrNames::default(),
            shutdown: self.shutdown.clone(),
            clock: move || start_time() + started.elapsed(),
            chance: || 0.5,
        };
        tokio::spawn(renewal.run())
    }

    fn now(&self) -> Timestamp {
        start_time() + self.started.elapsed()
    }

    fn asked(&self) -> u32 {
        self.asked.load(Ordering::SeqCst)
    }

    fn due(&self) -> Timestamp {
        let current = self.live.current();
        let jitter = rotation::jitter_of(&current.fingerprint());
        rotation::renew_at(current.not_before(), current.not_after(), jitter)
    }
}

fn issue(authority: &Authority, profile: &LeafProfile, now: Timestamp) -> Credential {
    let key = LeafKey::generate().unwrap();
    let csr = key.csr_der(&CsrNames::default()).unwrap();
    Credential::new(key, authority.issue(&csr, profile, now).unwrap().chain).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_renewed_at_its_time_and_again_with_a_new_key_each_time() {
    let world = World::new();
    let task = world.spawn();
    let mut swaps = world.live.changed();
    for round in 1..=5 {
        let due = world.due();
        swaps.changed().await.unwrap();
        let late = world.now().since(due);
        assert!(world.now() >= due && late < Duration::from_secs(2), "late by {late:?}");
        assert_eq!(world.asked(), round);
    }
    let keys = world.keys.lock().unwrap().clone();
    let distinct: std::collections::BTreeSet<_> = keys.iter().collect();
    assert_eq!(distinct.len(), 5);
    world.shutdown.cancel();
    task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_authority_that_is_away_is_asked_with_growing_waits_until_it_is_back() {
    let world = World::new();
    world.down.store(true, Ordering::SeqCst);
    let before = world.live.current().serial_hex().to_owned();
    let _task = world.spawn();
    sleep(world.due().since(world.now()) + Duration::from_secs(60)).await;
    assert!((3..=8).contains(&world.asked()), "{} attempts in a minute", world.asked());
    assert_eq!(world.live.current().serial_hex(), before);
    world.down.store(false, Ordering::SeqCst);
    world.live.changed().changed().await.unwrap();
    assert_ne!(world.live.current().serial_hex(), before);
}

#[tokio::test(start_paused = true)]
async fn an_expired_certificate_is_retried_at_a_steady_pace_and_never_in_a_loop() {
    let world = World::new();
    world.down.store(true, Ordering::SeqCst);
    let _task = world.spawn();
    sleep(LIFE + Duration::from_secs(1)).await;
    let before = world.asked();
    sleep(Duration::from_secs(600)).await;
    let attempts = world.asked() - before;
    assert!((10..=41).contains(&attempts), "{attempts} attempts in ten minutes");
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_can_not_be_saved_is_not_used() {
    let world = World::new();
    world.disk_full.store(true, Ordering::SeqCst);
    let before = world.live.current().serial_hex().to_owned();
    let _task = world.spawn();
    sleep(LIFE * 3 / 4).await;
    assert!(world.asked() > 1);
    assert_eq!(world.live.current().serial_hex(), before);
    world.disk_full.store(false, Ordering::SeqCst);
    world.live.changed().changed().await.unwrap();
    assert_ne!(world.live.current().serial_hex(), before);
}

#[tokio::test(start_paused = true)]
async fn a_swap_by_hand_moves_the_next_renewal() {
    let world = World::new();
    let _task = world.spawn();
    sleep(LIFE / 4).await;
    world.live.swap(issue(&world.authority, &world.profile, world.now()));
    let due = world.due();
    let mut swaps = world.live.changed();
    sleep((due - Duration::from_secs(1)).since(world.now())).await;
    assert_eq!(world.asked(), 0);
    swaps.changed().await.unwrap();
    assert!(world.now() >= due);
}

#[tokio::test(start_paused = true)]
async fn a_certificate_for_someone_else_is_not_used() {
    let mut world = World::new();
    world.profile.identity = Identity::new("c".parse().unwrap(), Role::Node, "other").unwrap();
    let _task = world.spawn();
    sleep(LIFE * 3 / 4).await;
    assert!(world.asked() > 1);
    assert_eq!(world.live.current().identity().name(), "n");
}

#[tokio::test(start_paused = true)]
async fn a_certificate_from_a_foreign_authority_is_not_used() {
    let mut world = World::new();
    let foreign = RootAuthority::create(&"c".parse().unwrap(), start_time()).unwrap();
    world.authority = Arc::new(foreign.create_issuing(start_time()).unwrap());
    let before = world.live.current().serial_hex().to_owned();
    let _task = world.spawn();
    sleep(LIFE * 3 / 4).await;
    assert!(world.asked() > 1);
    assert_eq!(world.live.current().serial_hex(), before);
}

#[tokio::test(start_paused = true)]
async fn certificates_that_always_look_due_are_not_renewed_in_a_loop() {
    let mut world = World::new();
    // This process's clock is 50 minutes ahead of the authority's.
    world.started = Instant::now() - Duration::from_secs(50 * 60);
    let asker_started = Instant::now();
    let authority = world.authority.clone();
    world.live.swap(issue(&authority, &world.profile, start_time()));
    let started = world.started;
    let asked = world.asked.clone();
    let renewal = Renewal {
        live: world.live.clone(),
        anchors: world.anchors.clone(),
        save: |_: &Credential, _: &Anchors| Ok(()),
        renew: Asker {
            authority,
            profile: world.profile.clone(),
            started: asker_started,
            asked: world.asked.clone(),
            keys: world.keys.clone(),
            down: world.down.clone(),
        },
        names: CsrNames::default(),
        shutdown: world.shutdown.clone(),
        clock: move || start_time() + started.elapsed(),
        chance: || 0.0,
    };
    let _task = tokio::spawn(renewal.run());
    sleep(LIFE).await;
    let asked = asked.load(Ordering::SeqCst);
    assert!((5..=11).contains(&asked), "{asked} renewals in an hour");
}

#[tokio::test(start_paused = true)]
async fn an_authority_that_never_answers_does_not_hold_the_task_and_shutdown_ends_it_at_once() {
    struct Silent(Arc<AtomicU32>);
    impl Renew for Silent {
        async fn renew(&self, _: &LeafKey, _: Vec<u8>) -> Result<Renewed, BoxError> {
            self.0.fetch_add(1, Ordering::SeqCst);
            std::future::pending().await
        }
    }
    let world = World::new();
    let started = world.started;
    let renewal = Renewal {
        live: world.live.clone(),
        anchors: world.anchors.clone(),
        save: |_: &Credential, _: &Anchors| Ok(()),
        renew: Silent(world.asked.clone()),
        names: CsrNames::default(),
        shutdown: world.shutdown.clone(),
        clock: move || start_time() + started.elapsed(),
        chance: || 0.5,
    };
    let task = tokio::spawn(renewal.run());
    sleep(LIFE * 3 / 4).await;
    assert!(world.asked() > 1);
    let before = Instant::now();
    world.shutdown.cancel();
    task.await.unwrap();
    assert_eq!(before.elapsed(), Duration::ZERO);
}

/// Answers with certificates of `authority` and a list of roots of its choice.
struct Rollover {
    authority: Arc<Authority>,
    profile: LeafProfile,
    roots_pem: String,
    endorsements: Vec<CertificateDer<'static>>,
    asked: Arc<AtomicU32>,
}

impl Renew for Rollover {
    async fn renew(&self, _: &LeafKey, csr_der: Vec<u8>) -> Result<Renewed, BoxError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let issued = self.authority.issue(&csr_der, &self.profile, start_time())?;
        Ok(Renewed {
            chain_pem: issued.chain_pem(),
            roots_pem: Some(self.roots_pem.clone()),
            endorsements_pem: crate::pem::certificates(&self.endorsements),
        })
    }
}

impl World {
    /// A task whose authority answers with certificates of `root` and with `roots`.
    fn spawn_rollover(
        &self,
        root: &RootAuthority,
        roots: &Anchors,
        endorsements: Vec<CertificateDer<'static>>,
    ) -> tokio::task::JoinHandle<()> {
        let started = self.started;
        let renewal = Renewal {
            live: self.live.clone(),
            anchors: self.anchors.clone(),
            save: |_: &Credential, _: &Anchors| Ok(()),
            renew: Rollover {
                authority: Arc::new(root.create_issuing(start_time()).unwrap()),
                profile: self.profile.clone(),
                roots_pem: roots.to_pem(),
                endorsements,
                asked: self.asked.clone(),
            },
            names: CsrNames::default(),
            shutdown: self.shutdown.clone(),
            clock: move || start_time() + started.elapsed(),
            chance: || 0.5,
        };
        tokio::spawn(renewal.run())
    }
}

fn another_root() -> RootAuthority {
    RootAuthority::create(&"c".parse().unwrap(), start_time()).unwrap()
}

fn list(roots: &[&RootAuthority]) -> Anchors {
    Anchors::new(roots.iter().map(|root| root.certificate().clone()).collect()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn new_roots_that_a_trusted_root_endorses_are_trusted_after_a_renewal() {
    let world = World::new();
    let next = another_root();
    let endorsement = world.root.endorse(next.certificate(), start_time()).unwrap();
    let both = list(&[&world.root, &next]);
    let _task = world.spawn_rollover(&next, &both, vec![endorsement]);
    world.live.changed().changed().await.unwrap();
    assert_eq!(*world.anchors.current(), both);
}

#[tokio::test(start_paused = true)]
async fn a_root_is_retired_once_the_certificate_leads_to_another_one_that_is_trusted() {
    let world = World::new();
    let next = another_root();
    world.anchors.swap(list(&[&world.root, &next]));
    let _task = world.spawn_rollover(&next, &next.anchors(), Vec::new());
    world.live.changed().changed().await.unwrap();
    assert_eq!(*world.anchors.current(), next.anchors());
}

#[tokio::test(start_paused = true)]
async fn an_answer_from_an_authority_of_someone_else_changes_neither_certificate_nor_roots() {
    let thief = another_root();
    // What a thief of a coordinator's certificate could offer: an endorsement by itself, and one by a root's word
    // for something else.
    let bystander = another_root();
    for with_old in [false, true] {
        let world = World::new();
        let roots = if with_old { list(&[&world.root, &thief]) } else { thief.anchors() };
        let endorsements = vec![
            thief.endorse(thief.certificate(), start_time()).unwrap(),
            world.root.endorse(bystander.certificate(), start_time()).unwrap(),
            world.authority.certificate().clone(),
        ];
        let (before, anchors) = (world.live.current().fingerprint(), world.anchors.current());
        let _task = world.spawn_rollover(&thief, &roots, endorsements);
        sleep(LIFE * 3 / 4).await;
        assert!(world.asked() > 1);
        assert_eq!(world.live.current().fingerprint(), before);
        assert_eq!(*world.anchors.current(), *anchors);
    }
}

#[tokio::test(start_paused = true)]
async fn a_root_without_an_endorsement_is_left_out_of_an_otherwise_good_answer() {
    let world = World::new();
    let stranger = another_root();
    let _task = world.spawn_rollover(&world.root, &list(&[&stranger, &world.root]), Vec::new());
    world.live.changed().changed().await.unwrap();
    assert_eq!(*world.anchors.current(), world.root.anchors());
}
