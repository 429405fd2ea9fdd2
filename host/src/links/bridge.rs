//! A tenant's bridge: made, mended, removed.

use rtnetlink::packet_route::link::BridgeStpState;
use rtnetlink::{LinkBridge, LinkMessageBuilder, LinkUnspec};

use super::observed::{Kind, Link};
use super::{LinkError, Links, ObservedBridge, ROUNDS, Repair, bridge_repairs, pause, settings};
use crate::network::{Mac, TenantNet, bridge_name};

impl Links {
    /// Makes the tenant's bridge what it should be. What was wrong with it; empty when nothing was.
    pub async fn ensure_bridge(&self, net: &TenantNet) -> Result<Vec<Repair>, LinkError> {
        let mut reported = None;
        let mut left = Vec::new();
        for round in 0..ROUNDS {
            let found = self.our_bridge(net).await?;
            left = bridge_repairs(found.as_ref(), net);
            if left.is_empty() {
                return Ok(reported.unwrap_or_default());
            }
            reported.get_or_insert_with(|| left.clone());
            match self.mend_bridge(found.as_ref(), net, &left).await {
                Err(error) if error.is_contention() && round + 1 < ROUNDS => pause(round).await,
                other => other?,
            }
        }
        Err(LinkError::Unsettled { name: net.bridge(), left })
    }

    /// Removes the bridge of this network if it is ours; whether there was one. TAPs in it stay, in no bridge.
    pub async fn remove_bridge(&self, net_id: u16) -> Result<bool, LinkError> {
        let name = bridge_name(net_id);
        match self.find(&name).await? {
            Some(link) if link.is_ours() && link.kind == Kind::Bridge => self.delete(link.index, &name).await,
            Some(link) if left_half_made(&link, net_id) => self.delete(link.index, &name).await,
            _ => Ok(false),
        }
    }

    /// The bridge of this network, if there is one; anything else under its name is an error.
    pub(super) async fn our_bridge(&self, net: &TenantNet) -> Result<Option<ObservedBridge>, LinkError> {
        let name = net.bridge();
        let Some(link) = self.find(&name).await? else { return Ok(None) };
        let foreign = |why: &str| LinkError::Foreign { name: name.clone(), why: why.to_owned() };
        match link.alias.as_deref() {
            _ if !link.is_ours() && !left_half_made(&link, net.net_id) => {
                return Err(foreign("it lacks our alias"));
            }
            Some(alias) if alias != net.alias() => {
                let (owner, wanted) = (alias.to_owned(), net.alias());
                return Err(LinkError::Taken { name, owner, wanted });
            }
            _ => {}
        }
        let addresses = self.addresses(link.index).await?;
        link.into_bridge(addresses).map(Some).ok_or_else(|| foreign("it is no bridge"))
    }

    async fn mend_bridge(
        &self,
        found: Option<&ObservedBridge>,
        net: &TenantNet,
        repairs: &[Repair],
    ) -> Result<(), LinkError> {
        let name = net.bridge();
        let Some(found) = found else {
            // The hardware address comes with the bridge, the alias after it: the address is what tells a bridge that
            // we left half made from another program's.
            let address = Mac::of(net.net_id, 1).0.to_vec();
            return self.create(&name, plain(LinkBridge::new(&name)).address(address).build()).await;
        };
        let this = || LinkUnspec::new_with_index(found.index);
        for repair in repairs {
            match repair {
                Repair::Untagged => {
                    self.change(&format!("tag {name}"), this().alias(net.alias()).build()).await?;
                }
                Repair::Renamed { .. } => {
                    let what = format!("rename {} to {name}", found.name);
                    self.change(&what, this().name(&name).build()).await?;
                }
                Repair::Unmarked => self.mark(found.index, &name).await?,
                Repair::Down => self.change(&format!("start {name}"), this().up().build()).await?,
                Repair::Mtu { .. } => {
                    self.change(&format!("set the MTU of {name}"), this().mtu(net.mtu.into()).build())
                        .await?;
                }
                Repair::Mac { .. } => {
                    let address = Mac::of(net.net_id, 1).0.to_vec();
                    let what = format!("set the hardware address of {name}");
                    self.change(&what, this().address(address).build()).await?;
                }
                Repair::BridgeOptions => {
                    let what = format!("set the options of {name}");
                    let bridge = || LinkBridge::new(&name).index(found.index);
                    // The kernel allows no delay of 0 while there is a spanning tree, and looks at the delay first.
                    let flat = bridge().stp_state(BridgeStpState::Disabled);
                    self.change(&what, flat.build()).await?;
                    self.change(&what, plain(bridge()).build()).await?;
                }
                Repair::Setting { name: setting, .. } => {
                    settings::mend(&name, setting, &settings::BRIDGE_SETTINGS)?;
                }
                Repair::ForeignAddress { .. } => {
                    self.keep_address(found.index, (net.subnet.gateway(), net.subnet.prefix())).await?;
                }
                Repair::AddressMissing => {
                    self.add_address(found.index, (net.subnet.gateway(), net.subnet.prefix())).await?;
                }
                // Of TAPs alone, or done above.
                Repair::Missing
                | Repair::Master { .. }
                | Repair::PortFlags { .. }
                | Repair::ForwardingEntry
                | Repair::Owner { .. } => {}
            }
        }
        Ok(())
    }
}

/// A bridge that we made and were ended before we could tag it: no other program uses this hardware address.
fn left_half_made(link: &Link, net_id: u16) -> bool {
    link.kind == Kind::Bridge && link.alias.is_none() && link.mac == Some(Mac::of(net_id, 1))
}

/// Forwards from the first frame on, without a spanning tree for guests to take part in.
fn plain(bridge: LinkMessageBuilder<LinkBridge>) -> LinkMessageBuilder<LinkBridge> {
    bridge.stp_state(BridgeStpState::Disabled).forward_delay(0).mcast_snooping(false)
}
