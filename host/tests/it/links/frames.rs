//! Frames through real TAPs and a real bridge: who reaches whom, and who may hold a TAP.

use std::os::fd::OwnedFd;

use mvm_host::links::{LinkError, Links};
use mvm_host::network::{Mac, TenantNet};
use rustix::io::Errno;

use crate::links::{OWNER, net, port, tenant};
use crate::support::netns::{in_own_network, json, wait_until};

/// The virtio header that the kernel puts before each frame unless it is told of a longer one.
const HEADER: usize = 10;

/// For experiments: no program on the host takes such frames.
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];

fn send(tap: &OwnedFd, from: Mac, to: Mac, text: &str) {
    let mut frame = vec![0; HEADER];
    frame.extend(to.0.iter().chain(&from.0).chain(&ETHERTYPE).chain(text.as_bytes()));
    frame.resize(HEADER + 60, 0);
    assert_eq!(rustix::io::write(tap, &frame).unwrap(), frame.len());
}

/// The texts of our frames that have arrived.
fn arrived(tap: &OwnedFd) -> Vec<String> {
    let mut texts = Vec::new();
    let mut frame = [0; 2048];
    loop {
        match rustix::io::read(tap, &mut frame) {
            Ok(length) if length > HEADER + 14 && frame[HEADER + 12..HEADER + 14] == ETHERTYPE => {
                let text = String::from_utf8_lossy(&frame[HEADER + 14..length]);
                texts.push(text.trim_end_matches('\0').to_owned());
            }
            Ok(_) => {}
            Err(Errno::AGAIN) => return texts,
            Err(error) => panic!("{error}"),
        }
    }
}

/// The VMMs' ends of two open TAPs, once their bridge forwards.
async fn ends(links: &Links, net: &TenantNet) -> [(OwnedFd, Mac); 2] {
    let ports = tenant(links, net).await;
    let mut ends = Vec::new();
    for port in &ports {
        ends.push((links.attach_tap(&port.tap()).await.unwrap(), port.mac()));
    }
    for port in &ports {
        let command = format!("bridge -j link show dev {}", port.tap());
        wait_until("the bridge forwards", || json(&command)[0]["state"] == "forwarding").await;
    }
    ends.try_into().unwrap()
}

#[test]
fn frame_goes_from_one_tap_to_the_other_of_its_tenant() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let [(a, mac_a), (b, mac_b)] = ends(&links, &net(7)).await;
        send(&a, mac_a, mac_b, "hello");
        let mut texts = Vec::new();
        wait_until("the frame arrives", || {
            texts.extend(arrived(&b));
            !texts.is_empty()
        })
        .await;
        assert_eq!(texts, ["hello"]);
        let seen = links.observe().await.unwrap();
        assert!(seen.taps[0].rx_bytes >= 60 && seen.taps[1].tx_bytes >= 60, "{seen:?}");
    });
}

#[test]
fn sender_with_anothers_address_and_unknown_receivers_get_nothing_through() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let [(a, mac_a), (b, mac_b)] = ends(&links, &net(7)).await;
        send(&a, Mac::of(7, 99), mac_b, "spoofed");
        send(&a, mac_b, Mac([0xff; 6]), "spoofed as the other");
        send(&a, mac_a, Mac::of(7, 98), "to nobody");
        send(&a, mac_a, mac_b, "honest");
        let mut texts = Vec::new();
        wait_until("the honest frame arrives", || {
            texts.extend(arrived(&b));
            texts.contains(&"honest".to_owned())
        })
        .await;
        assert_eq!(texts, ["honest"]);
        // The bridge did not learn that the other's address is behind the spoofer: frames still go where they should.
        send(&b, mac_b, mac_a, "back");
        wait_until("the answer arrives", || arrived(&a) == ["back"]).await;
    });
}

#[test]
fn isolated_ports_do_not_reach_each_other_until_isolation_ends() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let isolating = TenantNet { isolate_ports: true, ..net(7) };
        let [(a, mac_a), (b, mac_b)] = ends(&links, &isolating).await;
        send(&a, mac_a, mac_b, "apart");
        send(&a, mac_a, Mac([0xff; 6]), "apart, to all");
        for offset in [3, 4] {
            links.ensure_tap(&port(&net(7), offset), &net(7)).await.unwrap();
        }
        send(&a, mac_a, mac_b, "together");
        let mut texts = Vec::new();
        wait_until("the last frame arrives", || {
            texts.extend(arrived(&b));
            texts.contains(&"together".to_owned())
        })
        .await;
        assert_eq!(texts, ["together"]);
    });
}

#[test]
fn tap_passes_nothing_until_it_is_opened() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let net = net(7);
        links.ensure_bridge(&net).await.unwrap();
        let ports = [3, 4].map(|offset| port(&net, offset));
        let mut ends = Vec::new();
        for port in &ports {
            links.ensure_tap(port, &net).await.unwrap();
            ends.push(links.attach_tap(&port.tap()).await.unwrap());
        }
        let frame = [0; HEADER + 60];
        assert!(
            rustix::io::write(&ends[0], &frame).is_err(),
            "the kernel takes no frames from a TAP that is down"
        );
        for port in &ports {
            links.open_tap(&port.tap()).await.unwrap();
        }
        wait_until("the frame arrives", || {
            send(&ends[0], ports[0].mac(), ports[1].mac(), "open");
            arrived(&ends[1]).contains(&"open".to_owned())
        })
        .await;
    });
}

#[test]
fn tap_has_one_holder_at_a_time_and_none_but_its_owner() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        tenant(&links, &net(7)).await;
        let held = links.attach_tap("tn7i3").await.unwrap();
        let refused = links.attach_tap("tn7i3").await.unwrap_err();
        assert!(matches!(refused, LinkError::Io { .. }), "{refused}");
        drop(held);
        assert_eq!(attach_as(OWNER), Ok(()));
        assert_eq!(attach_as(OWNER + 1), Err(Some(Errno::PERM.raw_os_error())));
    });
}

/// Attaches as another user without privileges: only files are still opened as root, since the device may be root's.
fn attach_as(uid: u32) -> Result<(), Option<i32>> {
    let inside = move || {
        let (root, user) = (rustix::process::Uid::ROOT, rustix::process::Uid::from_raw(uid));
        rustix::thread::set_thread_res_uid(root, user, root).unwrap();
        nix::unistd::setfsuid(nix::unistd::Uid::from_raw(0));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            match Links::connect().unwrap().attach_tap("tn7i3").await {
                Ok(_) => Ok(()),
                Err(LinkError::Io { cause, .. }) => Err(cause.raw_os_error()),
                Err(other) => panic!("{other}"),
            }
        })
    };
    std::thread::spawn(inside).join().unwrap()
}
