//! Rules that need more than one field: uniqueness, overlaps, sums that must fit.
//!
//! They run on whatever could be read, so a mistake in one place does not hide one in another.

use std::collections::BTreeMap;
use std::fmt;

use super::workload::MAX_HEALTH_PATH_BYTES;
use super::{
    DesiredCounts, DesiredState, ImageSource, MAX_COMMAND_WORD_BYTES, MAX_COMMAND_WORDS, MAX_FLAKE_REF_BYTES,
    Network, Quotas, Subnet,
};
use crate::FieldError;
use crate::json::Node;

/// Values that must differ between the items of a list, and which item had each first.
#[derive(Debug)]
pub(super) struct Unique<K> {
    first: BTreeMap<K, usize>,
}

impl<K> Default for Unique<K> {
    fn default() -> Self {
        Self { first: BTreeMap::new() }
    }
}

impl<K: Ord + Clone> Unique<K> {
    /// Checks the key of item number `at` of the list of this name.
    pub(super) fn check(&mut self, key: &K, list: &str, at: usize, node: &Node<'_, '_>) {
        let first = *self.first.entry(key.clone()).or_insert(at);
        if first != at {
            node.refuse::<()>(format_args!("must be unique, but {list}[{first}] has the same value"));
        }
    }

    /// Which item has this key, if one does.
    pub(super) fn first(&self, key: &K) -> Option<usize> {
        self.first.get(key).copied()
    }
}

/// The subnets of the tenants read so far. Two networks overlap only if one holds the other, so looking up the few
/// that could hold a new one, and the range of those it could hold, finds every overlap without comparing all pairs.
#[derive(Debug, Default)]
pub(super) struct Subnets {
    taken: BTreeMap<Subnet, usize>,
}

impl Subnets {
    /// Checks the subnet of tenant number `at`.
    pub(super) fn check(&mut self, subnet: Subnet, at: usize, node: &Node<'_, '_>) {
        let around = subnet.enclosing().find_map(|outer| self.taken.get_key_value(&outer));
        let inside = || {
            // Subnets are ordered by address, then prefix: those inside follow the one that holds them.
            self.taken.range(subnet..).next().filter(|(next, _)| subnet.contains(next.network()))
        };
        if let Some((other, first)) = around.or_else(inside) {
            node.refuse::<()>(format_args!("must not overlap {other} of tenants[{first}]"));
        }
        self.taken.entry(subnet).or_insert(at);
    }
}

/// Printable ASCII without spaces: what references and paths are made of, and nothing that could hide in a log.
pub(super) fn printable(node: &Node<'_, '_>, max: usize) -> Option<String> {
    let text = node.text()?;
    if (1..=max).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic()) {
        Some(text.to_owned())
    } else {
        node.refuse(format_args!("must be 1 to {max} printable ASCII characters without spaces"))
    }
}

/// A `flake_ref`, whatever it names.
pub(super) fn reference(node: &Node<'_, '_>) -> Option<String> {
    printable(node, MAX_FLAKE_REF_BYTES)
}

/// A `flake_ref` that this version can make an image of.
pub(crate) fn image_reference(node: &Node<'_, '_>) -> Option<String> {
    let text = reference(node)?;
    match ImageSource::parse(&text) {
        Ok(_) => Some(text),
        Err(rule) => node.refuse(rule),
    }
}

/// A program and its arguments: printable ASCII, in which spaces stay what they are.
pub(super) fn command(node: &Node<'_, '_>) -> Option<Vec<String>> {
    let words = node.items()?;
    if !(1..=MAX_COMMAND_WORDS).contains(&words.len()) {
        return node
            .refuse(format_args!("must be 1 to {MAX_COMMAND_WORDS} strings: a program and its arguments"));
    }
    let word = |node: Node<'_, '_>| {
        let text = node.text()?;
        let printable = text.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
        if (1..=MAX_COMMAND_WORD_BYTES).contains(&text.len()) && printable {
            Some(text.to_owned())
        } else {
            node.refuse(format_args!("must be 1 to {MAX_COMMAND_WORD_BYTES} printable ASCII characters"))
        }
    };
    // Every word is looked at, so that all mistakes are told.
    let words: Vec<_> = words.map(word).collect();
    words.into_iter().collect()
}

/// A folder inside a guest: absolute, in its plainest form, and not the whole machine.
pub(super) fn guest_path(node: &Node<'_, '_>, max: usize) -> Option<String> {
    let text = printable(node, max)?;
    match text.strip_prefix('/') {
        Some(steps) if is_plain(steps) => Some(text),
        _ => node.refuse("must be an absolute path below `/`, without `.`, `..` or empty steps"),
    }
}

