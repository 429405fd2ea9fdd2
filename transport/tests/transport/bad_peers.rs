//! Floods: datagrams that are no QUIC, and handshakes that are begun and never ended.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::get;
use bytes::Bytes;
use http::Request;
use mvm_transport::{ALPN_H3, Limits};

use crate::support::{PATIENCE, Running, raw_config, raw_endpoint, udp_socket, wait_until};

fn server(limits: Limits) -> Running {
    Running::http(limits, Router::new().route("/", get(|| async { "ok" })))
}

async fn assert_serves(server: &Running) {
    let client = server.client().await;
    let answer = client.request(Request::get("/").body(Bytes::new()).expect("a request")).await;
    assert!(answer.expect("an answer").status().is_success());
}

/// The first packet of a real handshake with `server`, as it would leave a client.
async fn first_packet(server: &Running) -> Vec<u8> {
    let trap = udp_socket();
    trap.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let address = trap.local_addr().expect("an address");
    let endpoint = raw_endpoint([127, 0, 0, 1]);
    let config = raw_config(ALPN_H3, server.lab.node_tls("n1"));
    let _connecting = endpoint.connect_with(config, address, "localhost").expect("dialling");
    let mut packet = vec![0; 2000];
    let reading = tokio::task::spawn_blocking(move || {
        let (length, _) = trap.recv_from(&mut packet).expect("a packet");
        packet.truncate(length);
        packet
    });
    reading.await.expect("a packet")
}

/// Sends each packet from a socket of its own, bound to `local`.
fn send_all(packets: &[Vec<u8>], local: [u8; 4], to: SocketAddr) -> Vec<UdpSocket> {
    let send = |packet: &Vec<u8>| {
        let socket = UdpSocket::bind((std::net::IpAddr::from(local), 0)).expect("a socket");
        socket.send_to(packet, to).expect("room");
        socket
    };
    packets.iter().map(send).collect()
}

#[tokio::test]
async fn a_handshake_that_stalls_is_given_up_in_time() {
    let server = server(Limits { handshake_timeout: Duration::from_millis(300), ..Limits::default() });
    let packet = first_packet(&server).await;
    let _socket = send_all(&[packet], [127, 0, 0, 1], server.address);
    wait_until("it is given up", || server.stats.handshakes_timed_out() == 1).await;
    wait_until("its slot is free", || server.stats.connections_open() == 0).await;
}

#[tokio::test]
async fn half_open_handshakes_of_one_address_leave_room_for_others() {
    let limits = Limits { max_handshakes_per_ip: 8, retry_above: usize::MAX, ..Limits::default() };
    let server = server(limits);
    let mut packets = Vec::new();
    for _ in 0..60 {
        packets.push(first_packet(&server).await);
    }
    let _sockets = send_all(&packets, [127, 0, 0, 9], server.address);
    wait_until("the flood is felt", || server.stats.handshakes_ignored() >= 52).await;
    assert_eq!(server.stats.handshakes_open(), 8);
    assert_serves(&server).await;
}

/// How long a newcomer takes from its first packet to its answer.
async fn time_to_serve(server: &Running) -> Duration {
    let started = Instant::now();
    assert_serves(server).await;
    started.elapsed()
}

#[tokio::test]
async fn half_open_handshakes_of_a_few_addresses_do_not_delay_another() {
    const ADDRESSES: u8 = 8;
    // Longer than the test takes, so that none of the flood ends by itself.
    let handshake_timeout = Duration::from_secs(600);
    let limits =
        Limits { max_handshakes: 64, retry_above: usize::MAX, handshake_timeout, ..Limits::default() };
    let server = server(limits);
    let mut quiet = Duration::ZERO;
    for _ in 0..5 {
        quiet = quiet.max(time_to_serve(&server).await);
    }
    let mut sockets = Vec::new();
    for last in 1..=ADDRESSES {
        let mut packets = Vec::new();
        for _ in 0..10 {
            packets.push(first_packet(&server).await);
        }
        sockets.extend(send_all(&packets, [127, 0, 5, last], server.address));
    }
    wait_until("the flood fills its slots", || server.stats.handshakes_open() == 64).await;
    let mut crowded = Duration::MAX;
    for _ in 0..5 {
        crowded = crowded.min(time_to_serve(&server).await);
    }
    // One whose first packet was ignored sends it again after a second, which is many times the usual.
    assert!(crowded < (quiet * 4).max(Duration::from_millis(500)), "{crowded:?}, {quiet:?} when it is quiet");
    assert!(server.stats.handshakes_displaced() > 0, "{:?}", server.stats.all());
}

