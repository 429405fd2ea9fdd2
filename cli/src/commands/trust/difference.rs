//! What is about to be signed, as a difference against the pinned trust. Pure: a person reads it before keys sign.

use std::collections::BTreeSet;
use std::fmt;

use mvm_pki::trust::{ImageSource, TrustRole};
use mvm_pki::{ImagesMetadata, RootMetadata};
use mvm_proto::{Digest, Timestamp};

/// What is trusted at one time.
#[derive(Debug, Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) root: &'a RootMetadata,
    pub(super) images: Option<&'a ImagesMetadata>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    RootVersion { from: u64, to: u64 },
    RootExpiry { from: Timestamp, to: Timestamp },
    Development { to: bool },
    ForgetsMarks,
    Key { role: TrustRole, key_id: String, added: bool },
    Threshold { role: TrustRole, from: u32, to: u32 },
    RoleExpiry { role: TrustRole, from: Option<Timestamp>, to: Option<Timestamp> },
    ImagesVersion { from: u64, to: u64 },
    ImagesDropped { version: u64 },
    ImagesExpiry { from: Option<Timestamp>, to: Timestamp },
    Image { digest: Digest, added: bool },
    Source { source: ImageSource, added: bool },
}

/// Everything that `after` says and `before` did not, and the reverse; empty when they agree.
#[must_use]
pub(super) fn difference(before: View<'_>, after: View<'_>) -> Vec<Change> {
    let mut changes = root_changes(before.root, after.root);
    changes.extend(image_changes(before.images, after.images));
    changes
}

fn root_changes(before: &RootMetadata, after: &RootMetadata) -> Vec<Change> {
    let mut changes = Vec::new();
    if before.version != after.version {
        changes.push(Change::RootVersion { from: before.version, to: after.version });
        if after.resets_high_water {
            changes.push(Change::ForgetsMarks);
        }
    }
    if before.expires_at != after.expires_at {
        changes.push(Change::RootExpiry { from: before.expires_at, to: after.expires_at });
    }
    if before.dev != after.dev {
        changes.push(Change::Development { to: after.dev });
    }
    for role in TrustRole::ALL {
        let (old, new) = (before.role(role), after.role(role));
        let keys = sides(old.key_ids.iter().cloned(), new.key_ids.iter().cloned());
        changes.extend(keys.into_iter().map(|(key_id, added)| Change::Key { role, key_id, added }));
        if old.threshold != new.threshold {
            changes.push(Change::Threshold { role, from: old.threshold, to: new.threshold });
        }
        if old.expires_at != new.expires_at {
            changes.push(Change::RoleExpiry { role, from: old.expires_at, to: new.expires_at });
        }
    }
    changes
}

fn image_changes(before: Option<&ImagesMetadata>, after: Option<&ImagesMetadata>) -> Vec<Change> {
    let Some(new) = after else {
        return before.map(|old| Change::ImagesDropped { version: old.version }).into_iter().collect();
    };
    let mut changes = Vec::new();
    let from = before.map_or(0, |old| old.version);
    if from != new.version {
        changes.push(Change::ImagesVersion { from, to: new.version });
    }
    let from = before.map(|old| old.expires_at);
    if from != Some(new.expires_at) {
        changes.push(Change::ImagesExpiry { from, to: new.expires_at });
    }
    let old = before.into_iter().flat_map(|old| old.digests.iter().copied());
    let images = sides(old, new.digests.iter().copied());
    changes.extend(images.into_iter().map(|(digest, added)| Change::Image { digest, added }));
    let old = before.into_iter().flat_map(|old| old.sources.iter().cloned());
    let sources = sides(old, new.sources.iter().cloned());
    changes.extend(sources.into_iter().map(|(source, added)| Change::Source { source, added }));
    changes
}

