//! Rules that are written anew while packets fly: none of them gets through in between.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use mvm_host::firewall::Reason;

use crate::firewall::frames::{MARK, UDP, ipv4, udp};
use crate::firewall::lab::{
    A, B, FIRST, Lab, SECOND, UPLINK, all_ports, both_nets, from_port, gateway_mac, net, port,
};
use crate::firewall::space::{NEEDS, wait_until};
use mvm_needs::can_run;

const REBUILDS: usize = 50;
const PACKETS: u64 = 5000;

#[test]
fn no_forbidden_packet_passes_while_the_rules_are_written_anew() {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(true);
    let (me, peer, stranger) = (port(A, FIRST), port(A, SECOND), port(B, FIRST));
    let to = |address| ipv4(me.address, address, UDP, (0, false), &udp((me.address, 1), (address, 2), MARK));
    let as_peer = ipv4(
        peer.address,
        stranger.address,
        UDP,
        (0, false),
        &udp((peer.address, 1), (stranger.address, 2), MARK),
    );
    let frames = [
        from_port(&me, gateway_mac(A), 0x0800, &to(stranger.address)),
        from_port(&me, gateway_mac(A), 0x0800, &to(UPLINK)),
        from_port(&me, gateway_mac(A), 0x0800, &as_peer),
        from_port(&me, peer.mac(), 0x86dd, MARK),
    ];
    // Whatever the host would let in, it would have a socket for.
    let socket = lab.node.run(|| std::net::UdpSocket::bind((UPLINK, 2)).unwrap());
    socket.set_nonblocking(true).unwrap();
    let (sent, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let flood = {
        let (sent, over, tap) = (sent.clone(), over.clone(), lab.guest(A, FIRST).tap.clone());
        std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                for frame in &frames {
                    tap.send(frame);
                    sent.fetch_add(1, Ordering::Relaxed);
                }
                tap.marked();
            }
        })
    };
    let mut seen = Vec::new();
    let mut rebuilds = 0;
    while rebuilds < REBUILDS || sent.load(Ordering::Relaxed) < PACKETS {
        let mut nets = both_nets();
        if rebuilds % 2 == 0 {
            nets.push(net(9));
        }
        lab.firewall(|firewall| firewall.rebuild(&nets, &all_ports())).unwrap();
        seen.extend(lab.seen((A, FIRST)));
        rebuilds += 1;
    }
    over.store(true, Ordering::Relaxed);
    flood.join().unwrap();
    seen.extend(lab.seen((A, FIRST)));
    let sent = sent.load(Ordering::Relaxed);
    assert_eq!(seen, Vec::<String>::new(), "of {sent} packets during {rebuilds} rebuilds");
    assert!(socket.recv(&mut [0; 64]).is_err(), "the host got one");
    // Counters outlive a repair in place, so that every single one is accounted for.
    let all = || {
        let reasons = [Reason::CrossTenant, Reason::ToHost, Reason::SpoofIp, Reason::Ipv6];
        let dropped = lab.dropped();
        reasons.map(|reason| dropped.get(&reason).copied().unwrap_or_default()).iter().sum::<u64>()
    };
    wait_until("each is counted", || all() == sent);
    println!("{sent} forbidden packets during {rebuilds} rebuilds: none passed");
}

/// The whole rule set, as the system's own tool shows it.
#[test]
fn the_rules_read_well() {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(false);
    let shown = lab.node.command("nft", &["list", "ruleset"], "");
    for line in [
        "table inet mvm {",
        "table bridge mvm {",
        "type filter hook forward priority filter; policy accept;",
        "type nat hook postrouting priority srcnat; policy accept;",
        "iifname \"br-tenant-*\" goto from-tenant",
        "iifname . @nh,96,32 != @sources goto bad-source",
        "@nh,128,32 @denied counter name \"denied-range\" drop",
        "iifname @masqueraded goto to-world",
        "iifname . oifname vmap @within",
        "counter name \"cross-tenant\" drop",
        "\"br-tenant-1\" . \"br-tenant-1\" : accept",
        "oifname != \"br-tenant-*\" iifname @masqueraded masquerade",
        "169.254.0.0/16",
        "iifname . ether saddr . ip saddr @ports goto from-guest",
        "\"tn1i3\" : 0:2",
        "meta priority set iifname map @networks accept",
        "meta priority . oifname @members accept",
        "\"tn1i3\" . 02:4d:00:01:00:03 . 10.77.1.3 counter packets",
    ] {
        assert!(shown.contains(line), "{line} is not in\n{shown}");
    }
}
