//! An instance's TAP: made, mended, opened, handed to its VMM, removed.

use std::io;
use std::os::fd::OwnedFd;

use rtnetlink::{LinkBridgePort, LinkUnspec};

use super::observed::Kind;
use super::repair::wanted_port;
use super::{
    LinkError, Links, ObservedTap, ROUNDS, Repair, Stray, pause, settings, tap_mac, tap_repairs, tun,
};
use crate::network::{Port, TenantNet, place_of_tap};

impl Links {
    /// Makes the instance's TAP what it should be, in the bridge of its tenant, which must be there. A new one is down,
    /// and so is one that was renamed or in another bridge: [`Links::open_tap`] follows once the firewall knows it.
    /// What was wrong with it; empty when nothing was.
    pub async fn ensure_tap(&self, port: &Port, net: &TenantNet) -> Result<Vec<Repair>, LinkError> {
        if (port.net_id, &port.tenant) != (net.net_id, &net.tenant) {
            let what =
                format!("{} is of tenant {}, not in the network of {}", port.tap(), port.tenant, net.tenant);
            return Err(LinkError::Refused(what));
        }
        let mut reported = None;
        let mut left = Vec::new();
        for round in 0..ROUNDS {
            let bridge = self.our_bridge(net).await?.filter(|bridge| bridge.name == net.bridge());
            let bridge = bridge.ok_or_else(|| LinkError::Missing { name: net.bridge() })?.index;
            let Some(found) = self.our_tap(port, bridge, round).await? else {
                pause(round).await;
                continue;
            };
            left = tap_repairs(found.as_ref(), port, net, bridge);
            if left.is_empty() {
                return Ok(reported.unwrap_or_default());
            }
            reported.get_or_insert_with(|| left.clone());
            let mended = match &found {
                None => self.make_tap(port).await,
                Some(found) => self.mend_tap(found, port, net, bridge, &left).await,
            };
            match mended {
                Err(error) if error.is_contention() && round + 1 < ROUNDS => pause(round).await,
                other => other?,
            }
        }
        Err(LinkError::Unsettled { name: port.tap(), left })
    }

    /// Sets a TAP up; one that is up is done.
    pub async fn open_tap(&self, name: &str) -> Result<(), LinkError> {
        let tap = self.named_tap(name).await?;
        if tap.master.is_none() {
            return Err(LinkError::Refused(format!(
                "{name} is in no bridge; it is opened once it is in its tenant's"
            )));
        }
        if tap.up {
            return Ok(());
        }
        self.change(&format!("open {name}"), LinkUnspec::new_with_index(tap.index).up().build()).await
    }

    /// The VMM's end of a TAP, not blocking and closed on exec unless the caller arranges otherwise. There is one at a
    /// time: while a VMM has it, others are refused.
    pub async fn attach_tap(&self, name: &str) -> Result<OwnedFd, LinkError> {
        let before = self.named_tap(name).await?;
        let end = tun::attach(name).map_err(failed("attach to", name))?;
        // Had it been removed in between, this would be a new one, which goes as its descriptor is closed.
        let after = self.named_tap(name).await?;
        if after.index == before.index { Ok(end) } else { Err(LinkError::Missing { name: name.to_owned() }) }
    }

    /// Removes a TAP if it is ours, also from under a VMM that has it; whether there was one.
    pub async fn remove_tap(&self, name: &str) -> Result<bool, LinkError> {
        if place_of_tap(name).is_none() {
            return Err(LinkError::Refused(format!("{name:?} is not a TAP's name")));
        }
        match self.find(name).await? {
            Some(link) if link.is_ours() && link.kind == Kind::Tap => self.delete(link.index, name).await,
            _ => Ok(false),
        }
    }

    /// Removes a link of ours that belongs to nothing; whether it was still there, and still ours.
    pub async fn remove_stray(&self, stray: &Stray) -> Result<bool, LinkError> {
        match self.find(&stray.name).await? {
            Some(link) if link.index == stray.index && link.is_ours() => {
                self.delete(link.index, &stray.name).await
            }
            _ => Ok(false),
        }
    }

    /// The TAP of this name, under this name.
    async fn named_tap(&self, name: &str) -> Result<ObservedTap, LinkError> {
        let missing = || LinkError::Missing { name: name.to_owned() };
        let foreign = || LinkError::Foreign { name: name.to_owned(), why: "it lacks our alias".to_owned() };
        let link = self.find(name).await?.filter(|link| link.name == name).ok_or_else(missing)?;
        if link.is_ours() { link.into_tap().ok_or_else(foreign) } else { Err(foreign()) }
    }

