//! The operator of a cluster of real processes: a gRPC client with the operator's certificate.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use mvm_client::{Channel, ControlClient, Objects};
use mvm_proto::control::PushStage;
use mvm_proto::wire::control::v1::PushRequest;
use mvm_tests::Cluster;

/// For connecting, and for a node to accept what was pushed: a healthy machine needs milliseconds.
const LIMIT: Duration = Duration::from_secs(30);

pub async fn connect(cluster: &Cluster) -> Result<ControlClient> {
    Ok(mvm_client::control(open(cluster).await?))
}

/// The client of declared objects, on a connection of its own.
pub async fn objects(cluster: &Cluster) -> Result<Objects> {
    Ok(Objects::new(open(cluster).await?))
}

/// A connection of its own.
pub async fn open(cluster: &Cluster) -> Result<Channel> {
    Ok(cluster.channel().await)
}

/// When the operator heard of each stage, counted from the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pushed {
    /// Durable at the coordinator.
    pub stored: Duration,
    /// Durable at the node.
    pub accepted: Duration,
}

/// Pushes, and returns once the node has said that the document is durable with it.
pub async fn push(client: &mut ControlClient, node: &str, document: Vec<u8>) -> Result<Pushed> {
    let begun = Instant::now();
    let mut stored = None;
    let wait_seconds = u32::try_from(LIMIT.as_secs())?;
    let request = PushRequest { document, node_id: node.to_owned(), dry_run: false, wait_seconds };
    let accepted = async {
        let mut stages = client.push(request).await?.into_inner();
        while let Some(progress) = stages.message().await? {
            match progress.known_stage() {
                Some(PushStage::Stored) => stored = Some(begun.elapsed()),
                Some(PushStage::Accepted | PushStage::Converged) => {
                    let accepted = begun.elapsed();
                    return Ok(Pushed { stored: stored.unwrap_or(accepted), accepted });
                }
                Some(PushStage::Refused) => {
                    bail!("{node} refused: {}", String::from_utf8_lossy(&progress.problem))
                }
                _ => {}
            }
        }
        bail!("the push ended before {node} accepted")
    };
    tokio::time::timeout(LIMIT, accepted).await.with_context(|| format!("{node} did not accept in time"))?
}
