//! A node of the crash table and of other faults: it obeys what it is sent at once, as far as that lets it, says so, and comes back to
//! whichever coordinator runs.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use mvm_planner::revision_of;
use mvm_proto::status::{Capacity, Counts, Feature, Mark, NodeInfo, NodeStatus, PoolStatus};
use mvm_proto::wire::session::v1::{
    SecretsBundle, SecretsPiece, SecretsWanted, Stage, agent_frame, coordinator_frame,
};
use mvm_proto::{DesiredState, Digest};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::support::{Node, Session, now};

/// What a node has and was sent.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    pub(crate) mark: Option<Mark>,
    pub(crate) desired: Option<DesiredState>,
    /// What it says beside its pools, for the operation that is about that.
    pub(crate) said: String,
    /// Its agent knows no grants: it replaces what is of an older revision whatever its document says.
    is_older: bool,
    /// Of which revision its instances of each pool are.
    has: BTreeMap<(String, String), Digest>,
    /// The content of every document by its numbers.
    numbered: BTreeMap<(u64, u64), String>,
    /// The bundles of secrets that it was given, and what has come of others.
    bundles: BTreeMap<String, Vec<u8>>,
    incoming: BTreeMap<String, Vec<u8>>,
}

impl Heard {
    /// Notes a document; one number is of one content.
    pub(crate) fn note(&mut self, mark: &Mark) {
        let had = self.numbered.insert((mark.epoch, mark.generation), mark.digest.clone());
        assert!(had.is_none_or(|had| had == mark.digest), "{mark:?} had another content before");
    }

    /// What its document lets it do to its instances is done.
    fn obey(&mut self) {
        let mut had = std::mem::take(&mut self.has);
        for (tenant, pool) in self.desired.iter().flat_map(DesiredState::pools) {
            let key = (tenant.tenant_id.to_string(), pool.pool_id.to_string());
            let may_roll = self.is_older || pool.update.is_none_or(|update| update.may_roll());
            let revision = had.remove(&key).filter(|_| !may_roll);
            self.has.insert(key, revision.unwrap_or_else(|| revision_of(tenant, pool)));
        }
    }

    /// What it says of each pool.
    fn pools(&self) -> Vec<PoolStatus> {
        let pools = self.desired.iter().flat_map(DesiredState::pools);
        let told = pools.map(|(tenant, pool)| {
            let key = (tenant.tenant_id.to_string(), pool.pool_id.to_string());
            let running = Counts { running: pool.desired_counts.running, ..Counts::default() };
            let is_current = self.has.get(&key) == Some(&revision_of(tenant, pool));
            PoolStatus {
                tenant_id: key.0,
                pool_id: key.1,
                actual: Some(running),
                current: Some(if is_current { running } else { Counts::default() }),
                serving: running.running,
                outdated: if is_current { 0 } else { running.running },
                ..PoolStatus::default()
            }
        });
        told.collect()
    }

    /// The bundles that its document names and that it was not given.
    fn lacking(&self) -> Vec<SecretsBundle> {
        let pools = self.desired.iter().flat_map(DesiredState::pools);
        let named = pools.filter_map(|(tenant, pool)| {
            let digest = pool.secrets_hash?.to_string();
            Some(SecretsBundle { tenant_id: tenant.tenant_id.to_string(), digest })
        });
        named.filter(|bundle| !self.bundles.contains_key(&bundle.digest)).collect()
    }

    fn take(&mut self, piece: &SecretsPiece) {
        let digest = piece.bundle.as_ref().unwrap().digest.clone();
        let bytes = self.incoming.entry(digest.clone()).or_default();
        bytes.truncate(usize::try_from(piece.offset).unwrap());
        bytes.extend_from_slice(&piece.data);
        if bytes.len() as u64 == piece.total {
            assert_eq!(Digest::of(bytes).to_string(), digest, "what was asked for");
            self.bundles.extend(self.incoming.remove_entry(&digest));
        }
    }

    /// Whether its instances are given what its document names, and the bundle that it for a pool has this value of a Secret; none where it runs no such pool.
    pub(crate) fn is_given(&self, pool: &str, secret: &str, value: &str) -> Option<bool> {
        let mut pools = self.desired.iter().flat_map(DesiredState::pools);
        let (tenant, pool) = pools.find(|(_, it)| it.pool_id.as_str() == pool)?;
        let key = (tenant.tenant_id.to_string(), pool.pool_id.to_string());
        if self.has.get(&key) != Some(&revision_of(tenant, pool)) {
            return Some(false);
        }
        let bundle = pool.secrets_hash.and_then(|digest| self.bundles.get(&digest.to_string()));
        let read = bundle.map(|bytes| serde_json::from_slice::<serde_json::Value>(bytes).unwrap());
        Some(read.is_some_and(|read| read[secret]["VALUE"] == value))
    }
}

pub(crate) struct FakeNode {
    pub(crate) id: String,
    pub(crate) heard: Arc<Mutex<Heard>>,
    say: watch::Sender<(Option<SocketAddr>, u64)>,
    task: JoinHandle<()>,
}

impl FakeNode {
    pub(crate) fn start(node: Node) -> Self {
        Self::start_with(node, Heard::default())
    }

