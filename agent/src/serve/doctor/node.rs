//! What an agent needs of its machine besides the kernel: disk, tools, clock, ports, certificates.

use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use mvm_image::find_guest;
use mvm_pki::status::CertificateState;
use mvm_proto::Timestamp;
use mvm_proto::text::chain;
use mvm_vmm::VmmSettings;
use mvm_vmm::programs::find_program;

use super::Check;
use crate::serve::settings::AgentSettings;
use crate::upkeep::certs;

const MIB: u64 = 1024 * 1024;
/// An agent's own records: below this it does not start.
const DISK_LEAST_MIB: u64 = 16;
/// Room for an image and a handful of sleeping guests.
const DISK_COMFORT_MIB: u64 = 10 * 1024;
const INODES_LEAST: u64 = 100;
const INODES_COMFORT: u64 = 10_000;

pub(super) fn disk(data_dir: &Path) -> Check {
    const NAME: &str = "disk";
    // Before the first start the directory is not there yet; it will lie on its parent's file system.
    let there = data_dir.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."));
    match nix::sys::statvfs::statvfs(there) {
        Err(cause) => Check::failed(
            NAME,
            format!("{} can't be looked at: {cause}", there.display()),
            "choose another folder with --data-dir",
        ),
        Ok(fs) => {
            let free_mib = fs.blocks_available().saturating_mul(fs.fragment_size()) / MIB;
            // A file system without a fixed number of inodes says zero of zero.
            let inodes = (fs.files() > 0).then(|| fs.files_available());
            judge_disk(there, free_mib, inodes)
        }
    }
}

fn judge_disk(place: &Path, free_mib: u64, inodes: Option<u64>) -> Check {
    const NAME: &str = "disk";
    const FIX: &str =
        "free some space (mvm image gc removes unused images), or choose another folder with --data-dir";
    let found = format!("{free_mib} MiB free in {}", place.display());
    match (free_mib, inodes) {
        (_, Some(inodes)) if inodes < INODES_LEAST => {
            Check::failed(NAME, format!("{found}, but only {inodes} inodes"), FIX)
        }
        (free, _) if free < DISK_LEAST_MIB => Check::failed(NAME, found, FIX),
        (_, Some(inodes)) if inodes < INODES_COMFORT => {
            Check::warning(NAME, format!("{found}, but only {inodes} inodes"), FIX)
        }
        (free, _) if free < DISK_COMFORT_MIB => Check::warning(NAME, found, FIX),
        _ => Check::ok(NAME, found),
    }
}

/// What images and data disks are made with. An image can also be imported whole, so that none of it is needed.
pub(super) fn tools(vmm: &VmmSettings) -> Check {
    const NAME: &str = "image tools";
    let path = std::env::var_os("PATH").unwrap_or_default();
    // mke2fs is where an ordinary user's PATH does not look.
    let mut places: Vec<_> = std::env::split_paths(&path).collect();
    places.extend(["/usr/sbin".into(), "/sbin".into()]);
    let path = std::env::join_paths(places).unwrap_or(path);
    let has = |name| find_program(None, name, Some(&path)).is_ok();
    let guest = || vmm.guest.clone().or_else(|| find_guest(&std::env::current_exe().ok()?));
    let tools = [
        ("mke2fs (data disks; package e2fsprogs)", has("mke2fs")),
        ("apt-get and dpkg-deb (builtin:busybox)", has("apt-get") && has("dpkg-deb")),
        ("nix (flake references; package nix-bin)", has("nix")),
        ("mvm-guest (put it beside mvm, or name it by --guest)", guest().is_some_and(|path| path.is_file())),
    ];
    let missing: Vec<_> = tools.iter().filter(|(_, there)| !there).map(|(tool, _)| *tool).collect();
    if missing.is_empty() {
        return Check::ok(NAME, "data disks, builtin:busybox and flakes can be made here");
    }
    Check::warning(
        NAME,
        format!("missing: {}", missing.join("; ")),
        "install what you use; the rest is not needed",
    )
}

pub(super) async fn clock(now: Timestamp) -> Check {
    let mut ask = tokio::process::Command::new("timedatectl");
    ask.args(["show", "--property=NTPSynchronized", "--value"]).stdin(Stdio::null()).stderr(Stdio::null());
    let answer = tokio::time::timeout(Duration::from_secs(2), ask.kill_on_drop(true).output()).await;
    let said = answer.ok().and_then(Result::ok).filter(|output| output.status.success());
    let said = said.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    judge_clock(now, said.as_deref())
}

/// 2026-01-01: no clock that runs this program rightly is before it.
const OLDEST_TIME_UNIX_MS: i64 = 1_767_225_600_000;

