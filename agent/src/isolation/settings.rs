//! The operator's settings for isolation: network mode, cgroups, jails.

use std::fmt;
use std::str::FromStr;

use mvm_host::cgroup::{CgroupSettings, Mode};
use mvm_host::network::AddressRange;
use mvm_vmm::DriverKind;

/// How instances are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkMode {
    /// One bridge per tenant behind a firewall, one card per instance.
    Bridges,
    /// No card at all: a guest is reached by its agent's channel only.
    None,
}

/// What happens where the machine can't hold a bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// Nothing is started without it.
    Required,
    /// What can be held is, and a condition tells the rest.
    BestEffort,
    None,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("must be one of {0}")]
pub struct UnknownMode(&'static str);

impl NetworkMode {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Bridges => "bridges",
            Self::None => "none",
        }
    }
}

impl FromStr for NetworkMode {
    type Err = UnknownMode;
    fn from_str(text: &str) -> Result<Self, UnknownMode> {
        let known = [Self::Bridges, Self::None].into_iter().find(|mode| mode.as_str() == text);
        known.ok_or(UnknownMode("bridges and none"))
    }
}

impl fmt::Display for NetworkMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Effort {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Required => "required",
            Self::BestEffort => "best-effort",
            Self::None => "none",
        }
    }
}

impl FromStr for Effort {
    type Err = UnknownMode;
    fn from_str(text: &str) -> Result<Self, UnknownMode> {
        let all = [Self::Required, Self::BestEffort, Self::None];
        all.into_iter()
            .find(|effort| effort.as_str() == text)
            .ok_or(UnknownMode("required, best-effort and none"))
    }
}

impl fmt::Display for Effort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The operator's word; what is absent follows from the driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IsolationFlags {
    pub network: Option<NetworkMode>,
    pub cgroups: Option<Effort>,
    pub jail: Option<Effort>,
    /// See [`IsolationSettings::gateway_dns`].
    pub gateway_dns: bool,
    /// See [`IsolationSettings::deny`].
    pub deny: Vec<AddressRange>,
}

/// What instances of a node are kept within.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IsolationSettings {
    pub network: NetworkMode,
    pub cgroups: Effort,
    pub jail: Effort,
    /// Whether tenants may ask port 53 of their own gateway, where an operator runs a resolver.
    pub gateway_dns: bool,
    /// What no tenant reaches, besides private ranges and the metadata services that are known.
    pub deny: Vec<AddressRange>,
}

impl IsolationSettings {
    /// Nothing at all: for guests that are not real.
    pub const NONE: Self = Self {
        network: NetworkMode::None,
        cgroups: Effort::None,
        jail: Effort::None,
        gateway_dns: false,
        deny: Vec::new(),
    };

    /// Which parts of it need root.
    #[must_use]
    pub fn needs_root(&self) -> Option<&'static str> {
        match self {
            Self { network: NetworkMode::Bridges, .. } => Some("bridges and a firewall"),
            Self { cgroups: Effort::Required, .. } => Some("control groups"),
            Self { jail: Effort::Required, .. } => Some("jails for VMMs"),
            _ => None,
        }
    }

    /// Everything, for guests that are.
    pub const ALL: Self = Self {
        network: NetworkMode::Bridges,
        cgroups: Effort::Required,
        jail: Effort::Required,
        gateway_dns: false,
        deny: Vec::new(),
    };
}

impl IsolationFlags {
    /// How control groups are opened. Whether any are made depends on the driver, too.
    #[must_use]
    pub fn groups(&self) -> CgroupSettings {
        let mode = if self.cgroups == Some(Effort::BestEffort) { Mode::BestEffort } else { Mode::Required };
        CgroupSettings { mode, ..CgroupSettings::default() }
    }

    /// A driver whose guests are real gets all there is; who wants less says so.
    #[must_use]
    pub fn with(&self, driver: DriverKind) -> IsolationSettings {
        let usual = match driver {
            DriverKind::Fake => IsolationSettings::NONE,
            DriverKind::Qemu | DriverKind::Firecracker => IsolationSettings::ALL,
        };
        IsolationSettings {
            network: self.network.unwrap_or(usual.network),
            cgroups: self.cgroups.unwrap_or(usual.cgroups),
            jail: self.jail.unwrap_or(usual.jail),
            gateway_dns: self.gateway_dns,
            deny: self.deny.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn real_guests_are_kept_within_everything_unless_someone_says_otherwise() {
        let flags = IsolationFlags::default();
        assert_eq!(flags.with(DriverKind::Qemu), IsolationSettings::ALL);
        assert_eq!(flags.with(DriverKind::Fake), IsolationSettings::NONE);
        let less =
            IsolationFlags { cgroups: Some(Effort::BestEffort), ..flags }.with(DriverKind::Firecracker);
        assert_eq!(less, IsolationSettings { cgroups: Effort::BestEffort, ..IsolationSettings::ALL });
        for effort in [Effort::Required, Effort::BestEffort, Effort::None] {
            assert_eq!(effort.to_string().parse(), Ok(effort));
        }
        assert!("off".parse::<Effort>().is_err());
    }
}