/// What an HTTP check asks for.
pub(super) fn url_path(node: &Node<'_, '_>) -> Option<String> {
    let text = printable(node, MAX_HEALTH_PATH_BYTES)?;
    if text.starts_with('/') { Some(text) } else { node.refuse("must begin with `/`") }
}

/// Where sessions are kept: on the node, in a folder that nodes share, or in a bucket.
pub(super) fn session_store(node: &Node<'_, '_>, max: usize) -> Option<String> {
    let text = printable(node, max)?;
    let in_bucket = |rest: &str| {
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
        let named = (3..=63).contains(&bucket.len()) && bucket.bytes().all(plain) && !bucket.starts_with('.');
        named && (prefix.is_empty() || is_plain(prefix.trim_end_matches('/')))
    };
    let known = text == "local"
        || text.strip_prefix("file:///").is_some_and(is_plain)
        || text.strip_prefix("s3://").is_some_and(in_bucket);
    if known {
        Some(text)
    } else {
        node.refuse("must be `local`, `file:///FOLDER` or `s3://BUCKET[/PREFIX]`")
    }
}

/// Whether these are steps down, each of them somewhere.
pub(super) fn is_plain(steps: &str) -> bool {
    steps.split('/').all(|step| !matches!(step, "" | "." | ".."))
}

pub(super) fn total(counts: &DesiredCounts) -> u64 {
    u64::from(counts.running) + u64::from(counts.warm) + u64::from(counts.sleeping)
}

pub(super) fn counts_within_quota(node: &Node<'_, '_>, counts: &DesiredCounts, quotas: &Quotas) {
    let (sum, most) = (total(counts), quotas.max_instances_per_pool);
    if sum > u64::from(most) {
        let expected = format_args!("must add up to at most {most}, the quota's max_instances_per_pool");
        node.refuse_as::<()>(expected, sum);
    }
}

pub(super) fn pools_within_quota(node: &Node<'_, '_>, quotas: &Quotas) {
    let pools = node.len();
    if pools > usize::try_from(quotas.max_pools).unwrap_or(usize::MAX) {
        let expected = format_args!("must be at most {} pools, the quota's max_pools", quotas.max_pools);
        node.refuse_as::<()>(expected, pools);
    }
}

pub(super) fn instances_within_addresses(node: &Node<'_, '_>, wanted: u64, network: &Network) {
    let (capacity, subnet) = (network.instance_capacity(), network.ipv4_subnet);
    if wanted > u64::from(capacity) {
        let of = match (&network.address_blocks, network.reserved_offsets.len()) {
            (None, 0) => String::new(),
            (None, _) => " outside its reserved offsets".to_owned(),
            (Some(blocks), 0) => format!(" in its {} address blocks", blocks.len()),
            (Some(blocks), _) => {
                format!(" in its {} address blocks outside its reserved offsets", blocks.len())
            }
        };
        let expected =
            format_args!("must want at most {capacity} instances, as many as {subnet} has addresses for{of}");
        node.refuse_as::<()>(expected, wanted);
    }
}

/// Numbers up to `most`, each larger than the one before.
pub(super) fn ascending(node: &Node<'_, '_>, most: u32, expected: &str) -> Option<Vec<u16>> {
    let mut before: Option<u16> = None;
    let number = |item: Node<'_, '_>| {
        let number = item.integer32(0..=u32::from(u16::MAX))?;
        let Some(number) = u16::try_from(number).ok().filter(|number| u32::from(*number) <= most) else {
            return item.refuse(format_args!("{expected}: 0..={most}"));
        };
        match before.replace(number) {
            Some(before) if before >= number => {
                item.refuse(format_args!("must be larger than {before}, the one before it"))
            }
            _ => Some(number),
        }
    };
    let numbers: Vec<_> = node.items()?.map(number).collect();
    numbers.into_iter().collect()
}

pub(super) fn sleeps_after_warming(node: &Node<'_, '_>, warm_after: u64, sleep_after: u64) {
    if warm_after > sleep_after {
        let expected = "must have warm_after_seconds no larger than sleep_after_seconds";
        node.refuse_as::<()>(expected, format_args!("{warm_after} and {sleep_after}"));
    }
}

pub(super) fn pools_without_image_digest(desired: &DesiredState) -> Vec<FieldError> {
    let missing = |path: fmt::Arguments<'_>| FieldError {
        path: path.to_string(),
        expected: "must be there outside a dev cluster".to_owned(),
        found: "nothing".to_owned(),
    };
    let mut errors = Vec::new();
    for (t, tenant) in desired.tenants.iter().enumerate() {
        for (p, pool) in tenant.pools.iter().enumerate() {
            if pool.image_digest.is_none() {
                errors.push(missing(format_args!("tenants[{t}].pools[{p}].image_digest")));
            }
        }
    }
    errors
}
