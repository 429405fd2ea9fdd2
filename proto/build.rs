//! Generates the messages of `proto/*.proto`. protox compiles them in process, so no protoc is needed on the machine.

use std::fmt::Write as _;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut files = vec!["proto/guest.proto"];
    if std::env::var_os("CARGO_FEATURE_CONTROL").is_some() {
        files.extend([
            "proto/node.proto",
            "proto/session.proto",
            "proto/control.proto",
            "proto/objects.proto",
            "proto/tunnel.proto",
        ]);
    }
    for file in &files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;
    std::fs::write(out.join("shapes.rs"), shapes(&descriptors)?)?;

    // What people read as JSON is the message itself, so that the API, the session and the CLI can't drift apart.
    let json = "#[derive(serde::Serialize, serde::Deserialize)] #[serde(default)]";
    let mut config = tonic_prost_build::configure();
    for time in times(&descriptors) {
        config = config.field_attribute(time, "#[serde(skip_serializing_if = \"String::is_empty\")]");
    }
    config
        .message_attribute(".mvm.node.v1", json)
        .message_attribute(".mvm.control.v1", json)
        // Shown as what it says, not as bytes.
        .field_attribute(".mvm.control.v1.PushProgress.plan", "#[serde(skip)]")
        // Its own one, in `src/guest.rs`, does not show what it holds.
        // And that of a session's piece in `src/wire/secrets.rs`.
        .skip_debug([".mvm.guest.v1.Secrets", ".mvm.session.v1.SecretsPiece"])
        // Decoded by one copy, which can be wiped; a vector is decoded by two.
        .bytes(".mvm.guest.v1.Secrets.data")
        .bytes(".mvm.session.v1.SecretsPiece.data")
        // Relayed as they came, without a copy.
        .bytes(".mvm.tunnel.v1")
        // Shared with what is stored, and with the packets that it came in.
        .bytes(".mvm.session.v1.Document.envelope")
        // In order, and without the random keys that a thread's first hash map asks the kernel for.
        .btree_map(".mvm.guest.v1")
        // Measures a message before it decodes it.
        .codec_path("crate::wire::codec::MeasuredCodec")
        .compile_fds(descriptors)?;
    Ok(())
}

/// The fields of JSON messages that hold a time: one that is not known or never was is absent, not an empty text.
fn times(descriptors: &prost_types::FileDescriptorSet) -> Vec<String> {
    use prost_types::field_descriptor_proto::Type;
    let mut paths = Vec::new();
    for file in &descriptors.file {
        if !matches!(file.package(), "mvm.node.v1" | "mvm.control.v1") {
            continue;
        }
        for message in &file.message_type {
            let fields = message.field.iter().filter(|field| field.r#type() == Type::String);
            let times = fields.filter(|field| is_time(field.name()));
            paths.extend(
                times.map(|field| format!(".{}.{}.{}", file.package(), message.name(), field.name())),
            );
        }
    }
    paths
}

fn is_time(name: &str) -> bool {
    matches!(name, "at" | "since" | "not_after")
        || ["_at", "_since", "_until", "_not_after"].iter().any(|end| name.ends_with(end))
}

/// What `src/wire/measure.rs` must know of each message to tell how much memory it takes once it is decoded: an
/// implementation of `Shaped` per message. The guest protocol has small frames of its own and no shapes.
fn shapes(descriptors: &prost_types::FileDescriptorSet) -> Result<String, Box<dyn std::error::Error>> {
    use prost_types::field_descriptor_proto::{Label, Type};
    let mut text = String::new();
    for file in descriptors.file.iter().filter(|file| file.package() != "mvm.guest.v1") {
        for message in &file.message_type {
            if !message.nested_type.is_empty() {
                return Err(
                    format!("{} has nested messages or maps, which have no shape", message.name()).into()
                );
            }
            let mut fields: Vec<_> = message.field.iter().collect();
            fields.sort_by_key(|field| field.number());
            let name = rust_path(&format!(".{}.{}", file.package(), message.name()));
            writeln!(text, "impl Shaped for super::{name} {{")?;
            writeln!(
                text,
                "const SHAPE: &'static Shape = &Shape {{ size: size_of::<super::{name}>(), fields: &["
            )?;
            for field in fields {
                let kind = match field.r#type() {
                    Type::Message => {
                        format!("Kind::Message(<super::{} as Shaped>::SHAPE)", rust_path(field.type_name()))
                    }
                    Type::String | Type::Bytes => "Kind::Text".to_owned(),
                    Type::Group => return Err("groups have no shape".into()),
                    _ => "Kind::Scalar".to_owned(),
                };
                let repeated = field.label() == Label::Repeated;
                writeln!(
                    text,
                    "Field {{ number: {}, kind: {kind}, repeated: {repeated} }},",
                    field.number()
                )?;
            }
            writeln!(text, "] }};\n}}")?;
        }
    }
    Ok(text)
}

/// `.mvm.node.v1.Mark` as `node::v1::Mark`.
fn rust_path(name: &str) -> String {
    name.trim_start_matches(".mvm.").replace('.', "::")
}
