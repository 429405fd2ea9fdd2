//! The working directory of an instance's VMM and the names of the files in it: the run directory, or a jail.

use std::path::{Path, PathBuf};

use mvm_host::{JAIL, Jail};
use mvm_proto::InstanceId;

use super::settings::JailerSettings;

pub(super) const API_SOCKET: &str = "api.sock";
pub(super) const VSOCK_SOCKET: &str = "v.sock";
pub(super) const CONSOLE: &str = "console.log";
pub(super) const VMM_LOG: &str = "vmm.log";
pub(super) const METRICS: &str = "metrics.json";
pub(super) const DATA_DISK: &str = "data.img";
pub(super) const ROOTFS: &str = "rootfs.img";
pub(super) const KERNEL: &str = "kernel";
pub(super) const INITRD: &str = "initrd";

/// The directories of a VMM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Paths {
    /// What is the instance's own, jailed or not.
    pub(super) run_dir: PathBuf,
    pub(super) jail: Option<Jail>,
}

impl Paths {
    pub(super) fn new(
        instance: &InstanceId,
        run_dir: PathBuf,
        program: &Path,
        jailer: Option<&JailerSettings>,
        there: Option<PathBuf>,
    ) -> Self {
        let jail = jailer.map(|jailer| Jail {
            instance: instance.clone(),
            root: still_used(there, &run_dir, jailer)
                .unwrap_or_else(|| jail_root(instance, &run_dir, program, jailer)),
            uid: jailer.uid,
            gid: jailer.gid,
        });
        Self { run_dir, jail }
    }

    /// The same for a VMM that has a user of its own, which goes before the settings'.
    pub(super) fn run_as(mut self, user: Option<u32>) -> Self {
        if let (Some(jail), Some(user)) = (&mut self.jail, user) {
            (jail.uid, jail.gid) = (user, user);
        }
        self
    }

    /// A name in what the VMM sees as its working directory, as it is said from the run directory.
    pub(super) fn inside(&self, name: &str) -> String {
        if self.jail.is_some() { format!("{JAIL}/{name}") } else { name.to_owned() }
    }

    #[cfg(test)]
    fn dir(&self) -> &Path {
        self.jail.as_ref().map_or(&self.run_dir, |jail| &jail.root)
    }
}

/// A jail that is there was named after the program of its time, which may have another name by now.
fn still_used(there: Option<PathBuf>, run_dir: &Path, jailer: &JailerSettings) -> Option<PathBuf> {
    let base = jailer.chroot_base.as_deref().unwrap_or(run_dir);
    there.filter(|root| root.starts_with(base))
}

/// `<base>/<program>/<id>/root`: the jailer's own rule.
fn jail_root(instance: &InstanceId, run_dir: &Path, program: &Path, jailer: &JailerSettings) -> PathBuf {
    let base = jailer.chroot_base.as_deref().unwrap_or(run_dir);
    let name = program.file_name().unwrap_or(program.as_os_str());
    base.join(name).join(instance.as_str()).join("root")
}

/// The command line of a Firecracker that is its own master.
pub(super) fn vmm_args(instance: &InstanceId) -> Vec<String> {
    let named = ["--id", instance.as_str()].into_iter().chain(VMM_ARGS);
    named.map(str::to_owned).collect()
}

/// What Firecracker itself is told. Its log from the first line on: what is written before a request names one lands on the
/// console. Warnings only: each request is two lines of `Info`, which would bury the cause of an end.
const VMM_ARGS: [&str; 7] =
    ["--api-sock", API_SOCKET, "--log-path", VMM_LOG, "--level", "Warning", "--show-level"];

/// The command line of the jailer, which adds `--id` itself.
pub(super) fn jailer_args(
    instance: &InstanceId,
    run_dir: &Path,
    program: &Path,
    jailer: &JailerSettings,
    user: Option<u32>,
) -> Vec<String> {
    let text = |path: &Path| path.display().to_string();
    let base = jailer.chroot_base.as_deref().unwrap_or(run_dir);
    let mut args: Vec<String> = vec!["--id".into(), instance.as_str().to_owned()];
    let mut option = |name: &str, value: String| args.extend([name.to_owned(), value]);
    option("--exec-file", text(program));
    option("--uid", user.unwrap_or(jailer.uid).to_string());
    option("--gid", user.unwrap_or(jailer.gid).to_string());
    option("--chroot-base-dir", text(base));
    // It is started in its instance's control group. Told 2 it would move itself into one of its own, if there is one, and fail
    // where no v2 is mounted; told 1, and of no group, it leaves them alone.
    option("--cgroup-version", "1".to_owned());
    if jailer.new_pid_ns {
        args.push("--new-pid-ns".into());
    }
    if jailer.daemonize {
        args.push("--daemonize".into());
    }
    args.extend(["--"].into_iter().chain(VMM_ARGS).map(str::to_owned));
    args
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_jailer_is_told_everything_in_its_own_words() {
        let id: InstanceId = "i-0000002a".parse().unwrap();
        let (run_dir, program) = (Path::new("/data/vms/i-0000002a"), Path::new("/usr/bin/firecracker"));
        let plain = JailerSettings::new("/usr/bin/jailer".into(), 1000, 1001);
        let paths = Paths::new(&id, run_dir.to_owned(), program, Some(&plain), None);
        assert_eq!(paths.dir(), Path::new("/data/vms/i-0000002a/firecracker/i-0000002a/root"));
        let said = jailer_args(&id, run_dir, program, &plain, None).join(" ");
        assert_eq!(
            said,
            "--id i-0000002a --exec-file /usr/bin/firecracker --uid 1000 --gid 1001 --chroot-base-dir \
             /data/vms/i-0000002a --cgroup-version 1 -- --api-sock api.sock \
             --log-path vmm.log --level Warning --show-level"
        );
        let full = JailerSettings {
            chroot_base: Some("/srv/jailer".into()),
            new_pid_ns: true,
            daemonize: true,
            ..plain
        };
        assert_eq!(
            Paths::new(&id, run_dir.to_owned(), program, Some(&full), None).dir(),
            Path::new("/srv/jailer/firecracker/i-0000002a/root")
        );
        let said = jailer_args(&id, run_dir, program, &full, None).join(" ");
        let rest = "--chroot-base-dir /srv/jailer --cgroup-version 1 --new-pid-ns --daemonize -- --api-sock api.sock ";
        assert!(said.contains(rest), "{said}");
    }
}
