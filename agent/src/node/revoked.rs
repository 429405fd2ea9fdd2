//! Reports instances whose image no image key vouches for any more: once as an event, and as a condition while it lasts. They
//! keep running and are not started again; [`mvm_image::Vouched`] prevents that.

use std::collections::{BTreeMap, BTreeSet};

use mvm_image::Images;
use mvm_proto::status::{Condition, ConditionKind};
use mvm_proto::{Digest, Timestamp};

use crate::events::Events;
use crate::instance::records::Records;

/// How many images the condition names.
const NAMED: usize = 3;

#[derive(Debug, Default)]
pub(crate) struct Revoked {
    /// How many instances are of each such image.
    found: BTreeMap<Digest, usize>,
}

impl Revoked {
    /// Looks at all instances, and tells of images that are not vouched for any more, or again.
    pub(crate) fn look(&mut self, records: &Records, images: &Images, events: &Events) {
        let mut found = BTreeMap::<Digest, usize>::new();
        let mut vouched = BTreeSet::new();
        records.for_each(|record, _| {
            let Some(digest) = record.image else { return };
            if images.check(&digest).is_err() {
                *found.entry(digest).or_default() += 1;
            } else if self.found.contains_key(&digest) {
                vouched.insert(digest);
            }
        });
        for (digest, count) in found.iter().filter(|(digest, _)| !self.found.contains_key(digest)) {
            let message = format!(
                "no image key vouches for it any more: {count} instance(s) of it go on as they are, none is started again"
            );
            events.warn("ImageRevoked", digest, message);
        }
        for digest in vouched {
            events.warn("ImageVouched", digest, "an image key vouches for it again");
        }
        self.found = found;
    }

    pub(crate) fn condition(&self, now: Timestamp) -> Condition {
        if self.found.is_empty() {
            return Condition::new(ConditionKind::ImagesVouched, true, "Vouched", "", now);
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
        Condition::new(ConditionKind::ImagesVouched, false, "Revoked", message, now)
    }
}
