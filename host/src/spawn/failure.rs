//! Where a child failed before it became a program, in eight bytes: all that it can say without allocating.

use std::io;

use rustix::io::Errno;

macro_rules! steps {
    ($($step:ident = $words:literal,)*) => {
        /// What a child does before it is a program.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Step { $($step,)* }

        impl Step {
            const ALL: &[Self] = &[$(Self::$step,)*];

            pub(crate) fn words(self) -> &'static str {
                match self { $(Self::$step => $words,)* }
            }
        }
    };
}

steps! {
    Session = "a session of its own",
    Descriptors = "its open files",
    OomScore = "its place when memory is short",
    HostName = "a host name",
    PrivateMounts = "private mounts",
    RunDirectory = "its run directory",
    NewRoot = "a root directory",
    Entry = "showing",
    Devices = "its devices",
    PivotRoot = "pivot_root",
    WorkingDirectory = "its working directory",
    Limits = "its limits",
    BoundingSet = "the capability bounding set",
    SecureBits = "securebits",
    User = "another user",
    Capabilities = "dropping capabilities",
    Keyring = "a keyring",
    Dumpable = "forbidding dumps",
    NoNewPrivileges = "no_new_privs",
    Program = "opening its program",
    Landlock = "Landlock",
    Filter = "a filter on system calls",
    Execute = "executing its program",
}

/// The step that failed, on which of several things, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) step: Step,
    pub(crate) item: u16,
    errno: i32,
}

impl Failure {
    pub(crate) const BYTES: usize = 8;

    pub(crate) fn new(step: Step, errno: Errno) -> Self {
        Self { step, item: u16::MAX, errno: errno.raw_os_error() }
    }

    pub(crate) fn with_item(step: Step, item: usize, errno: Errno) -> Self {
        Self { item: u16::try_from(item).unwrap_or(u16::MAX), ..Self::new(step, errno) }
    }

    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let ([item_a, item_b], [a, b, c, d]) = (self.item.to_ne_bytes(), self.errno.to_ne_bytes());
        [self.step as u8, 0, item_a, item_b, a, b, c, d]
    }

    pub(crate) fn from_bytes(bytes: [u8; Self::BYTES]) -> Option<Self> {
        let [step, _, item_a, item_b, a, b, c, d] = bytes;
        let step = *Step::ALL.get(usize::from(step))?;
        Some(Self {
            step,
            item: u16::from_ne_bytes([item_a, item_b]),
            errno: i32::from_ne_bytes([a, b, c, d]),
        })
    }

    pub(crate) fn cause(self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_arrives_as_it_was_sent() {
        for step in Step::ALL {
            let failure = Failure::with_item(*step, 7, Errno::PERM);
            assert_eq!(Failure::from_bytes(failure.to_bytes()), Some(failure));
        }
        assert_eq!(Failure::from_bytes([0xff; Failure::BYTES]), None);
    }
}
