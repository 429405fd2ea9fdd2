//! Removes the firewall from a network namespace that no agent will use again: `mvm dev down`.
//!
//! An agent itself leaves its tables where they are when its last tenant goes, for the next one needs them.

use super::{claim, firewall_error};
use crate::HostError;
use crate::firewall::Firewall;
use crate::network::{net_of_bridge, place_of_tap};

/// Removes our tables from this process's network namespace. Refused while an agent keeps them, and while there is a link of a
/// tenant, which would be without a firewall then.
pub fn remove_firewall() -> Result<(), HostError> {
    let _claim = claim()?;
    let links = nix::net::if_::if_nameindex().map_err(|cause| HostError::Io {
        attempt: "list the links of this network namespace".to_owned(),
        cause: cause.into(),
    })?;
    for link in &links {
        let name = link.name().to_string_lossy();
        if net_of_bridge(&name).is_some() || place_of_tap(&name).is_some() {
            return Err(HostError::Refused(format!("{name} is a tenant's and would be without a firewall")));
        }
    }
    Firewall::open().and_then(Firewall::remove).map_err(firewall_error)
}
