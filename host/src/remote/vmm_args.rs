//! What a VMM may be told on its command line.
//!
//! A VMM is started with rights that the agent has not, and a command line can name any file of the host, or a script
//! to run. So each program has a closed list of options, and each option a form that its value must have. The names of
//! files in a run directory are plain; nothing but images is named by a path.

use std::collections::BTreeSet;

use mvm_proto::InstanceId;
use serde::Deserialize;

use super::policy::{Policy, VmmProgram, is_plain, refused};
use crate::{HostError, TAP_FD};

/// A command line, and what it is measured by.
pub(super) struct Line<'a> {
    pub(super) policy: &'a Policy,
    pub(super) instance: &'a InstanceId,
    pub(super) args: &'a [String],
}

/// Devices that a microVM may have, and what may be said of them: nothing that is a path.
const DEVICES: [&str; 7] = [
    "virtio-blk-device",
    "virtio-net-device",
    "virtio-rng-device",
    "virtio-serial-device",
    "virtio-balloon-device",
    "vhost-vsock-device",
    "virtserialport",
];
const DEVICE_WORDS: [&str; 16] = [
    "id",
    "bus",
    "chardev",
    "name",
    "drive",
    "serial",
    "netdev",
    "mac",
    "werror",
    "rerror",
    "guest-cid",
    "mq",
    "host_mtu",
    "deflate-on-oom",
    "discard",
    "write-zeroes",
];

const QEMU_FLAGS: [&str; 3] = ["-nodefaults", "-no-user-config", "-no-reboot"];

/// Each property of it must be said.
const SANDBOX: [&str; 5] =
    ["on", "obsolete=deny", "elevateprivileges=deny", "spawn=deny", "resourcecontrol=deny"];

pub(super) fn check(program: VmmProgram, line: &Line<'_>) -> Result<(), HostError> {
    match program {
        VmmProgram::Qemu => qemu(line),
        VmmProgram::Firecracker => {
            let (named, rest) = take_id(line)?;
            if !named {
                return refused("the command line does not name its instance");
            }
            firecracker(&rest)
        }
        VmmProgram::Jailer => jailer(line),
    }
}

fn unknown(option: &str, value: &str) -> HostError {
    HostError::Refused(format!("a VMM may not be given {option} {value}"))
}

fn qemu(line: &Line<'_>) -> Result<(), HostError> {
    let mut words = line.args.iter().map(String::as_str);
    let mut named = false;
    while let Some(option) = words.next() {
        if QEMU_FLAGS.contains(&option) {
            continue;
        }
        let value = words.next().unwrap_or_default();
        let fits = match option {
            "-name" => {
                named = true;
                value == format!("mvm-{}", line.instance)
            }
            "-sandbox" => value.split(',').collect::<Vec<_>>() == SANDBOX,
            "-chardev" => chardev(value),
            "-serial" => value.strip_prefix("chardev:").is_some_and(is_plain),
            "-qmp" => {
                let name = value.strip_prefix("unix:").and_then(|rest| rest.strip_suffix(SERVER));
                name.is_some_and(is_plain)
            }
            "-kernel" | "-initrd" => {
                line.policy.image(value.as_ref())?;
                true
            }
            // The guest's own affair.
            "-append" => true,
            "-blockdev" => blockdev(line, value)?,
            "-M" => value.split(',').next() == Some("microvm") && is_bare(value),
            "-accel" => matches!(value, "tcg,tb-size=64" | "kvm"),
            "-cpu" | "-smp" | "-m" => is_bare(value),
            "-display" => value == "none",
            "-global" => value == "virtio-mmio.force-legacy=false",
            "-device" => device(value),
            "-object" => memory(value),
            "-netdev" => netdev(value),
            "-incoming" => value == "defer",
            _ => false,
        };
        if !fits {
            return Err(unknown(option, value));
        }
    }
    if !named {
        return refused("the command line does not name its instance");
    }
    Ok(())
}

const SERVER: &str = ",server=on,wait=off";

/// Words and numbers: nothing in it can be a path.
fn is_bare(value: &str) -> bool {
    let letter = |byte: u8| {
        byte.is_ascii_alphanumeric() || matches!(byte, b',' | b'=' | b'-' | b'_' | b'.' | b'+' | b':')
    };
    !value.is_empty() && value.bytes().all(letter)
}

/// `key=value` parts behind a kind.
fn parts(value: &str) -> Option<(&str, Vec<(&str, &str)>)> {
    let (kind, rest) = value.split_once(',').unwrap_or((value, ""));
    let parts = rest.split(',').filter(|part| !part.is_empty()).map(|part| part.split_once('='));
    Some((kind, parts.collect::<Option<_>>()?))
}

fn chardev(value: &str) -> bool {
    let Some((kind, parts)) = parts(value) else { return false };
    parts.iter().all(|(key, value)| match (kind, *key) {
        (_, "id" | "path") => is_plain(value),
        ("file", "append") | ("socket", "server") => *value == "on",
        ("socket", "wait") => *value == "off",
        _ => false,
    }) && matches!(kind, "file" | "socket")
}

