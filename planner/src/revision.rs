//! The name of what a pool's instances are made of: artifacts, resources and the tenant's secrets.

use mvm_proto::Digest;
use mvm_proto::document::{Pool, Tenant};

/// The content hash of everything that makes a booted instance of this pool what it is.
///
/// Counts, policies and guards are absent on purpose: changing them replaces nothing.
#[must_use]
pub fn revision_of(tenant: &Tenant, pool: &Pool) -> Digest {
    let mut bytes = Vec::with_capacity(256);
    // Each part is preceded by its length, so that no two different pools give the same bytes.
    let mut part = |bytes_of_part: &[u8]| {
        bytes.extend_from_slice(&(bytes_of_part.len() as u64).to_be_bytes());
        bytes.extend_from_slice(bytes_of_part);
    };
    part(b"mvm revision 1");
    part(pool.flake_ref.as_bytes());
    part(pool.profile.as_str().as_bytes());
    part(pool.image_digest.as_ref().map_or(&[][..], |digest| digest.as_bytes()));
    part(&pool.instance_resources.vcpus.to_be_bytes());
    part(&pool.instance_resources.mem_mib.to_be_bytes());
    part(&pool.instance_resources.data_disk_mib.to_be_bytes());
    part(tenant.secrets_hash.as_ref().map_or(&[][..], |digest| digest.as_bytes()));
    Digest::of(&bytes)
}
