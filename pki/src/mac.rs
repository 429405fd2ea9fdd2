//! Messages to programs of others that share a key with us: HMAC-SHA256.

use std::fmt::Write as _;

use aws_lc_rs::hmac;

/// A shared key.
pub struct Mac(hmac::Key);

impl Mac {
    #[must_use]
    pub fn new(key: &[u8]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, key))
    }

    /// The code of these parts, one after the other, in hexadecimal.
    #[must_use]
    pub fn hex(&self, parts: &[&[u8]]) -> String {
        let mut context = hmac::Context::with_key(&self.0);
        parts.iter().for_each(|part| context.update(part));
        let mut text = String::new();
        for byte in context.sign().as_ref() {
            // Writing to a string can't fail.
            let _ = write!(text, "{byte:02x}");
        }
        text
    }
}

impl std::fmt::Debug for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mac")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_is_that_of_the_standard() {
        // RFC 4231, test case 2.
        let expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
        let mac = Mac::new(b"Jefe");
        assert_eq!(mac.hex(&[b"what do ya want ", b"for nothing?"]), expected);
        assert_ne!(mac.hex(&[b"what do ya want for nothing"]), expected);
    }
}