/// What only one side has: `false` what is gone, `true` what is new.
fn sides<T: Ord + Clone>(before: impl Iterator<Item = T>, after: impl Iterator<Item = T>) -> Vec<(T, bool)> {
    let (before, after): (BTreeSet<T>, BTreeSet<T>) = (before.collect(), after.collect());
    let gone = before.difference(&after).map(|item| (item.clone(), false));
    gone.chain(after.difference(&before).map(|item| (item.clone(), true))).collect()
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = |added: bool| if added { '+' } else { '-' };
        let until = |at: &Option<Timestamp>| at.map_or("the end of the root".to_owned(), |at| at.to_string());
        match self {
            Self::RootVersion { from, to } => write!(f, "  root version {from} -> {to}"),
            Self::RootExpiry { from, to } => write!(f, "  root until {from} -> {to}"),
            Self::Development { to: true } => {
                f.write_str("+ development cluster: nodes start images that no key vouches for")
            }
            Self::Development { to: false } => f.write_str("- development cluster"),
            Self::ForgetsMarks => f.write_str("+ nodes forget the highest document number that they saw"),
            Self::Key { role, key_id, added } => write!(f, "{} {role} key {key_id}", sign(*added)),
            Self::Threshold { role, from, to } => write!(f, "  {role} threshold {from} -> {to}"),
            Self::RoleExpiry { role, from, to } => {
                write!(f, "  {role} keys until {} -> {}", until(from), until(to))
            }
            Self::ImagesVersion { from, to } => write!(f, "  images version {from} -> {to}"),
            Self::ImagesDropped { version } => {
                write!(f, "- images version {version}: vouch anew with the image keys of the new root")
            }
            Self::ImagesExpiry { from: Some(from), to } => write!(f, "  images until {from} -> {to}"),
            Self::ImagesExpiry { from: None, to } => write!(f, "  images until {to}"),
            Self::Image { digest, added } => write!(f, "{} image {digest}", sign(*added)),
            Self::Source { source: ImageSource { flake_ref, digest }, added } => {
                write!(f, "{} source {flake_ref} for image {digest}", sign(*added))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mvm_pki::SigningKey;
    use mvm_pki::trust::{RoleSpec, RootSpec};

    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn at(days: u32) -> Timestamp {
        Timestamp::from_unix_ms(1_800_000_000_000) + days * DAY
    }

    fn key() -> SigningKey {
        SigningKey::generate().unwrap()
    }

    fn spec() -> RootSpec {
        RootSpec {
            cluster: "c".parse().unwrap(),
            expires_at: at(10),
            dev: false,
            resets_high_water: false,
            root: RoleSpec::single(key().public()),
            director: RoleSpec::single(key().public()),
            image: RoleSpec::single(key().public()),
        }
    }

    fn images(version: u64, digests: &[&str], days: u32) -> ImagesMetadata {
        let digests = digests.iter().map(|text| Digest::of(text.as_bytes()));
        ImagesMetadata::new("c".parse().unwrap(), version, digests, at(0), days * DAY).unwrap()
    }

    fn root_difference(old: &RootSpec, new: &RootSpec) -> Vec<Change> {
        let first = RootMetadata::first(old, at(0)).unwrap();
        let next = first.next(new, at(1)).unwrap();
        difference(View { root: &first, images: None }, View { root: &next, images: None })
    }

    #[test]
    fn what_agrees_has_no_difference() {
        let root = RootMetadata::first(&spec(), at(0)).unwrap();
        let images = images(1, &["a", "b"], 5);
        let view = View { root: &root, images: Some(&images) };
        assert_eq!(difference(view, view), []);
    }

    #[test]
    fn every_field_of_a_root_that_changes_is_listed() {
        let old = spec();
        let (extra, role) = (key().public(), TrustRole::Image);
        let version = Change::RootVersion { from: 1, to: 2 };
        let added = Change::Key { role, key_id: extra.key_id(), added: true };
        let gone = Change::Key { role, key_id: old.image.keys[0].key_id(), added: false };
        type Case<'a> = (&'a dyn Fn(&mut RootSpec), Vec<Change>);
        let cases: [Case<'_>; 8] = [
            (&|_| {}, vec![]),
            (&|new| new.expires_at = at(20), vec![Change::RootExpiry { from: at(10), to: at(20) }]),
            (&|new| new.dev = true, vec![Change::Development { to: true }]),
            (&|new| new.resets_high_water = true, vec![Change::ForgetsMarks]),
            (&|new| new.image.keys.push(extra), vec![added.clone()]),
            (&|new| new.image = RoleSpec::single(extra), vec![gone, added.clone()]),
            (
                &|new| {
                    new.image.keys.push(extra);
                    new.image.threshold = 2;
                },
                vec![added, Change::Threshold { role, from: 1, to: 2 }],
            ),
            (
                &|new| new.image.expires_at = Some(at(5)),
                vec![Change::RoleExpiry { role, from: None, to: Some(at(5)) }],
            ),
        ];
        for (at, (change, expected)) in cases.iter().enumerate() {
            let mut new = old.clone();
            change(&mut new);
            let expected = [std::slice::from_ref(&version), expected].concat();
            assert_eq!(root_difference(&old, &new), expected, "case {at}");
        }
    }

    #[test]
    fn keys_of_every_role_are_listed_with_their_role() {
        let old = spec();
        for (at, role) in TrustRole::ALL.into_iter().enumerate() {
            let extra = key().public();
            let mut new = old.clone();
            [&mut new.root, &mut new.director, &mut new.image][at].keys.push(extra);
            let added = Change::Key { role, key_id: extra.key_id(), added: true };
            assert!(root_difference(&old, &new).contains(&added), "{role}");
        }
    }

    #[test]
    fn every_digest_that_comes_or_goes_is_listed() {
        let root = RootMetadata::first(&spec(), at(0)).unwrap();
        let view = |images| View { root: &root, images };
        let (old, new) = (images(3, &["a", "b"], 5), images(4, &["b", "c"], 6));
        let image = |text: &str, added| Change::Image { digest: Digest::of(text.as_bytes()), added };
        let expected = vec![
            Change::ImagesVersion { from: 3, to: 4 },
            Change::ImagesExpiry { from: Some(at(5)), to: at(6) },
            image("a", false),
            image("c", true),
        ];
        assert_eq!(difference(view(Some(&old)), view(Some(&new))), expected);
        let first = difference(view(None), view(Some(&new)));
        assert_eq!(first.len(), 4, "{first:?}");
        assert_eq!(difference(view(Some(&old)), view(None)), [Change::ImagesDropped { version: 3 }]);
    }

    #[test]
    fn every_source_that_comes_or_goes_is_listed() {
        let root = RootMetadata::first(&spec(), at(0)).unwrap();
        let source = |flake_ref: &str| ImageSource { flake_ref: flake_ref.into(), digest: Digest::of(b"a") };
        let with = |flake_ref: &str| images(1, &["a"], 5).with_sources(vec![source(flake_ref)]).unwrap();
        let (old, new) = (with("github:org/old"), with("github:org/new"));
        let changes =
            difference(View { root: &root, images: Some(&old) }, View { root: &root, images: Some(&new) });
        let change = |flake_ref: &str, added| Change::Source { source: source(flake_ref), added };
        assert_eq!(changes, [change("github:org/old", false), change("github:org/new", true)]);
    }

    #[test]
    fn every_change_reads_differently() {
        let at = at(1);
        let digest = Digest::of(b"i");
        let role = TrustRole::Root;
        let source = ImageSource { flake_ref: "github:org/repo".into(), digest };
        let all = [
            Change::RootVersion { from: 1, to: 2 },
            Change::RootExpiry { from: at, to: at },
            Change::Development { to: true },
            Change::Development { to: false },
            Change::ForgetsMarks,
            Change::Key { role, key_id: "k".into(), added: true },
            Change::Key { role, key_id: "k".into(), added: false },
            Change::Threshold { role, from: 1, to: 2 },
            Change::RoleExpiry { role, from: None, to: Some(at) },
            Change::ImagesVersion { from: 1, to: 2 },
            Change::ImagesDropped { version: 1 },
            Change::ImagesExpiry { from: None, to: at },
            Change::Image { digest, added: true },
            Change::Image { digest, added: false },
            Change::Source { source: source.clone(), added: true },
            Change::Source { source, added: false },
        ];
        let texts: BTreeSet<String> = all.iter().map(ToString::to_string).collect();
        assert_eq!(texts.len(), all.len());
    }
}
