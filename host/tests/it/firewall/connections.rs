//! Whole connections: within a tenant, out to the world and back, from the host, and the gateway's own services.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use mvm_host::firewall::Reason;
use mvm_host::network::TenantNet;
use mvm_needs::can_run;
use mvm_proto::document::EgressMode;

use crate::firewall::lab::{A, B, FIRST, Lab, SECOND, UPLINK, WORLD, gateway, net, port};
use crate::firewall::space::{NEEDS, PATIENCE, Space, wait_until};

/// Longer than any answer within this machine takes.
const NO_ANSWER: Duration = Duration::from_millis(300);

/// Answers every TCP connection with what it was sent and who sent it, and every datagram likewise.
fn serve(space: &Space, port: u16) {
    space.run(move || {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
        let datagrams = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
        // They end with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let peer = stream.peer_addr().unwrap().ip().to_string();
                drop(stream.write_all(peer.as_bytes()));
            }
        });
        std::thread::spawn(move || {
            let mut buffer = [0; 64];
            while let Ok((_, from)) = datagrams.recv_from(&mut buffer) {
                drop(datagrams.send_to(from.ip().to_string().as_bytes(), from));
            }
        });
    });
}

/// Whom the server says it was called by.
fn call_tcp(space: &Space, to: Ipv4Addr, port: u16, wait: Duration) -> Option<String> {
    space.run(move || {
        let mut stream = TcpStream::connect_timeout(&SocketAddr::from((to, port)), wait).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut peer = String::new();
        stream.read_to_string(&mut peer).ok().map(|_| peer)
    })
}

fn call_udp(space: &Space, to: Ipv4Addr, port: u16, wait: Duration) -> Option<String> {
    space.run(move || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        socket.set_read_timeout(Some(wait)).unwrap();
        socket.send_to(b"who am I?", (to, port)).unwrap();
        let mut buffer = [0; 64];
        let (length, _) = socket.recv_from(&mut buffer).ok()?;
        Some(String::from_utf8_lossy(&buffer[..length]).into_owned())
    })
}

/// Both answers are the same, or there is none.
#[track_caller]
fn call(space: &Space, to: Ipv4Addr, port: u16, expected: Option<Ipv4Addr>) {
    let wait = if expected.is_some() { PATIENCE } else { NO_ANSWER };
    let expected = expected.map(|address| address.to_string());
    assert_eq!(call_tcp(space, to, port, wait), expected, "TCP to {to}:{port}");
    assert_eq!(call_udp(space, to, port, wait), expected, "UDP to {to}:{port}");
}

fn drops(lab: &Lab, reason: Reason) -> u64 {
    lab.dropped().get(&reason).copied().unwrap_or_default()
}

fn all_connections(br_netfilter: bool) {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(br_netfilter);
    let (a1, a2, b1) = (lab.guest(A, FIRST), lab.guest(A, SECOND), lab.guest(B, FIRST));
    for space in [&a2.space, &b1.space, &lab.world, &lab.node] {
        serve(space, 8080);
    }
    // Within a tenant, and from the host to its guests.
    call(&a1.space, a2.port.address, 8080, Some(a1.port.address));
    call(&lab.node, a2.port.address, 8080, Some(gateway(A)));
    call(&lab.node, b1.port.address, 8080, Some(gateway(B)));
    assert_eq!(lab.dropped().into_iter().filter(|(reason, _)| *reason != Reason::ArpToHost).count(), 0);
    // Out to the world, as the host.
    call(&a1.space, WORLD, 8080, Some(UPLINK));
    assert_eq!(drops(&lab, Reason::Egress), 0);
    call(&b1.space, WORLD, 8080, None);
    assert!(drops(&lab, Reason::Egress) >= 2);
    // Across, to the host, and from outside.
    call(&a1.space, b1.port.address, 8080, None);
    assert!(drops(&lab, Reason::CrossTenant) >= 2);
    for address in [UPLINK, gateway(A), gateway(B)] {
        let before = drops(&lab, Reason::ToHost);
        call(&a1.space, address, 8080, None);
        assert!(drops(&lab, Reason::ToHost) >= before + 2, "{address}");
    }
    call(&lab.world, a2.port.address, 8080, None);
    assert!(drops(&lab, Reason::Ingress) >= 2);
    let inspection = lab.inspect();
    assert_eq!(inspection.faults, []);
    let tenant = inspection.tenants[&a1.port.tenant];
    assert!(tenant.sent.packets >= 8 && tenant.received.packets >= 8, "{tenant:?}");
}

