//! Where a process is, read back from the kernel.

use std::fs;
use std::path::Path;

use super::error::{CgroupError, failed};
use super::{Cgroups, Group, InstanceGroup, hierarchy};

impl Cgroups {
    /// Fails unless this process is in the instance's group, or in one below it: what it was started in is not where it
    /// has to stay, and no limit holds elsewhere.
    pub fn confirm(&self, instance: &InstanceGroup, pid: u32) -> Result<(), CgroupError> {
        let Some(tree) = &self.tree else { return Ok(()) };
        let text = fs::read_to_string(self.machine.proc.join(pid.to_string()).join("cgroup"))
            .map_err(failed(format!("read the control group of process {pid}")))?;
        let wanted = Path::new("/").join(&tree.below).join(Group::from(instance.clone()).path());
        match hierarchy::own_group(&text) {
            Some(found) if found.starts_with(&wanted) => Ok(()),
            found => {
                let found = found.unwrap_or(Path::new("")).to_owned();
                Err(CgroupError::Elsewhere { instance: instance.instance.to_string(), pid, wanted, found })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use mvm_proto::InstanceId;

    use super::*;
    use crate::cgroup::{CgroupSettings, fake};

    #[test]
    fn a_process_that_left_its_group_is_told_with_where_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let (mount, pid) = (dir.path().join("cgroup"), 4711);
        for below in ["", "machine.slice", "machine.slice/mvm"] {
            fake::group(&mount.join(below), "cpu memory pids").unwrap();
        }
        let machine = fake::machine(dir.path(), "ext4").unwrap();
        let own = machine.proc.join(pid.to_string());
        fs::create_dir_all(&own).unwrap();
        let settings = CgroupSettings {
            mount: Some(mount),
            parent: Some("machine.slice".into()),
            machine,
            ..CgroupSettings::default()
        };
        let cgroups = Cgroups::open(&settings).unwrap();
        let (tenant, pool) = ("acme".parse().unwrap(), "web".parse().unwrap());
        let group = InstanceGroup { tenant, pool, instance: InstanceId::from_bits(7) };
        let group_path = "machine.slice/mvm/acme/web/i-00000007";
        for (place, is_there) in [
            (format!("0::/{group_path}\n"), true),
            (format!("12:pids:/x\n0::/{group_path}/below\n"), true),
            (format!("0::/{group_path}1\n"), false),
            (format!("4:memory:/{group_path}\n0::/firecracker\n"), false),
            (format!("4:memory:/{group_path}\n"), false),
            ("0::/\n".to_owned(), false),
        ] {
            fs::write(own.join("cgroup"), &place).unwrap();
            let confirmed = cgroups.confirm(&group, pid);
            assert_eq!(confirmed.is_ok(), is_there, "{place}: {confirmed:?}");
        }
        fs::write(own.join("cgroup"), "0::/firecracker\n").unwrap();
        let told = cgroups.confirm(&group, pid).unwrap_err().to_string();
        assert!(told.contains("/firecracker") && told.contains(group_path), "{told}");
        assert!(cgroups.confirm(&group, pid + 1).is_err(), "one that is gone is nowhere");
        Cgroups::absent("none").confirm(&group, pid).unwrap();
    }
}
