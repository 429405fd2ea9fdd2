//! Which addresses a node may give, as documents say it.

use serde_json::{Value, json};

use super::super::local;
use super::super::tests::{errors, minimal, with};
use crate::document::Network;

fn network(members: &Value) -> Value {
    let mut network = json!({ "tenant_net_id": 3, "ipv4_subnet": "10.240.3.0/24" });
    network.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    with(minimal(), "/tenants/0/network", network)
}

fn read(document: &Value) -> Network {
    local(document.to_string().as_bytes()).unwrap().tenants[0].network.clone()
}

#[test]
fn blocks_and_reserved_offsets_are_read_and_written_as_they_are_read() {
    let document = network(&json!({ "address_blocks": [0, 2, 15], "reserved_offsets": [5, 40, 255] }));
    let network = read(&document);
    assert_eq!(network.address_blocks.as_deref(), Some(&[0, 2, 15][..]));
    assert_eq!(network.instance_capacity(), 16 * 3 - 3 - 1 - 2);
    assert_eq!(serde_json::to_value(&network).unwrap(), document["tenants"][0]["network"]);
    // A document that says nothing of them is written as before: to the byte, for it may be signed.
    let before = r#"{"tenant_net_id":3,"ipv4_subnet":"10.240.3.0/24"}"#;
    assert_eq!(serde_json::to_string(&read(&minimal())).unwrap(), before);
}

#[test]
fn blocks_and_reserved_offsets_lie_inside_the_subnet_and_each_is_named_once_and_in_order() {
    let cases = [
        (json!({ "address_blocks": 1 }), "network.address_blocks: must be an array, found 1"),
        (json!({ "address_blocks": null }), "network.address_blocks: must be an array, found null"),
        (json!({ "address_blocks": [0, "1"] }), "network.address_blocks[1]: must be an integer, 0..=65535"),
        (
            json!({ "address_blocks": [0, 16] }),
            "network.address_blocks[1]: must be the number of a block of 16 inside the subnet: 0..=15, found 16",
        ),
        (
            json!({ "address_blocks": [0, 70_000] }),
            "network.address_blocks[1]: must be 0..=65535, found 70000",
        ),
        (
            json!({ "address_blocks": [1, 0] }),
            "network.address_blocks[1]: must be larger than 1, the one before it, found 0",
        ),
        (
            json!({ "address_blocks": [1, 1] }),
            "network.address_blocks[1]: must be larger than 1, the one before it, found 1",
        ),
        (json!({ "reserved_offsets": [-1] }), "network.reserved_offsets[0]: must be 0..=65535, found -1"),
        (
            json!({ "reserved_offsets": [9, 256] }),
            "network.reserved_offsets[1]: must be the offset of an address inside the subnet: 0..=255, found 256",
        ),
        (
            json!({ "reserved_offsets": [9, 9] }),
            "network.reserved_offsets[1]: must be larger than 9, the one before it, found 9",
        ),
    ];
    for (members, message) in cases {
        let found = errors(&network(&members));
        assert_eq!(found.len(), 1, "{members}: {found:?}");
        assert!(found[0].starts_with(&format!("tenants[0].{message}")), "{members}: {found:?}");
    }
}

#[test]
fn instances_fill_what_the_node_may_give_to_the_last_address_and_no_further() {
    // Six are wanted.
    let told = |members: Value| errors(&network(&members));
    let line = |text: &str| {
        vec![
            format!("tenants[0].pools: must want at most {text}, found 6").replace("SUBNET", "10.240.3.0/24"),
        ]
    };
    let reserved: Vec<u16> = (3..10).collect();
    assert_eq!(told(json!({ "address_blocks": [0], "reserved_offsets": reserved })), [""; 0]);
    let reserved: Vec<u16> = (3..11).collect();
    assert_eq!(
        told(json!({ "address_blocks": [0], "reserved_offsets": reserved })),
        line(
            "5 instances, as many as SUBNET has addresses for in its 1 address blocks outside its reserved offsets"
        )
    );
    assert_eq!(
        told(json!({ "address_blocks": [] })),
        line("0 instances, as many as SUBNET has addresses for in its 0 address blocks")
    );
    let reserved: Vec<u16> = (0..250).collect();
    assert_eq!(
        told(json!({ "reserved_offsets": reserved })),
        line("5 instances, as many as SUBNET has addresses for outside its reserved offsets")
    );
}