#[tokio::test]
async fn a_flood_of_unproven_addresses_is_asked_to_prove_them_and_kept_nowhere() {
    let server = server(Limits { retry_above: 4, ..Limits::default() });
    let mut packets = Vec::new();
    for _ in 0..60 {
        packets.push(first_packet(&server).await);
    }
    let _sockets = send_all(&packets, [127, 0, 0, 9], server.address);
    wait_until("the flood is felt", || server.stats.retries_sent() >= 56).await;
    assert_eq!(server.stats.handshakes_open(), 4);
    assert_serves(&server).await;
}

/// Bytes that have arrived at `socket`, in all.
fn received(socket: &UdpSocket) -> usize {
    socket.set_nonblocking(true).expect("a socket");
    let mut buffer = [0; 2000];
    std::iter::from_fn(|| socket.recv(&mut buffer).ok()).sum()
}

#[tokio::test]
async fn an_address_that_proved_nothing_is_sent_at_most_four_times_its_own_bytes() {
    for probes in [1, 2] {
        let server = server(Limits { handshake_timeout: Duration::from_secs(3), ..Limits::default() });
        let packet = first_packet(&server).await;
        let socket = udp_socket();
        for _ in 0..probes {
            socket.send_to(&packet, server.address).expect("room");
        }
        wait_until("the server gave up", || server.stats.handshakes_timed_out() == 1).await;
        wait_until("it said all", || server.stats.connections_open() == 0).await;
        let (sent, got) = (probes * packet.len(), received(&socket));
        println!(
            "{probes} probes of {} bytes: {got} bytes, {:.2} times",
            packet.len(),
            got as f64 / sent as f64
        );
        assert!(got > 0 && got <= 4 * sent, "{got} bytes for {sent}");
    }
}

#[tokio::test]
async fn an_address_that_is_asked_to_prove_itself_is_sent_less_than_it_sent() {
    let server = server(Limits { retry_above: 0, ..Limits::default() });
    let packet = first_packet(&server).await;
    let socket = udp_socket();
    for asked in 1..=20 {
        socket.send_to(&packet, server.address).expect("room");
        wait_until("it is answered", || server.stats.retries_sent() == asked).await;
    }
    let (sent, got) = (20 * packet.len(), received(&socket));
    assert!(got < sent / 4, "{got} bytes for {sent}");
}

#[tokio::test]
async fn datagrams_that_are_no_quic_change_nothing() {
    let server = server(Limits::default());
    let socket = udp_socket();
    let mut random = fastrand::Rng::with_seed(7);
    let mut first = first_packet(&server).await;
    for round in 0..2000 {
        let garbage: Vec<u8> = if round % 2 == 0 {
            (0..random.usize(0..1400)).map(|_| random.u8(..)).collect()
        } else {
            // A real first packet with one byte changed, which its own keys then do not open.
            let at = random.usize(6..first.len());
            first[at] ^= 1 << random.u8(0..8);
            first.clone()
        };
        socket.send_to(&garbage, server.address).expect("room");
        if round % 100 == 0 {
            tokio::task::yield_now().await;
        }
    }
    assert_serves(&server).await;
    assert_eq!(server.stats.panics(), 0);
    assert_eq!(server.stats.connections_accepted(), 1);
}

#[tokio::test]
async fn a_flood_of_half_open_handshakes_stays_within_its_memory() {
    let server = server(Limits { max_handshakes: 64, retry_above: 32, ..Limits::default() });
    let mut packets = Vec::new();
    for _ in 0..100 {
        packets.push(first_packet(&server).await);
    }
    let before = resident_bytes();
    for round in 0..10_u8 {
        drop(send_all(&packets, [127, 0, 1, round + 1], server.address));
        tokio::task::yield_now().await;
    }
    assert_serves(&server).await;
    let grown = resident_bytes().saturating_sub(before);
    assert!(server.stats.handshakes_open() <= 64);
    assert!(grown < 64 << 20, "grew by {grown} bytes");
}

fn resident_bytes() -> usize {
    const PAGE_BYTES: usize = 4096;
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: usize = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
    pages * PAGE_BYTES
}