    /// The port's TAP, if there is one, with what the bridge thinks of it. Nothing is known while another program is
    /// making it; anything else under its name is an error.
    async fn our_tap(
        &self,
        port: &Port,
        bridge: u32,
        round: u32,
    ) -> Result<Option<Option<ObservedTap>>, LinkError> {
        let name = port.tap();
        let Some(link) = self.find(&name).await? else { return Ok(Some(None)) };
        let foreign = |why: &str| LinkError::Foreign { name: name.clone(), why: why.to_owned() };
        if link.is_tap_in_the_making() && round + 1 < ROUNDS {
            return Ok(None);
        }
        if !link.is_ours() {
            return Err(foreign("it lacks our alias"));
        }
        if let Some(alias) = link.alias.as_ref().filter(|alias| **alias != port.alias()) {
            let (owner, wanted) = (alias.to_owned(), port.alias());
            return Err(LinkError::Taken { name, owner, wanted });
        }
        let mut tap = link.into_tap().ok_or_else(|| foreign("it is no TAP"))?;
        if tap.master == Some(bridge) {
            tap.forwarding_entry = Some(self.has_forwarding_entry(tap.index, port.mac()).await?);
        }
        Ok(Some(Some(tap)))
    }

    /// A TAP that has its owner and its alias before it is kept: whatever ends us on the way leaves nothing behind.
    async fn make_tap(&self, port: &Port) -> Result<(), LinkError> {
        let name = port.tap();
        let end = tun::create(&name).map_err(failed("make", &name))?;
        tun::set_owner(&end, port.owner_uid).map_err(failed("set the owner of", &name))?;
        let message =
            LinkUnspec::new_with_name(&name).address(tap_mac(port.mac()).0.to_vec()).alias(port.alias());
        self.change(&format!("tag {name}"), message.build()).await?;
        tun::keep(&end).map_err(failed("keep", &name))
    }

    async fn mend_tap(
        &self,
        found: &ObservedTap,
        port: &Port,
        net: &TenantNet,
        bridge: u32,
        repairs: &[Repair],
    ) -> Result<(), LinkError> {
        let name = port.tap();
        let this = || LinkUnspec::new_with_index(found.index);
        let misplaced = |repair: &Repair| matches!(repair, Repair::Renamed { .. } | Repair::Master { .. });
        if found.up && repairs.iter().any(misplaced) {
            // Rules go by its name and by its bridge: until both are right nothing may pass.
            self.change(&format!("close {}", found.name), this().down().build()).await?;
        }
        for repair in repairs {
            match repair {
                Repair::Renamed { .. } => {
                    let what = format!("rename {} to {name}", found.name);
                    self.change(&what, this().name(&name).build()).await?;
                }
                Repair::Unmarked => self.mark(found.index, &name).await?,
                Repair::Mtu { .. } => {
                    self.change(&format!("set the MTU of {name}"), this().mtu(net.mtu.into()).build())
                        .await?;
                }
                Repair::Mac { .. } => {
                    let message = this().address(tap_mac(port.mac()).0.to_vec()).build();
                    self.change(&format!("set the hardware address of {name}"), message).await?;
                }
                Repair::Owner { .. } => {
                    // Refused while a VMM has it: then it is the VMM that must go first.
                    let end = tun::attach(&name).map_err(failed("attach to", &name))?;
                    tun::set_owner(&end, port.owner_uid).map_err(failed("set the owner of", &name))?;
                }
                Repair::Setting { name: setting, .. } => {
                    settings::mend(&name, setting, &settings::TAP_SETTINGS)?;
                }
                Repair::Master { .. } => {
                    let message = this().controller(bridge).build();
                    self.change(&format!("put {name} into {}", net.bridge()), message).await?;
                    self.set_port_flags(found.index, net).await?;
                    self.add_forwarding_entry(found.index, port.mac()).await?;
                }
                Repair::PortFlags { .. } => self.set_port_flags(found.index, net).await?,
                Repair::ForwardingEntry => self.add_forwarding_entry(found.index, port.mac()).await?,
                // Of bridges alone; or, for these three, done when it was made and never since.
                Repair::Missing
                | Repair::Untagged
                | Repair::Down
                | Repair::ForeignAddress { .. }
                | Repair::AddressMissing
                | Repair::BridgeOptions => {}
            }
        }
        Ok(())
    }

    async fn set_port_flags(&self, index: u32, net: &TenantNet) -> Result<(), LinkError> {
        let wanted = wanted_port(net);
        let message = LinkBridgePort::new(index)
            .isolated(wanted.isolated)
            .learning(wanted.learning)
            .flood(wanted.unicast_flood)
            .hairpin(wanted.hairpin)
            .locked(wanted.locked == Some(true));
        self.change(&format!("set the port flags of link {index}"), message.build()).await
    }
}

fn failed(attempt: &str, name: &str) -> impl FnOnce(io::Error) -> LinkError {
    let attempt = format!("{attempt} {name}");
    move |cause| LinkError::Io { attempt, cause }
}
