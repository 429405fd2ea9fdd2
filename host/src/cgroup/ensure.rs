//! Makes groups and their limits what they should be, as often as it is asked.

use mvm_proto::{PoolId, TenantId};

use super::error::{CgroupError, failed};
use super::file::{self, Applied};
use super::group::{Group, InstanceGroup, Repair};
use super::limits::{InstanceLimits, Setting, TenantLimits};
use super::{Cgroups, Tree, hierarchy};

impl Cgroups {
    /// A tenant's group with its quota. Also looks after the groups above it, which others may have changed.
    pub fn ensure_tenant(
        &self,
        tenant: &TenantId,
        limits: &TenantLimits,
    ) -> Result<Vec<Repair>, CgroupError> {
        let Some(tree) = &self.tree else { return Ok(Vec::new()) };
        let mut lost = Vec::new();
        let (_, changed) = hierarchy::delegate(&tree.mount, &tree.below, &tree.controllers, &mut lost)?;
        self.do_without_all(lost)?;
        let mut repairs: Vec<_> = changed.then_some(Repair::HandedDown { group: None }).into_iter().collect();
        self.ensure(tree, &Group::Tenant(tenant.clone()), &limits.settings(), true, &mut repairs)?;
        Ok(repairs)
    }

    /// A pool's group. It has no limits: instances have their own, and together they have their tenant's.
    pub fn ensure_pool(&self, tenant: &TenantId, pool: &PoolId) -> Result<Vec<Repair>, CgroupError> {
        let Some(tree) = &self.tree else { return Ok(Vec::new()) };
        if !tree.directory(&Group::Tenant(tenant.clone())).is_dir() {
            return Err(CgroupError::TenantMissing(tenant.to_string()));
        }
        let mut repairs = Vec::new();
        self.ensure(tree, &Group::Pool(tenant.clone(), pool.clone()), &[], true, &mut repairs)?;
        Ok(repairs)
    }

    /// An instance's group with its limits, and its pool's. Its tenant's must be there: without the quota above it,
    /// nothing may start.
    pub fn ensure_instance(
        &self,
        instance: &InstanceGroup,
        limits: &InstanceLimits,
    ) -> Result<Vec<Repair>, CgroupError> {
        let Some(tree) = &self.tree else { return Ok(Vec::new()) };
        let mut repairs = self.ensure_pool(&instance.tenant, &instance.pool)?;
        self.ensure(tree, &instance.clone().into(), &limits.settings(), false, &mut repairs)?;
        // The limits of a group that was just made are no repair.
        let mut changed = Vec::new();
        self.hold_io(tree, instance, limits.io.as_ref(), &mut changed)?;
        if !repairs.iter().any(|repair| *repair == Repair::Made { group: instance.clone().into() }) {
            repairs.append(&mut changed);
        }
        Ok(repairs)
    }

    fn ensure(
        &self,
        tree: &Tree,
        group: &Group,
        settings: &[Setting],
        hands_down: bool,
        repairs: &mut Vec<Repair>,
    ) -> Result<(), CgroupError> {
        let (directory, name) = (tree.directory(group), group.to_string());
        let made = file::make_group(&directory).map_err(failed(format!("make the group {name}")))?;
        if made {
            repairs.push(Repair::Made { group: group.clone() });
        }
        for setting in settings {
            if !tree.controllers.contains(setting.controller()) {
                // It was told when the hierarchy was opened.
                continue;
            }
            match file::apply(&directory, &name, setting, self.page_size) {
                Ok(Applied::Changed { from }) if !made => repairs.push(Repair::Set {
                    group: group.clone(),
                    file: setting.file.to_owned(),
                    from,
                    to: setting.value.clone(),
                }),
                Ok(_) => {}
                Err(cause) => self.do_without(cause)?,
            }
        }
        if hands_down {
            let (added, refused) = hierarchy::hand_down(&directory, &tree.controllers)
                .map_err(failed(format!("hand controllers down from {name}")))?;
            if !added.is_empty() && !made {
                repairs.push(Repair::HandedDown { group: Some(group.clone()) });
            }
            let lost = refused.into_iter().map(|(controller, cause)| CgroupError::NotDelegated {
                controllers: vec![controller],
                group: directory.clone(),
                cause,
            });
            self.do_without_all(lost.collect())?;
        }
        Ok(())
    }
}
