//! What a driver may be able to do beyond running, pausing and saving guests; told in `mvm node info`.

use super::DriverKind;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    /// Instances share the memory of a template until they write to it.
    Forks,
    /// A guest that is about to be paused gives back what it does not use.
    Balloon,
    /// Snapshots are compressed where a document asks for it.
    Compression,
    /// Snapshots are encrypted where a document asks for it.
    Encryption,
    /// What sleeps can go on on another node.
    Moves,
}

impl Capability {
    pub const ALL: [Self; 5] = [Self::Forks, Self::Balloon, Self::Compression, Self::Encryption, Self::Moves];

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Forks => "forks",
            Self::Balloon => "balloon",
            Self::Compression => "compression",
            Self::Encryption => "encryption",
            Self::Moves => "moves",
        }
    }
}

impl DriverKind {
    /// Why a driver can't do this, for people; absent: it can.
    #[must_use]
    pub fn lacks(self, capability: Capability) -> Option<&'static str> {
        match (self, capability) {
            (Self::Firecracker, Capability::Compression) => {
                Some("Firecracker maps a guest's memory from its file, which has to lie there as it is")
            }
            (Self::Firecracker, Capability::Encryption) => {
                Some("Firecracker writes memory to a file by itself, in clear: there is no stream to encrypt")
            }
            (Self::Firecracker, Capability::Moves) => Some(
                "what Firecracker saved can be restored on its own node only; stop the instance, and start it elsewhere",
            ),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_driver_lacks_is_told_with_the_reason() {
        let lacking = |kind: DriverKind| -> Vec<&str> {
            Capability::ALL
                .into_iter()
                .filter(|it| kind.lacks(*it).is_some())
                .map(Capability::as_str)
                .collect()
        };
        assert_eq!(lacking(DriverKind::Firecracker), ["compression", "encryption", "moves"]);
        assert_eq!((lacking(DriverKind::Qemu), lacking(DriverKind::Fake)), (Vec::new(), Vec::new()));
    }
}
