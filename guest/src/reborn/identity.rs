//! The guest's name, in the kernel and in the files that programs read.

use std::fs;
use std::io;

use crate::refusal::Refusal;

pub(super) fn take(instance: &str, hostname: &str, dns: &[String]) -> Result<(), Refusal> {
    if !hostname.is_empty() {
        rustix::system::sethostname(hostname.as_bytes())
            .map_err(|error| Refusal::io("host name", &error.into()))?;
    }
    // The files are for the convenience of programs: a root that can't be written is no reason to refuse.
    let _ = write_files(instance, hostname, dns);
    Ok(())
}

fn write_files(instance: &str, hostname: &str, dns: &[String]) -> io::Result<()> {
    fs::create_dir_all("/etc")?;
    fs::write("/etc/machine-id", format!("{:032x}\n", machine_id(instance)))?;
    if !hostname.is_empty() {
        fs::write("/etc/hostname", format!("{hostname}\n"))?;
        fs::write("/etc/hosts", format!("127.0.0.1 localhost {hostname}\n::1 localhost\n"))?;
    }
    if !dns.is_empty() {
        let lines: String = dns.iter().map(|server| format!("nameserver {server}\n")).collect();
        fs::write("/etc/resolv.conf", lines)?;
    }
    Ok(())
}

/// The same for the same instance, and another for every other: FNV-1a, which needs no library.
fn machine_id(instance: &str) -> u128 {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    instance.bytes().fold(BASIS, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_id_is_the_instances_own_and_stays() {
        assert_eq!(machine_id("i-1"), machine_id("i-1"));
        assert_ne!(machine_id("i-1"), machine_id("i-2"));
        // The published value for one letter.
        assert_eq!(machine_id("a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }
}
