//! A process that takes the jailer's command line, builds its directories and becomes the stand-in inside them.
//!
//! As root it really changes its root; the real jailer needs a static program for that, and this one brings along the
//! libraries that both stand-ins use. Without root it only changes its working directory.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use super::say;

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Arguments {
    id: String,
    exec_file: PathBuf,
    uid: u32,
    gid: u32,
    base: PathBuf,
    cgroup_version: u32,
    parent_cgroup: Option<PathBuf>,
    forks: bool,
    rest: Vec<String>,
}

pub fn run() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let fault = match parse(&words).and_then(|arguments| jail(&arguments).map_err(|cause| cause.to_string()))
    {
        Ok(()) => return ExitCode::SUCCESS,
        Err(fault) => fault,
    };
    say(&format!("Jailer error: {fault}"));
    ExitCode::FAILURE
}

fn parse(words: &[String]) -> Result<Arguments, String> {
    let mut arguments = Arguments { base: "/srv/jailer".into(), cgroup_version: 1, ..Arguments::default() };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().cloned().ok_or_else(|| format!("the argument {word} needs a value"));
        let number = |text: String| text.parse().map_err(|_| format!("{text} is no number"));
        match word.as_str() {
            "--id" => arguments.id = value()?,
            "--exec-file" => arguments.exec_file = value()?.into(),
            "--uid" => arguments.uid = number(value()?)?,
            "--gid" => arguments.gid = number(value()?)?,
            "--chroot-base-dir" => arguments.base = value()?.into(),
            "--cgroup-version" => match number(value()?)? {
                version @ (1 | 2) => arguments.cgroup_version = version,
                other => return Err(format!("{other} is no cgroup version")),
            },
            "--parent-cgroup" => arguments.parent_cgroup = Some(value()?.into()),
            "--netns" | "--resource-limit" => drop(value()?),
            "--cgroup" => return Err("the stand-in gives no group a limit".to_owned()),
            "--daemonize" | "--new-pid-ns" => arguments.forks = true,
            "--" => {
                arguments.rest = words.cloned().collect();
                break;
            }
            other => return Err(format!("Found argument '{other}' which wasn't expected")),
        }
    }
    let valid = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if !(1..=64).contains(&arguments.id.len()) || !arguments.id.chars().all(valid) {
        return Err(format!("Invalid instance ID: {}", arguments.id));
    }
    if !arguments.exec_file.is_file() {
        return Err(format!("{} is not a file", arguments.exec_file.display()));
    }
    // As the real one: links are followed first, and the name is looked at then.
    arguments.exec_file = fs::canonicalize(&arguments.exec_file).map_err(|cause| cause.to_string())?;
    let name = arguments.exec_file.file_name().unwrap_or_default().to_string_lossy();
    if !name.contains("firecracker") {
        return Err(format!(
            "Invalid filename. The filename of `--exec-file` option must contain \"firecracker\": {name}"
        ));
    }
    Ok(arguments)
}

fn jail(arguments: &Arguments) -> io::Result<()> {
    let name = arguments.exec_file.file_name().unwrap_or_default().to_owned();
    let root = arguments.base.join(&name).join(&arguments.id).join("root");
    let is_root = nix::unistd::geteuid().is_root();
    leave_group(arguments, Path::new(&name))?;
    fs::create_dir_all(root.join("run"))?;
    fs::copy(&arguments.exec_file, root.join(&name))?;
    // A device that is there already is an error: whoever starts a jail anew must have removed the old one.
    fs::create_dir_all(root.join("dev"))?;
    fs::File::create_new(root.join("dev/kvm"))?;
    if is_root {
        bring_libraries(&root)?;
        chown(&root, Some(arguments.uid), Some(arguments.gid))?;
        nix::unistd::chroot(&root)?;
        std::env::set_current_dir("/")?;
        nix::unistd::setgid(arguments.gid.into())?;
        nix::unistd::setuid(arguments.uid.into())?;
    } else {
        std::env::set_current_dir(&root)?;
    }
    let mut program = OsString::from(if is_root { "/" } else { "./" });
    program.push(&name);
    let mut command = Command::new(program);
    command
        .args(["--id", &arguments.id, "--start-time-us", "0", "--start-time-cpu-us", "0"])
        .args(&arguments.rest);
    if !arguments.forks {
        return Err(command.exec());
    }
    let child = command.spawn()?;
    let mut pid_file = name;
    pid_file.push(".pid");
    let place = Path::new(if is_root { "/" } else { "." });
    fs::File::create(place.join(pid_file))?.write_all(child.id().to_string().as_bytes())
}

/// Where the stand-in believes that cgroup v2 is mounted; empty: nowhere. Absent: it looks.
pub const CGROUP2: &str = "STAND_IN_CGROUP2";

/// What the real one does that is told version 2 and no group to make: it moves itself into one that is there, by default
/// one with its program's name, and ends where no such hierarchy is mounted.
fn leave_group(arguments: &Arguments, program: &Path) -> io::Result<()> {
    if arguments.cgroup_version != 2 {
        return Ok(());
    }
    let mount = match std::env::var_os(CGROUP2) {
        Some(mount) => Some(PathBuf::from(mount)).filter(|mount| !mount.as_os_str().is_empty()),
        None => cgroup2_mount(&fs::read_to_string("/proc/mounts")?),
    };
    let mount = mount.ok_or_else(|| io::Error::other("CgroupHierarchyMissing(\"unified\")"))?;
    let group = mount.join(arguments.parent_cgroup.as_deref().unwrap_or(program));
    if !group.is_dir() {
        return Ok(());
    }
    fs::write(group.join("cgroup.procs"), std::process::id().to_string())
}

fn cgroup2_mount(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| path.into())
    })
}

/// The files that this very process is made of, at the same paths.
fn bring_libraries(root: &Path) -> io::Result<()> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let mut files: Vec<&str> = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).collect();
    files.retain(|file| file.contains(".so"));
    files.push("/lib64/ld-linux-x86-64.so.2");
    files.sort_unstable();
    files.dedup();
    for file in files {
        let target = root.join(file.trim_start_matches('/'));
        fs::create_dir_all(target.parent().unwrap_or(root))?;
        fs::copy(file, target)?;
    }
    Ok(())
}
