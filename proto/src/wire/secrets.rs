//! Pieces of secrets in a session: not shown, and wiped by their last owner.

use std::fmt;

use zeroize::Zeroize as _;

use super::session::v1::SecretsPiece;

impl Drop for SecretsPiece {
    fn drop(&mut self) {
        if let Ok(mut data) = std::mem::take(&mut self.data).try_into_mut() {
            data.as_mut().zeroize();
        }
    }
}

impl fmt::Debug for SecretsPiece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.data.len();
        write!(
            f,
            "SecretsPiece {{ {bytes} bytes from {} of {}, {:?} }}",
            self.offset, self.total, self.bundle
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_does_not_show_what_it_has() {
        let mut piece = SecretsPiece::default();
        piece.data = b"hunter2".to_vec().into();
        let shown = format!("{piece:?}");
        assert!(
            shown.contains("7 bytes") && !shown.contains("104, 117") && !shown.contains("hunter2"),
            "{shown}"
        );
    }
}
