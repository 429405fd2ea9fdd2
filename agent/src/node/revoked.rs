//! Instances whose image no image key vouches for any more. They go on as they are, and are not started again: here that is
//! told, once as an event and for as long as it holds as a condition. [`mvm_image::Vouched`] is what keeps them down.

use std::collections::BTreeMap;

use mvm_image::Images;
use mvm_proto::status::{Condition, Event};
use mvm_proto::{Digest, Timestamp};

use crate::instance::records::Records;

/// How many images the condition names.
const NAMED: usize = 3;

#[derive(Debug, Default)]
pub(crate) struct Revoked {
    /// How many instances are of each such image.
    found: BTreeMap<Digest, usize>,
}

impl Revoked {
    /// Looks at all instances; answers what there is to tell.
    pub(crate) fn look(&mut self, records: &Records, images: &Images, now: Timestamp) -> Vec<Event> {
        let mut found = BTreeMap::<Digest, usize>::new();
        let mut vouched = Vec::new();
        records.for_each(|record, _| {
            let Some(digest) = record.image else { return };
            if images.check(&digest).is_err() {
                *found.entry(digest).or_default() += 1;
            } else if self.found.contains_key(&digest) {
                vouched.push(digest);
            }
        });
        let event = |kind: &str, digest: &Digest, message: String| Event {
            at: now.to_string(),
            kind: kind.to_owned(),
            subject: digest.to_string(),
            message,
        };
        let mut events = Vec::new();
        for (digest, count) in found.iter().filter(|(digest, _)| !self.found.contains_key(digest)) {
            let message = format!(
                "no image key vouches for it any more: {count} instance(s) of it go on as they are, none is started again"
            );
            events.push(event("ImageRevoked", digest, message));
        }
        vouched.sort();
        vouched.dedup();
        events.extend(
            vouched
                .iter()
                .map(|digest| event("ImageVouched", digest, "an image key vouches for it again".to_owned())),
        );
        self.found = found;
        events
    }

    pub(crate) fn condition(&self, now: Timestamp) -> Condition {
        if self.found.is_empty() {
            return Condition::new("ImagesVouched", true, "Vouched", "", now);
        }
        let named: Vec<_> =
            self.found.iter().take(NAMED).map(|(digest, count)| format!("{digest} ({count})")).collect();
        let more = self.found.len().saturating_sub(NAMED);
        let rest = if more > 0 { format!(" (and {more} more)") } else { String::new() };
        let message = format!(
            "no image key vouches for the image of these instances, which go on as they are and are not started again: \
             {}{rest}",
            named.join(", ")
        );
        Condition::new("ImagesVouched", false, "Revoked", message, now)
    }
}
