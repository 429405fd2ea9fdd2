//! Single questions and orders to the kernel, each with the words for its error and a bound on its time.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use rtnetlink::packet_core::{NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage};
use rtnetlink::packet_route::link::LinkMessage;
use rtnetlink::packet_route::neighbour::{
    NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::sys::SocketAddr;
use rustix::io::Errno;

use super::observed::{ALT_IFNAME, IFNAME, Link, ObservedLinks, sort};
use super::words::{self, Words};
use super::{LinkError, Links, mark_of};
use crate::network::Mac;

/// The kernel answers in microseconds, but has one lock for the links of all namespaces: deleting one with a thousand
/// links in it holds that for many seconds. A reply that the library can't read would be waited for forever.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);

/// An address of a link, and its length of prefix.
pub(super) type Address = (Ipv4Addr, u8);

impl Links {
    /// Everything of ours on this host. The only look that costs more the more links there are.
    pub async fn observe(&self) -> Result<ObservedLinks, LinkError> {
        let links = self.ask("list the links", words::about_all()).await?;
        let mut addresses: BTreeMap<u32, Vec<Address>> = BTreeMap::new();
        for message in self.address_messages(0).await? {
            addresses.entry(message.header.index).or_default().extend(address_of(&message));
        }
        Ok(sort(links, addresses))
    }

    /// The link with this name, or the one that was renamed from it.
    pub(super) async fn find(&self, name: &str) -> Result<Option<Link>, LinkError> {
        let what = format!("look at {name}");
        for (kind, name) in [(IFNAME, name), (ALT_IFNAME, &mark_of(name))] {
            match self.ask(&what, words::about(kind, name)).await {
                Err(error) if error.has_errno(Errno::NODEV) => {}
                Err(error) => return Err(error),
                Ok(links) => return Ok(links.into_iter().next()),
            }
        }
        Ok(None)
    }

    async fn ask(&self, attempt: &str, question: NetlinkMessage<Words>) -> Result<Vec<Link>, LinkError> {
        let asking = async {
            let kernel = SocketAddr::new(0, 0);
            let mut replies =
                self.reader.request(question, kernel).map_err(|_| rtnetlink::Error::RequestFailed)?;
            let mut links = Vec::new();
            while let Some(reply) = replies.next().await {
                match reply.payload {
                    NetlinkPayload::InnerMessage(words) => links.push(Link::read(&words)),
                    NetlinkPayload::Error(error) => return Err(rtnetlink::Error::NetlinkError(error)),
                    _ => {}
                }
            }
            Ok(links)
        };
        answer(attempt, asking).await
    }

    pub(super) async fn create(&self, name: &str, message: LinkMessage) -> Result<(), LinkError> {
        answer(&format!("make {name}"), self.handle.link().add(message).execute()).await
    }

    pub(super) async fn change(&self, what: &str, message: LinkMessage) -> Result<(), LinkError> {
        answer(what, self.handle.link().change(message).execute()).await
    }

    /// Gives a link the second name by which it is found again.
    pub(super) async fn mark(&self, index: u32, name: &str) -> Result<(), LinkError> {
        let request = self.handle.link().property_add(index).alt_ifname(&[&mark_of(name)]);
        answer(&format!("mark {name}"), request.execute()).await
    }

    /// Whether it was there.
    pub(super) async fn delete(&self, index: u32, name: &str) -> Result<bool, LinkError> {
        match answer(&format!("remove {name}"), self.handle.link().del(index).execute()).await {
            Ok(()) => Ok(true),
            Err(error) if error.has_errno(Errno::NODEV) => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn addresses(&self, index: u32) -> Result<Vec<Address>, LinkError> {
        Ok(self.address_messages(index).await?.iter().filter_map(address_of).collect())
    }

    /// Takes all addresses off a link but the one.
    pub(super) async fn keep_address(&self, index: u32, kept: Address) -> Result<(), LinkError> {
        for message in self.address_messages(index).await? {
            if address_of(&message) != Some(kept) {
                let request = self.handle.address().del(message);
                answer(&format!("remove a foreign address of link {index}"), request.execute()).await?;
            }
        }
        Ok(())
    }

    pub(super) async fn add_address(&self, index: u32, (address, prefix): Address) -> Result<(), LinkError> {
        let request = self.handle.address().add(index, IpAddr::V4(address), prefix);
        answer(&format!("give link {index} the address {address}/{prefix}"), request.execute()).await
    }

    /// The IPv4 addresses of one link, or of all when the index is 0. The kernel sorts them out; what it gives too much is
    /// dropped all the same, since what is foreign on one link is an address in use on another.
    async fn address_messages(&self, index: u32) -> Result<Vec<AddressMessage>, LinkError> {
        let mut request = self.handle.address().get();
        request.message_mut().header.family = AddressFamily::Inet;
        request.message_mut().header.index = index;
        let mut messages: Vec<AddressMessage> =
            answer("list addresses", request.execute().try_collect()).await?;
        messages.retain(|message| index == 0 || message.header.index == index);
        Ok(messages)
    }

    /// Whether the bridge of the port sends frames for `mac` there, by our order and not by what it has seen.
    pub(super) async fn has_forwarding_entry(&self, port: u32, mac: Mac) -> Result<bool, LinkError> {
        let mut question = NeighbourMessage::default();
        question.header.family = AddressFamily::Bridge;
        question.header.ifindex = port;
        question.header.flags = NeighbourFlags::Controller;
        question.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
        let mut message = NetlinkMessage::from(RouteNetlinkMessage::GetNeighbour(question));
        message.header.flags = NLM_F_REQUEST;
        let ask = async {
            let mut replies = self.handle.clone().request(message)?;
            match replies.next().await.map(|reply| reply.payload) {
                Some(NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewNeighbour(found))) => {
                    Ok(found.header.ifindex == port && found.header.state == NeighbourState::Noarp)
                }
                Some(NetlinkPayload::Error(error)) => Err(rtnetlink::Error::NetlinkError(error)),
                _ => Err(rtnetlink::Error::RequestFailed),
            }
        };
        match answer(&format!("look for {mac} in the bridge of link {port}"), ask).await {
            Err(error) if error.has_errno(Errno::NOENT) => Ok(false),
            other => other,
        }
    }

    pub(super) async fn add_forwarding_entry(&self, port: u32, mac: Mac) -> Result<(), LinkError> {
        // What the kernel calls permanent is an address of the host itself; this is one that never ages.
        let request = self.handle.neighbours().add_bridge(port, &mac.0);
        let request = request.state(NeighbourState::Noarp).flags(NeighbourFlags::Controller).replace();
        answer(&format!("send frames for {mac} to link {port}"), request.execute()).await
    }
}

fn address_of(message: &AddressMessage) -> Option<Address> {
    let local = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(IpAddr::V4(address)) => Some(*address),
        _ => None,
    });
    local.map(|address| (address, message.header.prefix_len))
}

/// Waits for the kernel's answer, for so long, and says what was asked when it is a refusal.
async fn answer<T>(
    attempt: &str,
    request: impl Future<Output = Result<T, rtnetlink::Error>>,
) -> Result<T, LinkError> {
    let cause = match tokio::time::timeout(ANSWER_DEADLINE, request).await {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(rtnetlink::Error::NetlinkError(error))) => error.to_io(),
        Ok(Err(error)) => io::Error::other(error),
        Err(_) => io::Error::new(io::ErrorKind::TimedOut, "the kernel did not answer"),
    };
    Err(LinkError::Io { attempt: attempt.to_owned(), cause })
}