/// `synchronised`: what systemd says, where there is one.
fn judge_clock(now: Timestamp, synchronised: Option<&str>) -> Check {
    const NAME: &str = "clock";
    const FIX: &str =
        "run a time service: apt-get install systemd-timesyncd (or chrony), then timedatectl set-ntp true";
    if now < Timestamp::from_unix_ms(OLDEST_TIME_UNIX_MS) {
        return Check::failed(
            NAME,
            format!("says {now}, which is long past: certificates will not verify"),
            FIX,
        );
    }
    match synchronised {
        Some("yes") => Check::ok(NAME, format!("{now}, synchronised by a time service")),
        Some(_) => Check::warning(NAME, format!("{now}, not synchronised by a time service"), FIX),
        None => Check::ok(NAME, format!("{now}; whether a time service keeps it is not known here")),
    }
}

pub(super) fn ports(settings: &AgentSettings) -> [Check; 2] {
    let serves = UnixStream::connect(&settings.socket).is_ok();
    let tcp = TcpListener::bind(settings.metrics_listen).map(drop);
    let udp = UdpSocket::bind(settings.listen).map(drop);
    [
        judge_port("port (API)", "UDP", settings.listen, udp, serves, "--listen"),
        judge_port("port (metrics)", "TCP", settings.metrics_listen, tcp, serves, "--metrics-listen"),
    ]
}

fn judge_port(
    name: &'static str,
    protocol: &str,
    address: SocketAddr,
    bound: io::Result<()>,
    agent_serves: bool,
    flag: &str,
) -> Check {
    match bound {
        Ok(()) => Check::ok(name, format!("{protocol} {address} is free")),
        Err(cause) if cause.kind() == io::ErrorKind::AddrInUse && agent_serves => {
            Check::ok(name, format!("{protocol} {address} is in use, and this machine's agent answers"))
        }
        Err(cause) => Check::failed(
            name,
            format!("{protocol} {address} can't be used: {cause}"),
            format!("stop the program that uses it (ss -lntup shows it), or choose another with {flag}"),
        ),
    }
}

pub(super) fn certificates(settings: &AgentSettings, now: Timestamp) -> Check {
    const NAME: &str = "certificates";
    let certs_dir = &settings.certs_dir;
    if let Some(file) =
        settings.desired_file.as_ref().filter(|_| !certs::CertsDir::new(certs_dir).is_enrolled())
    {
        return Check::ok(NAME, format!("none are needed: documents come from {}", file.display()));
    }
    if !certs::CertsDir::new(certs_dir).is_enrolled() {
        return Check::warning(
            NAME,
            "this node has not joined a cluster",
            "fine with `mvm agent serve --desired FILE`; else: mvm coordinator token create --node NODE, then \
             mvm agent certs request --coordinator https://HOST:4433 --token-file FILE",
        );
    }
    match certs::status(certs_dir, now) {
        Err(error) => Check::failed(NAME, chain(&error), error.remediation()),
        Ok(status) => {
            let found = format!("{}, until {}", status.identity, status.not_after);
            match status.state {
                CertificateState::Valid => Check::ok(NAME, found),
                CertificateState::Expired => Check::failed(
                    NAME,
                    format!("{found}: expired"),
                    "enrol again with a new token: mvm agent certs request",
                ),
                CertificateState::NotYetValid => {
                    Check::failed(NAME, format!("{found}: not valid yet"), "correct this machine's clock")
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Health;
    use super::*;

    #[test]
    fn little_disk_is_a_warning_and_none_a_failure() {
        let health = |free, inodes| judge_disk(Path::new("/"), free, inodes).health;
        assert_eq!(health(100_000, Some(1_000_000)), Health::Ok);
        assert_eq!(health(100_000, None), Health::Ok);
        assert_eq!(health(5_000, None), Health::Warning);
        assert_eq!(health(100_000, Some(5_000)), Health::Warning);
        assert_eq!(health(5, None), Health::Failed);
        assert_eq!(health(100_000, Some(5)), Health::Failed);
    }

    #[test]
    fn a_clock_from_before_this_program_is_wrong() {
        let now = Timestamp::from_unix_ms(OLDEST_TIME_UNIX_MS + 1);
        assert_eq!(judge_clock(Timestamp::from_unix_ms(0), Some("yes")).health, Health::Failed);
        assert_eq!(judge_clock(now, Some("yes")).health, Health::Ok);
        assert_eq!(judge_clock(now, Some("no")).health, Health::Warning);
        assert_eq!(judge_clock(now, None).health, Health::Ok);
    }

    #[test]
    fn a_port_in_use_is_fine_only_when_our_agent_uses_it() {
        let address: SocketAddr = "127.0.0.1:1".parse().unwrap();
        let in_use = || Err(io::Error::from(io::ErrorKind::AddrInUse));
        let health = |bound, serves| judge_port("port", "UDP", address, bound, serves, "--listen").health;
        assert_eq!(health(Ok(()), false), Health::Ok);
        assert_eq!(health(in_use(), true), Health::Ok);
        assert_eq!(health(in_use(), false), Health::Failed);
        assert_eq!(health(Err(io::Error::from(io::ErrorKind::PermissionDenied)), true), Health::Failed);
    }
}
