//! Which development cluster has the tenants' networks of this machine.
//!
//! Bridges are named by tenants' numbers, and an agent removes those that it has no tenant for: two agents in one network
//! namespace would take each other's away. So one cluster at a time claims a namespace, until `mvm dev down`; an agent that was
//! started otherwise is known by its bridges.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Forgotten when the machine boots, as links are.
const CLAIMS: &str = "/run/mvm/dev";

/// How all bridges of tenants are called.
const BRIDGES: &str = "br-tenant-";

/// Claims the networks for the cluster in `dir`. Gives the reason why it can't have them, for people.
pub(super) fn claim(dir: &Path) -> anyhow::Result<Option<String>> {
    let claims = Path::new(CLAIMS);
    fs::create_dir_all(claims)?;
    let lock = File::open(claims)?;
    lock.lock()?;
    let (file, holder) = holder(claims)?;
    let bridges = nix::net::if_::if_nameindex()?;
    let bridges = bridges.iter().any(|link| link.name().to_bytes().starts_with(BRIDGES.as_bytes()));
    let refused = refused(dir, holder.as_deref(), bridges);
    if refused.is_none() {
        mvm_pki::files::write_private(file, dir.as_os_str().as_encoded_bytes())?;
    }
    Ok(refused)
}

/// Gives up what `dir` has claimed, in whatever namespace.
pub(super) fn release(dir: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(CLAIMS) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    let lock = File::open(CLAIMS)?;
    lock.lock()?;
    for entry in entries {
        let path = entry?.path();
        if read(&path)?.as_deref() == Some(dir) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// The file of this process's network namespace, and the cluster that it names, if that is still there.
fn holder(claims: &Path) -> io::Result<(PathBuf, Option<PathBuf>)> {
    let namespace = fs::metadata("/proc/self/ns/net")?.ino();
    let file = claims.join(format!("network-{namespace}"));
    let holder = read(&file)?.filter(|dir| dir.join("dev.json").exists());
    Ok((file, holder))
}

fn read(file: &Path) -> io::Result<Option<PathBuf>> {
    match fs::read_to_string(file) {
        Ok(text) => Ok(Some(text.into())),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(cause),
    }
}

/// `bridges`: whether there are any of tenants.
fn refused(dir: &Path, holder: Option<&Path>, bridges: bool) -> Option<String> {
    match holder {
        Some(holder) if holder == dir => None,
        Some(holder) => {
            let holder = holder.display();
            Some(format!(
                "the cluster in {holder} has the tenants' networks; to have them here: mvm dev down --dir {holder}"
            ))
        }
        None if bridges => Some(format!(
            "an agent of this machine has tenants' networks ({BRIDGES}...); to have them here, stop it and remove them"
        )),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_cluster_has_the_networks_and_those_of_another_agent_are_left_alone() {
        let (dir, other) = (Path::new("/a"), Path::new("/b"));
        assert_eq!(refused(dir, None, false), None);
        assert_eq!(refused(dir, Some(dir), true), None);
        assert!(refused(dir, Some(other), false).unwrap().contains("mvm dev down --dir /b"));
        assert!(refused(dir, None, true).unwrap().contains("br-tenant-"));
    }
}