fn device(value: &str) -> bool {
    let Some((kind, parts)) = parts(value) else { return false };
    DEVICES.contains(&kind) && parts.iter().all(|(key, value)| DEVICE_WORDS.contains(key) && is_bare(value))
}

/// The guest's memory: its own, or a file in its run directory.
fn memory(value: &str) -> bool {
    let Some((kind, parts)) = parts(value) else { return false };
    let in_file = kind == "memory-backend-file";
    // Given once, so that a reader of the command line finds the same value as QEMU.
    let shares = parts.iter().filter(|(key, _)| *key == "share").count();
    ((in_file && shares == 1) || kind == "memory-backend-ram")
        && parts.iter().all(|(key, value)| match *key {
            "id" | "size" => is_plain(value),
            "mem-path" => in_file && is_plain(value),
            "share" => in_file && matches!(*value, "on" | "off"),
            "merge" | "dump" => *value == "off",
            _ => false,
        })
}

/// The TAP that the VMM was started with, and no other: it opens none by name.
fn netdev(value: &str) -> bool {
    let Some(("tap", parts)) = parts(value) else { return false };
    let said = |wanted: &str| parts.iter().filter(|(key, _)| *key == wanted).count();
    said("fd") == 1
        && parts.iter().all(|(key, value)| match *key {
            "id" => is_plain(value),
            "fd" => *value == TAP_FD.to_string(),
            _ => false,
        })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct BlockDevice {
    driver: String,
    node_name: String,
    read_only: bool,
    file: BlockFile,
    /// Whether it goes past the page cache, which is the agent's to say; no other word about caches is.
    #[serde(default, rename = "cache")]
    _cache: Option<BlockCache>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BlockCache {
    #[serde(rename = "direct")]
    _direct: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct BlockFile {
    driver: String,
    filename: String,
    read_only: bool,
    #[serde(default, rename = "cache")]
    _cache: Option<BlockCache>,
}

/// A raw file: of the image store and read-only, or the instance's own.
fn blockdev(line: &Line<'_>, value: &str) -> Result<bool, HostError> {
    let Ok(device) = serde_json::from_str::<BlockDevice>(value) else { return Ok(false) };
    let raw = device.driver == "raw" && device.file.driver == "file" && is_plain(&device.node_name);
    if !is_plain(&device.file.filename) {
        line.policy.image(device.file.filename.as_ref())?;
        return Ok(raw && device.read_only && device.file.read_only);
    }
    Ok(raw)
}

/// The line without `--id`, and whether that was the instance.
fn take_id<'a>(line: &Line<'a>) -> Result<(bool, Vec<&'a str>), HostError> {
    let mut rest: Vec<_> = line.args.iter().map(String::as_str).collect();
    match rest.get(..2) {
        Some(["--id", id]) if *id == line.instance.as_str() => {
            rest.drain(..2);
            Ok((true, rest))
        }
        _ => Ok((false, rest)),
    }
}

fn firecracker(args: &[&str]) -> Result<(), HostError> {
    match args {
        ["--api-sock", socket, "--log-path", log, "--level", "Warning", "--show-level"]
            if is_plain(socket) && is_plain(log) =>
        {
            Ok(())
        }
        _ => refused(format!("Firecracker may not be given {}", args.join(" "))),
    }
}

fn jailer(line: &Line<'_>) -> Result<(), HostError> {
    let (named, rest) = take_id(line)?;
    let Some(split) = rest.iter().position(|word| *word == "--").filter(|_| named) else {
        return refused("the jailer needs an instance, and its VMM a socket");
    };
    let (own, theirs) = rest.split_at(split);
    let mut words = own.iter().copied();
    let mut said = BTreeSet::new();
    while let Some(option) = words.next() {
        // Given once, so that a reader of the command line finds the same value as the jailer.
        if !said.insert(option) {
            return refused(format!("the jailer is given {option} twice"));
        }
        if matches!(option, "--new-pid-ns" | "--daemonize") {
            continue;
        }
        let value = words.next().unwrap_or_default();
        let id = || value.parse().map_err(|_| unknown(option, value)).and_then(|id| line.policy.vmm_id(id));
        let fits = match option {
            "--exec-file" => {
                let listed = |(path, kind): &(std::path::PathBuf, VmmProgram)| {
                    *kind == VmmProgram::Firecracker && path.as_os_str() == value
                };
                line.policy.programs.iter().any(listed) && {
                    // The jailer copies it as root: it must be root's as the jailer itself.
                    super::programs::check(value.as_ref(), line.policy)?;
                    true
                }
            }
            "--uid" | "--gid" => id().is_ok(),
            "--chroot-base-dir" => {
                let base = line.policy.jail_base.as_deref();
                base.is_some_and(|base| base.as_os_str() == value)
                    || line.policy.run_dir(line.instance).as_os_str() == value
            }
            // It is started in its instance's control group. Told 2 it would leave that for one of its own; told 1, and of no
            // group, it stays.
            "--cgroup-version" => value == "1",
            _ => false,
        };
        if !fits {
            return Err(unknown(option, value));
        }
    }
    if !["--uid", "--gid", "--exec-file"].iter().all(|option| said.contains(option)) {
        return refused("the jailer needs a program, a user and a group");
    }
    firecracker(theirs.get(1..).unwrap_or_default())
}
