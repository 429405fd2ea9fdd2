//! A connection to a port on a guest's loopback.

use mvm_proto::InstanceId;
use mvm_proto::guest::{CHUNK_BYTES, Chunk, RelayOpen, Window, host_frame};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::call::{Call, Event};
use super::error::LinkError;
use super::{ANSWER_WITHIN, GuestLinks};

/// What is on its way between a relay and its user, each way.
const RELAY_BUFFER_BYTES: usize = 64 * 1024;

impl GuestLinks {
    /// Connects to `port`. The stream ends when either side closes, or when the link breaks.
    pub async fn relay(&self, instance: &InstanceId, port: u16) -> Result<DuplexStream, LinkError> {
        let body = host_frame::Body::RelayOpen(RelayOpen { port: u32::from(port) });
        let call = self.begin(instance, "a relay", 2, body).await?;
        let first = tokio::time::timeout(ANSWER_WITHIN, call.next()).await;
        match first.map_err(|_| LinkError::Silent(ANSWER_WITHIN))? {
            Event::Accepted => {}
            Event::Broken(error) => return Err(error),
            _ => return Err(LinkError::Unexpected),
        }
        let (ours, theirs) = tokio::io::duplex(RELAY_BUFFER_BYTES);
        tokio::spawn(pump(call, ours));
        Ok(theirs)
    }
}

async fn pump(call: Call, stream: DuplexStream) {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let inward = async {
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            let count = reader.read(&mut buffer).await.unwrap_or(0);
            let chunk = Chunk { data: buffer[..count].to_vec(), last: count == 0 };
            if call.send_piece(host_frame::Body::RelayData(chunk)).await.is_err() || count == 0 {
                return;
            }
        }
    };
    let outward = async {
        let mut read = 0u64;
        while let Event::Chunk(chunk) = call.next().await {
            if writer.write_all(&chunk.data).await.is_err() {
                return;
            }
            read += chunk.data.len() as u64;
            if chunk.last || call.send(&host_frame::Body::Window(Window { bytes: read })).is_err() {
                break;
            }
        }
        // The other end may already be gone.
        let _ = writer.shutdown().await;
    };
    // The guest's half decides: when it is done, so is the relay; our own end may come first.
    tokio::pin!(inward, outward);
    tokio::select! {
        () = &mut outward => {}
        () = &mut inward => outward.await,
    }
}
