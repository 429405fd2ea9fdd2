//! The texts of API keys: `mvm_<id>_<secret>`. The text is in the answer to the request that made the key; the store
//! has a salted digest of it.
//!
//! ```text
//! api_keys/<id>   the object that the key belongs to, the salt and the digest
//! ```

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use mvm_proto::object::{ApiKeySpec, kind_named};
use mvm_proto::{Digest, Problem, Timestamp};
use mvm_store::Store;
use serde::{Deserialize, Serialize};

use super::access::Caller;
use super::record::{decode_object, object_key};
use crate::refuse;
use crate::stored::{Backend, load};

const API_KEYS: &str = "api_keys/";
const SECRET_BYTES: usize = 32;
const SALT_BYTES: usize = 16;
const ID_BYTES: usize = 8;

/// What the store knows of a key's text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KeyRecord {
    name: String,
    uid: String,
    salt: String,
    digest: Digest,
}

/// A new key: its id, its text, and what is stored of it.
pub(super) struct NewKey {
    pub(super) id: String,
    pub(super) text: String,
    pub(super) record: KeyRecord,
}

pub(super) fn new_key(name: &str, uid: &str) -> Result<NewKey, Problem> {
    let mut random = [0; ID_BYTES + SECRET_BYTES + SALT_BYTES];
    mvm_pki::random_bytes(&mut random).map_err(|error| refuse::internal(&error))?;
    let (id, rest) = random.split_at(ID_BYTES);
    let (secret, salt) = rest.split_at(SECRET_BYTES);
    let id = id.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
    let (secret, salt) = (URL_SAFE_NO_PAD.encode(secret), URL_SAFE_NO_PAD.encode(salt));
    let digest = digest_of(&salt, &secret);
    let record = KeyRecord { name: name.to_owned(), uid: uid.to_owned(), salt, digest };
    Ok(NewKey { text: format!("mvm_{id}_{secret}"), id, record })
}

pub(super) fn key_record_key(id: &str) -> String {
    format!("{API_KEYS}{id}")
}

/// The secret has 256 random bits, so that one round of a fast digest is as good as many of a slow one.
fn digest_of(salt: &str, secret: &str) -> Digest {
    Digest::of(format!("mvm api key\0{salt}\0{secret}").as_bytes())
}

/// Who shows this text as its key.
pub(crate) async fn caller_of_key(
    store: &Backend,
    text: &str,
    address: String,
    now: Timestamp,
) -> Result<Caller, Problem> {
    let refused = || {
        let detail = "the API key is not known, is expired, or was deleted";
        Problem::new(
            401,
            "key_refused",
            detail,
            "Send `Authorization: Bearer mvm_...` with a key that is valid.",
        )
    };
    let (id, secret) = text.strip_prefix("mvm_").and_then(|rest| rest.split_once('_')).ok_or_else(refused)?;
    if id.len() != 2 * ID_BYTES || !id.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(refused());
    }
    let record = load::<KeyRecord>(store, &key_record_key(id)).await?.ok_or_else(refused)?.value;
    // Both are digests: comparing them tells nothing of the secret.
    if digest_of(&record.salt, secret) != record.digest {
        return Err(refused());
    }
    let kind = kind_named("api-keys").map_err(|_| refused())?;
    let entry =
        store.get(&object_key(kind, None, &record.name)).await.map_err(crate::stored::StateError::from)?;
    let object = decode_object(&entry.ok_or_else(refused)?)?;
    let spec: ApiKeySpec = object.spec().map_err(|error| refuse::internal(&error))?;
    let is_past = spec.expires_at.is_some_and(|at| at <= now);
    if object.metadata.uid != record.uid || object.metadata.deleting_since.is_some() || is_past {
        return Err(refused());
    }
    Ok(Caller::of_key(&record.name, spec, address))
}
