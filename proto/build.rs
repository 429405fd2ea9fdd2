//! Generates the messages of `proto/*.proto`. protox compiles them in process, so no protoc is needed on the machine.

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut files = vec!["proto/guest.proto"];
    if std::env::var_os("CARGO_FEATURE_CONTROL").is_some() {
        files.extend(["proto/node.proto", "proto/session.proto", "proto/control.proto"]);
    }
    for file in &files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;

    // What people read as JSON is the message itself, so that the API, the session and the CLI can't drift apart.
    let json = "#[derive(serde::Serialize, serde::Deserialize)] #[serde(default)]";
    tonic_prost_build::configure()
        .message_attribute(".mvm.node.v1", json)
        .message_attribute(".mvm.control.v1", json)
        // Its own one, in `src/guest.rs`, does not show what it holds.
        .skip_debug([".mvm.guest.v1.Secrets"])
        // Decoded by one copy, which can be wiped; a vector is decoded by two.
        .bytes(".mvm.guest.v1.Secrets.data")
        // In order, and without the random keys that a thread's first hash map asks the kernel for.
        .btree_map(".mvm.guest.v1")
        .compile_fds(descriptors)?;
    Ok(())
}
