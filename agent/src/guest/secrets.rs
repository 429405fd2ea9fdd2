//! A tenant's secrets on their way into a guest, and out of its memory again.

use bytes::Bytes;
use mvm_proto::InstanceId;
use mvm_proto::guest::{CHUNK_BYTES, Secrets, WipeSecrets, host_frame};

use super::error::LinkError;
use super::{ANSWER_WITHIN, GuestLinks};

/// A guest's kernel keeps the buffers of its channel, and what was in them: 128 pages for a virtio-serial port, not all
/// of which come round at once. Of 640 KiB of padding a snapshot still showed parts of a bundle, of 5 MiB one page; with
/// 5 MiB when it is given and 5 more when it is wiped, none.
const PADDING_PIECE_BYTES: usize = 80 * 1024;
const PADDING_PIECES: usize = 64;

impl GuestLinks {
    /// Puts a bundle in place in the guest's memory. Nothing of it is left on the way.
    pub async fn give_secrets(&self, instance: &InstanceId, bundle: &[u8]) -> Result<(), LinkError> {
        for piece in pieces(bundle) {
            let body = host_frame::Body::Secrets(piece);
            self.ask(instance, "being given secrets", ANSWER_WITHIN, body).await?;
        }
        Ok(())
    }

    /// Has the guest overwrite them.
    pub async fn wipe_secrets(&self, instance: &InstanceId) -> Result<(), LinkError> {
        // An empty bundle takes their place first, so that the channel is padded once more.
        self.give_secrets(instance, &[]).await?;
        let body = host_frame::Body::WipeSecrets(WipeSecrets {});
        self.ask(instance, "wiping secrets", ANSWER_WITHIN, body).await
    }
}

/// The bundle, then the padding, then the word that it is whole.
fn pieces(bundle: &[u8]) -> impl Iterator<Item = Secrets> {
    let length = bundle.len() as u64;
    let data = bundle.chunks(CHUNK_BYTES).zip((0..).step_by(CHUNK_BYTES));
    let data = data.map(|(data, offset)| Secrets {
        offset,
        data: data.to_vec().into(),
        padding: Vec::new(),
        last: false,
    });
    let rest = move |padding, last| Secrets { offset: length, data: Bytes::new(), padding, last };
    let padding =
        std::iter::repeat_with(move || rest(vec![0; PADDING_PIECE_BYTES], false)).take(PADDING_PIECES);
    data.chain(padding).chain(std::iter::once_with(move || rest(Vec::new(), true)))
}

#[cfg(test)]
mod tests {
    use mvm_proto::guest::{HostFrame, MAX_SECRETS_BYTES, put_frame};

    use super::*;

    #[test]
    fn pieces_add_up_to_the_bundle_and_each_fits_a_frame() {
        for length in [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, usize::try_from(MAX_SECRETS_BYTES).unwrap()] {
            let bundle: Vec<u8> = (0..length).map(|n| (n % 251) as u8).collect();
            let (mut taken, mut padding, mut whole) = (Vec::new(), 0, false);
            for piece in pieces(&bundle) {
                assert!(!whole && piece.offset == taken.len() as u64);
                taken.extend_from_slice(&piece.data);
                padding += piece.padding.len();
                whole = piece.last;
                let body = Some(host_frame::Body::Secrets(piece));
                put_frame(&mut Vec::new(), &HostFrame { nonce: 1, request: 1, body }).unwrap();
            }
            assert!(whole && taken == bundle);
            assert!(padding > 128 * 4096, "every buffer of the channel is overwritten");
        }
    }
}