#[test]
fn connections_go_where_they_may_with_br_netfilter() {
    all_connections(true);
}

#[test]
fn connections_go_where_they_may_without_br_netfilter() {
    all_connections(false);
}

#[test]
fn all_packets_of_an_unanswered_connection_pass() {
    const ROUNDS: u32 = 5;
    const PACKETS: u64 = 5_000;
    if !can_run(&NEEDS) {
        return;
    }
    for br_netfilter in [true, false] {
        let lab = Lab::new(br_netfilter);
        let guest = lab.guest(A, FIRST);
        let sent = || lab.inspect().tenants.get(&guest.port.tenant).map_or(0, |tenant| tenant.sent.packets);
        let silent = lab.world.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 9)).unwrap());
        let socket = guest.space.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap());
        for round in 1..=ROUNDS {
            let sender = socket.try_clone().unwrap();
            let before = sent();
            guest.space.run(move || {
                for _ in 0..PACKETS {
                    sender.send_to(b"anyone?", (WORLD, 9)).unwrap();
                }
            });
            wait_until(&format!("packets of round {round} to have passed"), || sent() >= before + PACKETS);
        }
        drop(silent);
    }
}

#[test]
fn a_gateway_answers_names_only_to_its_own_tenant_and_only_while_it_is_told_to() {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(false);
    let a1 = lab.guest(A, FIRST);
    serve(&lab.node, 53);
    call(&a1.space, gateway(A), 53, None);
    lab.firewall(|firewall| firewall.add_net(&TenantNet { dns: true, ..net(A) })).unwrap();
    call(&a1.space, gateway(A), 53, Some(a1.port.address));
    call(&a1.space, gateway(B), 53, None);
    call(&a1.space, UPLINK, 53, None);
    call(&lab.guest(B, FIRST).space, gateway(B), 53, None);
    lab.firewall(|firewall| firewall.add_net(&net(A))).unwrap();
    call(&a1.space, gateway(A), 53, None);
    assert_eq!(lab.inspect().faults, []);
}

#[test]
fn a_change_of_egress_cuts_connections_that_are_open() {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(true);
    let a1 = lab.guest(A, FIRST);
    lab.world.run(|| {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 8081)).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut byte = [0];
            while stream.read_exact(&mut byte).is_ok() {
                drop(stream.write_all(&byte));
            }
        });
    });
    let mut stream =
        a1.space.run(|| TcpStream::connect_timeout(&SocketAddr::from((WORLD, 8081)), PATIENCE).unwrap());
    let mut echo = |wait| {
        stream.set_read_timeout(Some(wait)).unwrap();
        let mut byte = [0];
        stream.write_all(&[1]).and_then(|()| stream.read_exact(&mut byte)).is_ok()
    };
    assert!(echo(PATIENCE));
    lab.firewall(|firewall| firewall.add_net(&TenantNet { egress: EgressMode::None, ..net(A) })).unwrap();
    assert!(!echo(NO_ANSWER));
    wait_until("it is counted", || drops(&lab, Reason::Egress) > 0);
}

#[test]
fn guests_that_are_kept_apart_do_not_meet_by_way_of_the_gateway() {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(false);
    let (a1, a2) = (lab.guest(A, FIRST), lab.guest(A, SECOND));
    lab.node
        .ip("link set tn1i3 type bridge_slave isolated on\nlink set tn1i4 type bridge_slave isolated on\n");
    serve(&a2.space, 8080);
    // By way of the gateway's hardware address, as if the neighbour were far away.
    let by_gateway = format!("route add {} via {}\n", a2.port.address, gateway(A));
    a1.space.ip(&by_gateway);
    a2.space.ip(&format!("route add {} via {}\n", a1.port.address, gateway(A)));
    call(&a1.space, a2.port.address, 8080, Some(a1.port.address));
    lab.firewall(|firewall| firewall.add_net(&TenantNet { isolate_ports: true, ..net(A) })).unwrap();
    call(&a1.space, a2.port.address, 8080, None);
    assert!(drops(&lab, Reason::Isolated) >= 2);
    assert_eq!(port(A, SECOND).address, a2.port.address);
}
