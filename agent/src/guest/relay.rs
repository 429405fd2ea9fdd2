//! A connection to a port on a guest's loopback.

use mvm_proto::InstanceId;
use mvm_proto::guest::{CHUNK_BYTES, Chunk, RelayOpen, Window, host_frame};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::call::{Call, Event};
use super::error::LinkError;
use super::exec::WINDOW_STEP_BYTES;
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
        let (mut read, mut told) = (0u64, 0u64);
        while let Event::Chunk(chunk) = call.next().await {
            if writer.write_all(&chunk.data).await.is_err() {
                return;
            }
            read += chunk.data.len() as u64;
            if chunk.last {
                break;
            }
            if read - told >= WINDOW_STEP_BYTES {
                told = read;
                if call.send(&host_frame::Body::Window(Window { bytes: read, received: 0 })).is_err() {
                    break;
                }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::stream::{self, StreamExt as _};
    use mvm_proto::guest::{Accepted, guest_frame};

    use super::super::fake_guest::links_to;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_relays_nothing_in_many_pieces_is_not_answered_for_each() {
        let windows = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&windows);
        let links = links_to(move |_, body| {
            let chunk = |data: Vec<u8>, last| guest_frame::Body::Chunk(Chunk { data, last });
            match body {
                host_frame::Body::RelayOpen(_) => {
                    let empty = (0..1000).map(move |_| chunk(Vec::new(), false));
                    let rest = [chunk(vec![7; CHUNK_BYTES], false), chunk(Vec::new(), true)];
                    let accepted = stream::iter([guest_frame::Body::Accepted(Accepted {})]);
                    accepted.chain(stream::iter(empty)).chain(stream::iter(rest)).boxed()
                }
                host_frame::Body::Window(window) => {
                    assert_eq!(window.bytes, CHUNK_BYTES as u64);
                    counted.fetch_add(1, Ordering::Relaxed);
                    stream::empty().boxed()
                }
                _ => stream::empty().boxed(),
            }
        });
        let guest = InstanceId::from_bits(1);
        links.open(&guest);
        let mut relay = links.relay(&guest, 80).await.unwrap();
        let mut read = Vec::new();
        relay.read_to_end(&mut read).await.unwrap();
        assert_eq!(read.len(), CHUNK_BYTES);
        // What was sent before it is answered before it.
        let _ = links.ping(&guest, ANSWER_WITHIN).await;
        assert_eq!(windows.load(Ordering::Relaxed), 1);
    }
}
