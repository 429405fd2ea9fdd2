//! PEM text in buffers that are wiped. Reading is `rustls-pki-types`'; it has no writer, and the writers elsewhere
//! leave copies of a private key behind in memory.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use zeroize::Zeroizing;

pub(crate) const PRIVATE_KEY: &str = "PRIVATE KEY";
const CERTIFICATE: &str = "CERTIFICATE";

/// RFC 7468's line length.
const LINE: usize = 64;

/// Appends one section to `out`. Grows `out` once, so that no shorter copy is left behind.
pub(crate) fn push(out: &mut Zeroizing<String>, label: &str, der: &[u8]) {
    let mut body = Zeroizing::new(vec![0; der.len().div_ceil(3) * 4]);
    // The buffer has exactly the encoded length, so encoding can't fail.
    let length = STANDARD.encode_slice(der, &mut body).unwrap_or(0);
    let body = &body[..length];
    let total = out.len() + length + length.div_ceil(LINE) + 2 * label.len() + 40;
    let mut text = Zeroizing::new(String::with_capacity(total));
    text.push_str(out);
    text.push_str("-----BEGIN ");
    text.push_str(label);
    text.push_str("-----\n");
    for line in body.chunks(LINE) {
        text.extend(line.iter().copied().map(char::from));
        text.push('\n');
    }
    text.push_str("-----END ");
    text.push_str(label);
    text.push_str("-----\n");
    *out = text;
}

pub(crate) fn certificates(chain: &[CertificateDer<'_>]) -> String {
    let mut out = Zeroizing::new(String::new());
    for certificate in chain {
        push(&mut out, CERTIFICATE, certificate);
    }
    std::mem::take(&mut *out)
}

/// The certificates in `text`; other sections are passed over. `None` when a section is damaged.
pub(crate) fn read_certificates(text: &str) -> Option<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_slice_iter(text.as_bytes()).collect::<Result<_, _>>().ok()
}

/// The one PKCS#8 key in `text`.
pub(crate) fn read_private_key(text: &str) -> Option<Zeroizing<Vec<u8>>> {
    use rustls_pki_types::PrivatePkcs8KeyDer;
    use zeroize::Zeroize as _;
    let mut keys = PrivatePkcs8KeyDer::pem_slice_iter(text.as_bytes());
    let mut key = keys.next()?.ok()?;
    let copy = Zeroizing::new(key.secret_pkcs8_der().to_vec());
    key.zeroize();
    match keys.next() {
        None => Some(copy),
        Some(Ok(mut second)) => {
            second.zeroize();
            None
        }
        Some(Err(_)) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_and_certificates_in_one_text_read_back_apart() {
        let key = vec![7; 100];
        let chain = vec![CertificateDer::from(vec![1; 200]), CertificateDer::from(vec![2; 48])];
        let mut text = Zeroizing::new(String::new());
        push(&mut text, PRIVATE_KEY, &key);
        text.push_str(&certificates(&chain));
        assert_eq!(*read_private_key(&text).unwrap(), key);
        assert_eq!(read_certificates(&text).unwrap(), chain);
        assert!(text.lines().all(|line| line.len() <= LINE));
    }

    #[test]
    fn two_keys_in_one_text_are_refused() {
        let mut text = Zeroizing::new(String::new());
        push(&mut text, PRIVATE_KEY, &[1; 40]);
        push(&mut text, PRIVATE_KEY, &[2; 40]);
        assert!(read_private_key(&text).is_none());
    }
}
