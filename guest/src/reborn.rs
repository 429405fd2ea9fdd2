//! Gives this guest its identity: name, network, time, disks, and randomness that no copy of it has.
//!
//! The same request configures a guest that has just booted and one that was restored from a snapshot, possibly as another
//! instance. It is idempotent.

mod entropy;
mod identity;
mod mounts;

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use rustix::mm::{MlockAllFlags, mlockall};
use rustix::time::{ClockId, Timespec, clock_settime};

use crate::network;
use crate::protocol::Reborn;
use crate::refusal::Refusal;
use crate::settings::Machine;
use crate::state::Guest;
use crate::state::Identity;
use crate::{health, sleep, workload};

/// Less would leave copies of one snapshot with randomness that can be guessed.
const ENTROPY_BYTES: usize = 32;

/// Does beforehand what every rebirth and every sleep needs: of a fork it is done already.
pub(crate) fn get_ready(run_dir: &Path) {
    // Its own pages are there when it needs them, also where memory is short. Without the right to that they are found.
    let _ = mlockall(MlockAllFlags::CURRENT);
    let _ = entropy::device();
    identity::open_files();
    sleep::get_ready(run_dir);
}

/// Goes through what takes memory of its own in a rebirth, and changes nothing: the thread that will do it has that then.
pub(crate) fn rehearse() {
    let name = "i-00000000".to_owned();
    let request =
        Reborn { instance_id: name.clone(), hostname: name, entropy: vec![0; 64], ..Reborn::default() };
    let (_, identity) = (check(&request), Identity::of(&request));
    std::hint::black_box((identity, identity::rehearse(&request.instance_id)));
}

impl Guest {
    pub(crate) fn reborn(&self, request: &Reborn) -> Result<(), Refusal> {
        let address = check(request)?;
        let _one_at_a_time = self.0.rebirth.lock();
        {
            let state = self.lock();
            if request.generation < state.generation {
                let message = format!("generation {} is older than {}", request.generation, state.generation);
                return Err(Refusal::invalid(message));
            }
        }
        let identity = Identity::of(request);
        if self.0.settings.machine == Machine::Own {
            // Randomness first: what follows may draw some.
            entropy::reseed(&request.entropy).map_err(|error| Refusal::io("reseed", &error))?;
            set_time(request.unix_ms)?;
            let was = self.lock().identity.take();
            if was.as_ref() != Some(&identity) {
                identity::take(&request.instance_id, &request.hostname, &request.dns)?;
                mounts::mount_all(&request.mounts)?;
                if let Some((address, prefix, gateway)) = address {
                    network::configure(&request.mac, address, prefix, gateway)
                        .map_err(|error| Refusal::io("network", &error))?;
                }
            }
        }
        if let Some(set) = &request.health {
            health::set(self, set.health.clone())?;
        }
        let no_workload = {
            let mut state = self.lock();
            state.generation = state.generation.max(request.generation);
            state.env = request.env.clone();
            state.configured = true;
            state.identity = Some(identity);
            if let Some(set) = &request.workload {
                state.workload.instead.clone_from(&set.workload);
            }
            state.program().is_ok_and(|program| program.words.is_empty())
        };
        if request.start_workload || no_workload {
            workload::start(self);
        }
        Ok(())
    }
}

type Network = (Ipv4Addr, u8, Option<Ipv4Addr>);

/// All that can be wrong with the request itself, before anything is done.
fn check(request: &Reborn) -> Result<Option<Network>, Refusal> {
    if request.entropy.len() < ENTROPY_BYTES {
        return Err(Refusal::invalid(format!(
            "entropy of {} bytes; {ENTROPY_BYTES} are needed",
            request.entropy.len()
        )));
    }
    if request.hostname.len() > 64 || request.hostname.contains(['\0', '\n', ' ', '/']) {
        return Err(Refusal::invalid(format!("{:?} is no host name", request.hostname)));
    }
    if request.address.is_empty() {
        return Ok(None);
    }
    let bad = |what: &str| Refusal::invalid(format!("{what:?} is not an IPv4 address"));
    let (address, prefix) = request.address.split_once('/').ok_or_else(|| bad(&request.address))?;
    let address = address.parse().map_err(|_| bad(&request.address))?;
    let prefix = prefix.parse().ok().filter(|prefix| *prefix <= 32).ok_or_else(|| bad(&request.address))?;
    let gateway = match request.gateway.as_str() {
        "" => None,
        gateway => Some(gateway.parse().map_err(|_| bad(gateway))?),
    };
    Ok(Some((address, prefix, gateway)))
}

fn set_time(unix_ms: u64) -> Result<(), Refusal> {
    if unix_ms == 0 {
        return Ok(());
    }
    let time =
        Timespec::try_from(Duration::from_millis(unix_ms)).map_err(|_| Refusal::invalid("no such time"))?;
    clock_settime(ClockId::Realtime, time).map_err(|error| Refusal::io("clock", &error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_a_request_is_found_before_anything_is_done() {
        let good = Reborn {
            entropy: vec![0; 32],
            address: "10.0.0.3/24".into(),
            gateway: "10.0.0.1".into(),
            ..Reborn::default()
        };
        let network = (Ipv4Addr::new(10, 0, 0, 3), 24, Some(Ipv4Addr::new(10, 0, 0, 1)));
        assert_eq!(check(&good), Ok(Some(network)));
        for bad in [
            Reborn { entropy: vec![0; 31], ..good.clone() },
            Reborn { hostname: "two words".into(), ..good.clone() },
            Reborn { address: "10.0.0.3".into(), ..good.clone() },
            Reborn { address: "10.0.0.3/33".into(), ..good.clone() },
            Reborn { gateway: "router".into(), ..good },
        ] {
            assert!(check(&bad).is_err(), "{bad:?}");
        }
    }
}
