//! Links to guests that behave, and to some that do not.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use mvm_image::BootImage;
use mvm_proto::document::Resources;
use mvm_proto::guest::{
    Deframer, FailureCode, Found, GuestFrame, GuestHello, HostFrame, OPENING, Output, Readiness, guest_frame,
    host_frame, put_frame,
};
use mvm_proto::{Digest, InstanceId};
use mvm_vmm::VmSpec;
use mvm_vmm::fake::{FakeDriver, Manner};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::*;

fn id(number: u32) -> InstanceId {
    InstanceId::from_bits(number)
}

fn clock() -> Clock {
    Clock::starting_at(mvm_proto::Timestamp::from_unix_ms(1_800_000_000_000))
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn identity(generation: u64) -> Reborn {
    Reborn { hostname: "web-1".to_owned(), generation, ..Reborn::default() }
}

async fn boot(driver: &FakeDriver, number: u32) -> InstanceId {
    let spec = VmSpec {
        instance: id(number),
        revision: Digest::of(b"links"),
        resources: Resources { vcpus: 1, mem_mib: 64, data_disk_mib: 0 },
        image: BootImage::imagined("builtin:busybox"),
        bounds: mvm_vmm::Bounds::default(),
        purpose: mvm_vmm::Purpose::default(),
    };
    driver.boot(&spec).await.unwrap();
    id(number)
}

/// A guest that is ready, on the fake driver.
async fn ready_guest() -> (Arc<FakeDriver>, GuestLinks, InstanceId) {
    let driver = Arc::new(FakeDriver::in_memory());
    let guest = boot(&driver, 1).await;
    let links = GuestLinks::new(Arc::clone(&driver), clock());
    links.open(&guest);
    links.reborn(&guest, identity(1), ANSWER_WITHIN).await.unwrap();
    links.ready(&guest, soon()).await.unwrap();
    (driver, links, guest)
}

async fn output_of(handle: &ExecHandle) -> (Vec<u8>, ExecEvent) {
    let mut said = Vec::new();
    loop {
        match handle.next().await.unwrap() {
            ExecEvent::Output { data, .. } => said.extend(data),
            ExecEvent::Accepted | ExecEvent::Taken(_) => {}
            exit => return (said, exit),
        }
    }
}

fn run(words: &[&str]) -> ExecRequest {
    ExecRequest { command: words.iter().map(|word| (*word).to_owned()).collect(), ..ExecRequest::default() }
}

#[tokio::test(start_paused = true)]
async fn a_guest_is_told_who_it_is_gets_ready_and_runs_programs() {
    let (_driver, links, guest) = ready_guest().await;
    let uname = links.exec(&guest, run(&["uname", "-a"])).await.unwrap();
    let (said, exit) = output_of(&uname).await;
    assert!(String::from_utf8(said).unwrap().starts_with("Linux web-1 "));
    assert_eq!(exit, ExecEvent::Exit { code: 0, signal: 0, timed_out: false, cancelled: false });
    let error = links.exec(&guest, run(&["nonsense"])).await.unwrap().next().await.unwrap_err();
    assert!(matches!(error, LinkError::Refused { code, .. } if code == FailureCode::NotFound.as_str()));
}

#[tokio::test(start_paused = true)]
async fn input_files_and_relays_pass_both_ways() {
    let (_driver, links, guest) = ready_guest().await;
    let cat = links.exec(&guest, ExecRequest { stdin: true, ..run(&["cat"]) }).await.unwrap();
    let sent: Vec<u8> = (0..100_000u32).map(|n| n.to_be_bytes()[3]).collect();
    // More than a window, so that it passes only if the guest is heard.
    let long = sent.repeat(4);
    cat.write(&long).await.unwrap();
    cat.close_input().await.unwrap();
    assert!(output_of(&cat).await.0 == long);
    drop(cat);

    links.write_file(&guest, "/etc/motd", &sent, 0).await.unwrap();
    assert!(links.read_file(&guest, "/etc/motd", 1 << 20).await.unwrap() == sent);
    assert_eq!(links.list_directory(&guest, "/etc").await.unwrap().len(), 1);
    let error = links.read_file(&guest, "/none", 1 << 20).await.unwrap_err();
    assert!(matches!(error, LinkError::Refused { .. }), "{error}");

    let mut relay = links.relay(&guest, 80).await.unwrap();
    relay.write_all(b"GET /").await.unwrap();
    let mut back = [0; 5];
    relay.read_exact(&mut back).await.unwrap();
    assert_eq!(&back, b"GET /");
    assert!(links.view(&guest).unwrap().is_busy(), "an open relay is work");
    drop(relay);
    let mut changed = links.changed();
    while links.view(&guest).unwrap().is_busy() {
        changed.changed().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_paused_guest_answers_when_it_runs_again_and_a_link_that_breaks_is_made_again() {
    let (driver, links, guest) = ready_guest().await;
    driver.pause(&guest).await.unwrap();
    links.pause(&guest);
    let asked = tokio::spawn({
        let (links, guest) = (links.clone(), guest.clone());
        async move { links.ping(&guest, Duration::from_secs(60)).await }
    });
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(!asked.is_finished());
    driver.resume(&guest).await.unwrap();
    links.open(&guest);
    asked.await.unwrap().unwrap();
    let greetings = links.view(&guest).unwrap().greetings;
    driver.crash(&guest);
    boot(&driver, 1).await;
    let again = links.ping(&guest, Duration::from_secs(60)).await;
    assert_eq!(again, Ok(()));
    assert!(links.view(&guest).unwrap().greetings > greetings);
}

#[tokio::test(start_paused = true)]
async fn guests_that_do_not_get_ready_are_told_apart() {
    let driver = Arc::new(FakeDriver::in_memory());
    let links = GuestLinks::new(Arc::clone(&driver), clock());
    for (number, manner) in
        [(1, Manner::Silent), (2, Manner::NeverReady), (3, Manner::Fails), (4, Manner::RefusesIdentity)]
    {
        let guest = boot(&driver, number).await;
        driver.faults.set_manner(Some(&guest), manner);
        links.open(&guest);
    }
    let silent = links.greeted(&id(1), Instant::now() + Duration::from_secs(5)).await.unwrap_err();
    assert!(matches!(silent, LinkError::Silent(_)), "{silent}");
    links.reborn(&id(2), identity(1), ANSWER_WITHIN).await.unwrap();
    let late = links.ready(&id(2), Instant::now() + Duration::from_secs(5)).await.unwrap_err();
    assert!(matches!(late, LinkError::NotReady { readiness: Readiness::Starting, .. }), "{late}");
    links.reborn(&id(3), identity(1), ANSWER_WITHIN).await.unwrap();
    let failed = links.ready(&id(3), soon()).await.unwrap_err();
    assert!(failed.to_string().contains("exited with 1"), "{failed}");
    let refused = links.reborn(&id(4), identity(1), ANSWER_WITHIN).await.unwrap_err();
    assert!(matches!(refused, LinkError::Refused { .. }), "{refused}");
    assert!(matches!(links.ready(&id(9), soon()).await, Err(LinkError::NoLink(_))));
}

#[tokio::test(start_paused = true)]
async fn a_drain_ends_with_the_guests_word_its_time_or_new_work() {
    let (driver, links, guest) = ready_guest().await;
    let second = Duration::from_secs(1);
    assert_eq!(links.prepare_sleep(&guest, second, false).await, Ok(Drained::Done));
    driver.faults.set_manner(None, Manner::IgnoresSleep);
    let late = links.prepare_sleep(&guest, second, false).await.unwrap();
    assert!(matches!(late, Drained::Not(_)), "{late:?}");
    let draining = tokio::spawn({
        let (links, guest) = (links.clone(), guest.clone());
        async move { links.prepare_sleep(&guest, Duration::from_secs(600), true).await }
    });
    tokio::time::sleep(second).await;
    driver.guest_says(&guest, Readiness::Busy);
    assert_eq!(draining.await.unwrap(), Ok(Drained::Busy));
}

#[tokio::test(start_paused = true)]
async fn a_guest_of_version_1_is_used_for_what_it_can() {
    let driver = Arc::new(FakeDriver::in_memory());
    driver.faults.set_manner(None, Manner::Old);
    let guest = boot(&driver, 1).await;
    let links = GuestLinks::new(Arc::clone(&driver), clock());
    links.open(&guest);
    assert_eq!(links.ready(&guest, soon()).await.unwrap().version, 1);
    let (said, _) = output_of(&links.exec(&guest, run(&["echo", "hi"])).await.unwrap()).await;
    assert_eq!(said, b"hi\n");
    for unsupported in [
        links.reborn(&guest, identity(1), ANSWER_WITHIN).await.unwrap_err(),
        links.prepare_sleep(&guest, ANSWER_WITHIN, false).await.unwrap_err(),
        links.read_file(&guest, "/x", 1).await.unwrap_err(),
        links.relay(&guest, 80).await.unwrap_err(),
        links.exec(&guest, ExecRequest { stdin: true, ..run(&["cat"]) }).await.unwrap_err(),
    ] {
        assert!(matches!(unsupported, LinkError::Unsupported { needs: 2, version: 1, .. }), "{unsupported}");
    }
    links.shutdown(&guest, Duration::ZERO).await.unwrap();
}

/// Gives out streams whose other ends the test holds, one after the other.
#[derive(Debug, Default)]
struct Scripted {
    streams: Mutex<Vec<DuplexStream>>,
    dials: AtomicU32,
}

impl Dial for Scripted {
    fn dial<'a>(&'a self, instance: &'a InstanceId) -> BoxFuture<'a, Result<GuestStream, DriverError>> {
        Box::pin(async move {
            self.dials.fetch_add(1, Ordering::Relaxed);
            match self.streams.lock().await.pop() {
                Some(stream) => Ok(Box::new(stream) as GuestStream),
                None => Err(DriverError::NoVm { instance: instance.clone(), action: "reach" }),
            }
        })
    }
}

/// Links to one scripted guest, and the guest's ends of its streams in the order in which they are dialled.
fn scripted(streams: usize) -> (GuestLinks, Vec<DuplexStream>) {
    let (ours, theirs): (Vec<_>, Vec<_>) = (0..streams).map(|_| tokio::io::duplex(1 << 20)).unzip();
    let dialer = Scripted { streams: Mutex::new(ours.into_iter().rev().collect()), ..Scripted::default() };
    let inner = Inner {
        dialer: Arc::new(dialer),
        clock: clock(),
        links: parking_lot::Mutex::default(),
        changed: Arc::new(watch::Sender::new(0)),
    };
    (GuestLinks { inner: Arc::new(inner) }, theirs)
}

async fn next_frame(stream: &mut DuplexStream, deframer: &mut Deframer) -> Found<HostFrame> {
    loop {
        if let Some(found) = deframer.next() {
            return found;
        }
        let mut buffer = [0; 4096];
        let count = stream.read(&mut buffer).await.unwrap();
        deframer.push(&buffer[..count]);
    }
}

async fn greet(stream: &mut DuplexStream, deframer: &mut Deframer) -> u64 {
    assert_eq!(next_frame(stream, deframer).await, Found::Opening);
    let Found::Message(hello) = next_frame(stream, deframer).await else { panic!("no hello") };
    let answer = GuestHello { version: 2, readiness: Readiness::Ready.into(), ..GuestHello::default() };
    let mut bytes = OPENING.to_vec();
    let body = Some(guest_frame::Body::Hello(answer));
    put_frame(&mut bytes, &GuestFrame { nonce: hello.nonce, request: 0, body }).unwrap();
    stream.write_all(&bytes).await.unwrap();
    hello.nonce
}

async fn say(stream: &mut DuplexStream, nonce: u64, request: u64, body: guest_frame::Body) {
    let mut bytes = Vec::new();
    put_frame(&mut bytes, &GuestFrame { nonce, request, body: Some(body) }).unwrap();
    stream.write_all(&bytes).await.unwrap();
}

fn output(text: &str, offset: u64) -> guest_frame::Body {
    guest_frame::Body::Output(Output { stderr: false, data: text.as_bytes().to_vec(), offset, lost: 0 })
}

#[tokio::test(start_paused = true)]
async fn an_exec_goes_on_where_it_was_when_the_link_breaks_and_stale_frames_are_dropped() {
    let (links, mut theirs) = scripted(2);
    let (mut second, mut first) = (theirs.pop().unwrap(), theirs.pop().unwrap());
    links.open(&id(1));
    let mut deframer = Deframer::default();
    let old = greet(&mut first, &mut deframer).await;
    let handle = links.exec(&id(1), run(&["make"])).await.unwrap();
    let Found::Message(asked) = next_frame(&mut first, &mut deframer).await else { panic!("no exec") };
    say(&mut first, old, asked.request, output("hello ", 0)).await;
    assert!(matches!(handle.next().await, Ok(ExecEvent::Output { .. })));
    drop(first);

    let mut deframer = Deframer::default();
    let nonce = greet(&mut second, &mut deframer).await;
    let Found::Message(again) = next_frame(&mut second, &mut deframer).await else { panic!("no exec") };
    assert_eq!(again.request, asked.request, "the same request");
    assert!(matches!(&again.body, Some(host_frame::Body::Exec(exec)) if exec.output_from == 6));
    say(&mut second, old, asked.request, output("stale!", 6)).await;
    say(&mut second, nonce, asked.request + 1, output("nobody's", 6)).await;
    say(&mut second, nonce, asked.request, output("lo world", 3)).await;
    let exit = mvm_proto::guest::Exit { code: 3, ..mvm_proto::guest::Exit::default() };
    say(&mut second, nonce, asked.request, guest_frame::Body::Exit(exit)).await;
    let (said, exit) = output_of(&handle).await;
    assert_eq!(said, b"world", "what had arrived is not told twice");
    assert!(matches!(exit, ExecEvent::Exit { code: 3, .. }));
}

/// The guest's side of an opening that has its identity behind it: the hello's nonce and the identity's request.
async fn opening_with_identity(stream: &mut DuplexStream, deframer: &mut Deframer) -> (u64, u64) {
    assert_eq!(next_frame(stream, deframer).await, Found::Opening);
    let Found::Message(hello) = next_frame(stream, deframer).await else { panic!("no hello") };
    let Found::Message(told) = next_frame(stream, deframer).await else { panic!("no identity") };
    assert!(matches!(told.body, Some(host_frame::Body::Reborn(_))), "{told:?}");
    assert_eq!(told.nonce, hello.nonce);
    (hello.nonce, told.request)
}

#[tokio::test(start_paused = true)]
async fn a_guest_s_identity_goes_out_with_the_hello_and_once() {
    let (links, mut theirs) = scripted(2);
    let (mut second, mut first) = (theirs.pop().unwrap(), theirs.pop().unwrap());
    links.open(&id(1));
    let told = links.reborn_early(&id(1), identity(1), ANSWER_WITHIN).unwrap();
    let mut deframer = Deframer::default();
    let (nonce, request) = opening_with_identity(&mut first, &mut deframer).await;
    let hello = GuestHello { version: 2, readiness: Readiness::Ready.into(), ..GuestHello::default() };
    first.write_all(OPENING).await.unwrap();
    say(&mut first, nonce, 0, guest_frame::Body::Hello(hello.clone())).await;
    links.greeted(&id(1), soon()).await.unwrap();
    let next = links.exec(&id(1), run(&["true"])).await.unwrap();
    let Found::Message(asked) = next_frame(&mut first, &mut deframer).await else { panic!("no exec") };
    assert!(matches!(asked.body, Some(host_frame::Body::Exec(_))), "it is not told twice: {asked:?}");
    drop((first, next));

    let mut deframer = Deframer::default();
    let (nonce, again) = opening_with_identity(&mut second, &mut deframer).await;
    assert_eq!(again, request, "the same request, for the answer was lost");
    second.write_all(OPENING).await.unwrap();
    say(&mut second, nonce, 0, guest_frame::Body::Hello(hello)).await;
    say(&mut second, nonce, request, guest_frame::Body::Done(mvm_proto::guest::Done {})).await;
    told.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_does_not_answer_is_opened_again_behind_a_filler() {
    let (links, mut theirs) = scripted(1);
    let mut stream = theirs.pop().unwrap();
    links.open(&id(1));
    // It is in the middle of a frame that will never be whole.
    let mut deframer = Deframer::default();
    let mut cut = OPENING.to_vec();
    cut.extend_from_slice(&[0, 1, 0, 0, 1, 2, 3, 4, 5]);
    deframer.push(&cut);
    while deframer.next::<HostFrame>().is_some() {}
    let begun = Instant::now();
    let nonce = loop {
        if let Found::Message(frame) = next_frame(&mut stream, &mut deframer).await {
            break frame.nonce;
        }
    };
    assert!(begun.elapsed() >= Duration::from_millis(500) && begun.elapsed() < Duration::from_secs(2));
    let hello = GuestHello { version: 2, readiness: Readiness::Ready.into(), ..GuestHello::default() };
    stream.write_all(OPENING).await.unwrap();
    say(&mut stream, nonce, 0, guest_frame::Body::Hello(hello)).await;
    links.ready(&id(1), soon()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_floods_loses_its_request_and_nothing_else() {
    let (links, mut theirs) = scripted(1);
    let mut stream = theirs.pop().unwrap();
    links.open(&id(1));
    let mut deframer = Deframer::default();
    let nonce = greet(&mut stream, &mut deframer).await;
    let handle = links.exec(&id(1), run(&["yes"])).await.unwrap();
    let Found::Message(asked) = next_frame(&mut stream, &mut deframer).await else { panic!("no exec") };
    let text = "y".repeat(64 * 1024);
    for piece in 0..64 {
        say(&mut stream, nonce, asked.request, output(&text, piece * text.len() as u64)).await;
    }
    let flooded = loop {
        if let Err(error) = handle.next().await {
            break error;
        }
    };
    assert_eq!(flooded, LinkError::Flooded);
    let pinged = tokio::spawn({
        let links = links.clone();
        async move { links.ping(&id(1), ANSWER_WITHIN).await }
    });
    loop {
        if let Found::Message(HostFrame { request, body: Some(host_frame::Body::Ping(_)), .. }) =
            next_frame(&mut stream, &mut deframer).await
        {
            say(&mut stream, nonce, request, guest_frame::Body::Done(mvm_proto::guest::Done {})).await;
            break;
        }
    }
    pinged.await.unwrap().unwrap();
}

/// Frames and noise that a guest with ill will sends, made from a seed.
fn hostile_frames(random: &mut fastrand::Rng, nonce: u64, request: u64) -> Vec<u8> {
    use guest_frame::Body;
    let mut out = Vec::new();
    let noise = |random: &mut fastrand::Rng, most| {
        let count = random.usize(..most);
        std::iter::repeat_with(|| random.u8(..)).take(count).collect::<Vec<u8>>()
    };
    if random.bool() {
        out.extend_from_slice(OPENING);
    }
    for _ in 0..random.usize(1..8) {
        let data = noise(random, 3000);
        let body = match random.u8(0..9) {
            0 => Body::Hello(GuestHello { version: random.u32(0..4), ..GuestHello::default() }),
            1 => Body::Output(Output {
                data,
                offset: random.u64(..),
                lost: random.u64(..),
                stderr: random.bool(),
            }),
            2 => Body::Chunk(mvm_proto::guest::Chunk { data, last: random.bool() }),
            3 => Body::State(mvm_proto::guest::State {
                readiness: random.i32(-1..9),
                message: "x".repeat(random.usize(..2000)),
                workload: random
                    .bool()
                    .then(|| mvm_proto::guest::Workload { state: random.i32(-1..9), run: random.u32(..) }),
            }),
            4 => Body::Heartbeat(mvm_proto::guest::Heartbeat {
                uptime_ms: random.u64(..),
                cpu_busy_ms: random.u64(..),
                open_work: random.u32(..),
                readiness: random.i32(-1..9),
                ..mvm_proto::guest::Heartbeat::default()
            }),
            5 => Body::Exit(mvm_proto::guest::Exit { code: random.i32(..), ..Default::default() }),
            6 => Body::Directory(mvm_proto::guest::Directory::default()),
            7 => Body::Accepted(mvm_proto::guest::Accepted {}),
            _ => Body::Done(mvm_proto::guest::Done {}),
        };
        let nonce = if random.u8(..4) == 0 { random.u64(..) } else { nonce };
        let request = if random.bool() { request } else { random.u64(..) };
        let _ = put_frame(&mut out, &GuestFrame { nonce, request, body: Some(body) });
        if random.u8(..6) == 0 {
            out.extend(noise(random, 500));
        }
    }
    if random.u8(..4) == 0 {
        let at = random.usize(..out.len());
        out[at] ^= 1 << random.u32(..8);
    }
    out
}

#[tokio::test(start_paused = true)]
async fn a_hostile_guest_neither_ends_the_agent_nor_touches_another_guest() {
    let (driver, good, guest) = ready_guest().await;
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (links, mut theirs) = scripted(1);
        let mut stream = theirs.pop().unwrap();
        links.open(&id(1));
        let mut deframer = Deframer::default();
        let nonce = greet(&mut stream, &mut deframer).await;
        let asked = links.exec(&id(1), run(&["sh"])).await.unwrap();
        let Found::Message(frame) = next_frame(&mut stream, &mut deframer).await else { panic!("no exec") };
        for _ in 0..20 {
            if stream.write_all(&hostile_frames(&mut random, nonce, frame.request)).await.is_err() {
                break;
            }
        }
        drop(stream);
        let heard = async { while asked.next().await.is_ok() {} };
        let _ = tokio::time::timeout(Duration::from_secs(5), heard).await;
        let view = links.view(&id(1)).unwrap();
        assert!(view.message.len() <= 256 && view.boot_id.len() <= 256, "seed {seed}");
    }
    good.ping(&guest, ANSWER_WITHIN).await.unwrap();
    assert_eq!(driver.boots(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_idle_link_wakes_for_nothing() {
    let (_driver, links, guest) = ready_guest().await;
    let changed = links.changed();
    let before = *changed.borrow();
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!((*changed.borrow(), links.view(&guest).unwrap().greetings), (before, 1));
}

/// Output until there is no more for a moment of paused time, or the exit.
async fn said_so_far(handle: &ExecHandle) -> (Vec<u8>, Option<ExecEvent>) {
    let mut said = Vec::new();
    while let Ok(event) = tokio::time::timeout(Duration::from_secs(1), handle.next()).await {
        match event.unwrap() {
            ExecEvent::Output { data, .. } => said.extend(data),
            ExecEvent::Accepted | ExecEvent::Taken(_) => {}
            exit => return (said, Some(exit)),
        }
    }
    (said, None)
}

#[tokio::test(start_paused = true)]
async fn a_program_under_a_number_is_begun_once_attached_to_from_any_byte_and_left_when_dropped() {
    let (_driver, links, guest) = ready_guest().await;
    let cat = ExecRequest { stdin: true, ..run(&["cat"]) };
    let first = links.exec_under(&guest, 77, cat.clone()).await.unwrap();
    first.write_at(0, b"hello ", false).await.unwrap();
    assert_eq!(said_so_far(&first).await.0, b"hello ");
    // Asked again, it is the same program; the one that asked before is told.
    let second = links.exec_under(&guest, 77, cat).await.unwrap();
    assert_eq!(first.next().await.unwrap_err(), LinkError::Replaced);
    drop(first);
    assert_eq!(said_so_far(&second).await.0, b"hello ");
    drop(second);
    let from = GoOn { output_from: 4, input_from: Some(3) };
    let third = links.attach(&guest, 77, from).await.unwrap();
    // What the program has is not taken twice.
    third.write_at(3, b"lo world", false).await.unwrap();
    assert_eq!(said_so_far(&third).await.0, b"o world");
    third.write_at(11, b"", true).await.unwrap();
    assert!(matches!(said_so_far(&third).await.1, Some(ExecEvent::Exit { code: 0, .. })));
    drop(third);
    // Its end was told, so that nothing is left of it.
    let gone = links.attach(&guest, 77, GoOn::default()).await.unwrap();
    let refused = gone.next().await.unwrap_err();
    assert!(matches!(refused, LinkError::Refused { .. }), "{refused:?}");
    drop(gone);
    assert_eq!(links.view(&guest).unwrap().asked_work, 0);
}

#[tokio::test(start_paused = true)]
async fn a_program_that_was_let_go_of_waits_for_no_reader_and_its_end_is_told() {
    let (_driver, links, guest) = ready_guest().await;
    let cat = ExecRequest { stdin: true, ..run(&["cat"]) };
    let program = links.exec_under(&guest, 79, cat).await.unwrap();
    assert!(program.let_go());
    // More than a window, of which nothing is confirmed.
    let written = 3 * mvm_proto::guest::WINDOW_BYTES;
    let piece = vec![b'x'; 32 * 1024];
    for at in (0..written).step_by(piece.len()) {
        program.write_at(at as u64, &piece, false).await.unwrap();
    }
    assert_eq!(said_so_far(&program).await, (Vec::new(), None));
    program.write_at(written as u64, b"", true).await.unwrap();
    let (_, exit) = said_so_far(&program).await;
    assert!(matches!(exit, Some(ExecEvent::Exit { code: 0, .. })), "{exit:?}");
}

#[tokio::test(start_paused = true)]
async fn a_guest_is_told_on_a_new_link_too_that_nothing_reads_a_program() {
    let (links, mut theirs) = scripted(2);
    let (mut second, mut first) = (theirs.pop().unwrap(), theirs.pop().unwrap());
    links.open(&id(1));
    let mut deframer = Deframer::default();
    let nonce = greet(&mut first, &mut deframer).await;
    let features = vec![mvm_proto::guest::FEATURE_DETACH.to_owned()];
    let able = GuestHello { version: 3, features, ..GuestHello::default() };
    say(&mut first, nonce, 0, guest_frame::Body::Hello(able)).await;
    let program = links.exec_under(&id(1), 82, run(&["make"])).await.unwrap();
    while !program.let_go() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(first);

    let mut deframer = Deframer::default();
    greet(&mut second, &mut deframer).await;
    let mut asked = Vec::new();
    while asked.len() < 2 {
        if let Found::Message(frame) = next_frame(&mut second, &mut deframer).await {
            asked.extend(frame.body);
        }
    }
    assert!(matches!(asked[..], [host_frame::Body::Exec(_), host_frame::Body::Detach(_)]), "{asked:?}");
}

#[tokio::test(start_paused = true)]
async fn an_end_of_input_that_is_told_again_and_again_is_kept_once() {
    let (links, mut theirs) = scripted(2);
    let (mut second, mut first) = (theirs.pop().unwrap(), theirs.pop().unwrap());
    links.open(&id(1));
    let mut deframer = Deframer::default();
    greet(&mut first, &mut deframer).await;
    let program = links.exec_under(&id(1), 83, run(&["make"])).await.unwrap();
    for _ in 0..100 {
        program.write_at(0, b"", true).await.unwrap();
    }
    drop(first);

    let mut deframer = Deframer::default();
    greet(&mut second, &mut deframer).await;
    while links.view(&id(1)).unwrap().greetings < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    program.resize(1, 2).unwrap();
    let mut ends = 0;
    loop {
        let Found::Message(frame) = next_frame(&mut second, &mut deframer).await else { continue };
        match frame.body {
            Some(host_frame::Body::Input(_)) => ends += 1,
            Some(host_frame::Body::Resize(_)) => break,
            _ => {}
        }
    }
    assert_eq!(ends, 1);
}

#[tokio::test(start_paused = true)]
async fn one_that_attaches_learns_from_where_on_the_program_takes_input() {
    let (_driver, links, guest) = ready_guest().await;
    let cat = ExecRequest { stdin: true, ..run(&["cat"]) };
    let first = links.exec_under(&guest, 80, cat).await.unwrap();
    first.write_at(0, b"typed", false).await.unwrap();
    assert_eq!(said_so_far(&first).await.0, b"typed");
    drop(first);
    let from = GoOn { output_from: 5, input_from: None };
    let second = links.attach(&guest, 80, from).await.unwrap();
    let learned = loop {
        if let ExecEvent::Taken(bytes) = second.next().await.unwrap() {
            break bytes;
        }
    };
    assert_eq!(learned, 5);
    second.write_at(learned, b" more", true).await.unwrap();
    assert_eq!(said_so_far(&second).await.0, b" more");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_sends_without_end_waits_for_a_guest_that_does_not_read() {
    let links = fake_guest::links_to(|_, _| futures::StreamExt::boxed(futures::stream::pending()));
    let guest: InstanceId = "i-0000abcd".parse().unwrap();
    links.open(&guest);
    let program = links.exec_under(&guest, 81, run(&["sleep"])).await.unwrap();
    let mut sent = 0_u64;
    let flood = async {
        loop {
            program.wait_until_read().await;
            program.resize(1, 1).unwrap();
            sent += 1;
            tokio::task::yield_now().await;
        }
    };
    let stopped = tokio::time::timeout(Duration::from_secs(60), flood).await;
    assert!(stopped.is_err(), "it goes on for ever");
    // Far less than a link may keep in all: what fits in its buffers, of some 20 bytes each.
    assert!((1_000..200_000).contains(&sent), "{sent}");
}

#[tokio::test(start_paused = true)]
async fn output_that_is_not_confirmed_stops_at_a_window_and_a_lapsed_program_is_no_work() {
    let (_driver, links, guest) = ready_guest().await;
    let bytes = 3 * mvm_proto::guest::WINDOW_BYTES;
    let flood = links.exec_under(&guest, 78, run(&["flood", &bytes.to_string()])).await.unwrap();
    let (said, exit) = said_so_far(&flood).await;
    assert!(said.len() >= bytes / 3 && said.len() < bytes / 2 && exit.is_none(), "{}", said.len());
    assert!(links.view(&guest).unwrap().is_busy());
    flood.count_as_work(false);
    assert!(!links.view(&guest).unwrap().is_busy());
    flood.count_as_work(true);
    assert!(links.view(&guest).unwrap().is_busy());
    let mut all = said;
    let exit = loop {
        flood.confirm(all.len() as u64);
        let (more, exit) = said_so_far(&flood).await;
        all.extend(more);
        if let Some(exit) = exit {
            break exit;
        }
    };
    assert_eq!((all.len(), matches!(exit, ExecEvent::Exit { code: 0, .. })), (bytes, true));
    let lines = all.chunks(16).enumerate();
    assert!(lines.into_iter().all(|(line, text)| text == format!("{line:015}\n").as_bytes()));
    drop(flood);
    assert!(!links.view(&guest).unwrap().is_busy());
}