    /// Whose agent knows no grants.
    pub(crate) fn start_older(node: Node) -> Self {
        Self::start_with(node, Heard { is_older: true, ..Heard::default() })
    }

    fn start_with(mut node: Node, heard: Heard) -> Self {
        let heard = Arc::new(Mutex::new(heard));
        let (say, mut said) = watch::channel((Some(node.address), 0));
        let (id, shared) = (node.id.clone(), Arc::clone(&heard));
        let task = tokio::spawn(async move {
            loop {
                let Some(address) = said.borrow_and_update().0 else {
                    if said.changed().await.is_err() {
                        return;
                    }
                    continue;
                };
                node.address = address;
                tokio::select! {
                    () = talk(&node, &shared, said.clone()) => {}
                    // Another coordinator runs.
                    _ = said.wait_for(|(now, _)| *now != Some(address)) => continue,
                }
                // Its session ended; it is told when there is another coordinator.
                if said.wait_for(|(now, _)| *now != Some(address)).await.is_err() {
                    return;
                }
            }
        });
        Self { id, heard, say, task }
    }

    /// Where the coordinator is now; none: there is none.
    pub(crate) fn follow(&self, address: Option<SocketAddr>) {
        self.say.send_modify(|(at, _)| *at = address);
    }

    /// Has it say its status again.
    pub(crate) fn say(&self, text: &str) {
        self.heard.lock().said = text.to_owned();
        self.say.send_modify(|(_, times)| *times += 1);
    }
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One session, until it ends.
async fn talk(node: &Node, heard: &Mutex<Heard>, mut said: watch::Receiver<(Option<SocketAddr>, u64)>) {
    let Ok(mut session) = node.dial().await else { return };
    let capacity = Capacity { vcpus: 64, mem_mib: 1 << 20, disk_mib: 1 << 20, max_instances: 1000 };
    let mut hello = node.hello(heard.lock().mark.clone());
    let features = (!heard.lock().is_older).then(|| Feature::RolloutLimits.to_string());
    hello.info = Some(NodeInfo {
        node_id: node.id.clone(),
        capacity: Some(capacity),
        features: features.into_iter().collect(),
        ..NodeInfo::default()
    });
    said.mark_unchanged();
    if !send(&mut session, agent_frame::Body::Hello(hello)).await || !report(node, heard, &mut session).await
    {
        return;
    }
    let mut again = tokio::time::interval(std::time::Duration::from_millis(50));
    loop {
        let frame = tokio::select! {
            frame = session.session.frames_in.recv() => frame,
            // What it lacks, until it comes.
            _ = again.tick() => {
                let bundles = heard.lock().lacking();
                let wanted = SecretsWanted { bundles };
                if !wanted.bundles.is_empty() && !send(&mut session, agent_frame::Body::SecretsWanted(wanted)).await {
                    return;
                }
                continue;
            }
            changed = said.changed() => {
                if changed.is_err() || !report(node, heard, &mut session).await {
                    return;
                }
                continue;
            }
        };
        let Ok(Some(frame)) = frame else { return };
        if let Some(coordinator_frame::Body::SecretsPiece(piece)) = &frame.body {
            heard.lock().take(piece);
            continue;
        }
        let Some(verified) = session.document_in(frame.body.as_ref()).await else { continue };
        let mark = crate::support::mark_of(&verified);
        {
            let mut heard = heard.lock();
            heard.note(&mark);
            // It was asked for as a whole, once after each of two deltas.
            if heard.mark.as_ref() == Some(&mark) {
                continue;
            }
            let newer = heard
                .mark
                .as_ref()
                .is_none_or(|had| (had.epoch, had.generation) < (mark.epoch, mark.generation));
            assert!(newer, "{}: {mark:?} is not above {:?}", node.id, heard.mark);
            heard.mark = Some(mark.clone());
            heard.desired = Some(verified.get().desired.clone());
            heard.obey();
        }
        for stage in [Stage::Accepted, Stage::Converged] {
            let ack = mvm_proto::wire::session::v1::Ack {
                mark: Some(mark.clone()),
                stage: stage.into(),
                ..Default::default()
            };
            let acks = mvm_proto::wire::session::v1::Acks { acks: vec![ack] };
            if !send(&mut session, agent_frame::Body::Acks(acks)).await {
                return;
            }
        }
        if !report(node, heard, &mut session).await {
            return;
        }
    }
}

async fn send(session: &mut Session, body: agent_frame::Body) -> bool {
    let frame = mvm_proto::wire::session::v1::AgentFrame { body: Some(body) };
    session.session.frames_out.send(&frame).await.is_ok()
}

/// Says that it has what its document wants.
async fn report(node: &Node, heard: &Mutex<Heard>, session: &mut Session) -> bool {
    let status = {
        let heard = heard.lock();
        let ready = mvm_proto::status::Condition {
            r#type: "Ready".to_owned(),
            status: if heard.said.is_empty() { "True" } else { "False" }.to_owned(),
            message: heard.said.clone(),
            ..Default::default()
        };
        NodeStatus {
            node_id: node.id.clone(),
            observed_at: now().to_string(),
            accepted: heard.mark.clone(),
            converged: heard.mark.clone(),
            pools: heard.pools(),
            conditions: vec![ready],
            ..NodeStatus::default()
        }
    };
    send(session, agent_frame::Body::Status(status)).await
}
