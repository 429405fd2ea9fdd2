//! Which group: a tenant's, a pool's or an instance's. The path says whose it is, so that whatever is found can be
//! traced to its owner or swept.

use std::fmt;
use std::path::PathBuf;

use mvm_proto::{InstanceId, PoolId, TenantId};
use serde::{Deserialize, Serialize};

/// An instance with all that is above it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct InstanceGroup {
    pub tenant: TenantId,
    pub pool: PoolId,
    pub instance: InstanceId,
}

/// One group of ours. Ids can't hold a slash or be `..`, so a path of them stays where it should.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    Tenant(TenantId),
    Pool(TenantId, PoolId),
    Instance(InstanceGroup),
}

impl Group {
    /// Below the topmost group of ours.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.to_string().into()
    }

    /// The group of this name in `parent`, or at the top of ours; none when it is no id, or nothing of ours is there.
    #[must_use]
    pub fn child(parent: Option<&Self>, name: &str) -> Option<Self> {
        match parent {
            None => name.parse().ok().map(Self::Tenant),
            Some(Self::Tenant(tenant)) => Some(Self::Pool(tenant.clone(), name.parse().ok()?)),
            Some(Self::Pool(tenant, pool)) => {
                let (tenant, pool, instance) = (tenant.clone(), pool.clone(), name.parse().ok()?);
                Some(Self::Instance(InstanceGroup { tenant, pool, instance }))
            }
            Some(Self::Instance(_)) => None,
        }
    }

    #[must_use]
    pub fn tenant(&self) -> &TenantId {
        match self {
            Self::Tenant(tenant) | Self::Pool(tenant, _) => tenant,
            Self::Instance(instance) => &instance.tenant,
        }
    }
}

impl From<InstanceGroup> for Group {
    fn from(instance: InstanceGroup) -> Self {
        Self::Instance(instance)
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tenant(tenant) => write!(f, "{tenant}"),
            Self::Pool(tenant, pool) => write!(f, "{tenant}/{pool}"),
            Self::Instance(instance) => instance.fmt(f),
        }
    }
}

impl fmt::Display for InstanceGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.tenant, self.pool, self.instance)
    }
}

/// What was put right on the way to what should be. Nothing is told of a group that is new but that it was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Repair {
    Made {
        group: Group,
    },
    /// A file held something else: someone, or a kernel that forgot, changed it.
    Set {
        group: Group,
        file: String,
        from: String,
        to: String,
    },
    /// Controllers had not been handed down to, or by, this group; none is the topmost of ours.
    HandedDown {
        group: Option<Group>,
    },
}
