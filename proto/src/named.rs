//! Words that a message carries as text and that only a few are meant by: each such noun is one enum, made of one table of
//! its names, which both sides of the message read.
//!
//! The fields stay text, because a newer peer may use a name that this build does not have.

/// A name that is in no table of this build: mistyped, or from another version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be one of {0}")]
pub struct UnknownName(pub(crate) &'static str);

/// Makes an enum with `ALL`, `as_str`, `Display` and `FromStr` from one table of names.
macro_rules! named {
    (
        $(#[$outer:meta])*
        pub enum $noun:ident {
            $(#[$first_doc:meta])* $first:ident = $first_name:literal,
            $($(#[$doc:meta])* $variant:ident = $name:literal,)*
        }
    ) => {
        $(#[$outer])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $noun {
            $(#[$first_doc])* $first,
            $($(#[$doc])* $variant,)*
        }

        impl $noun {
            pub const ALL: [Self; [$first_name, $($name),*].len()] = [Self::$first, $(Self::$variant),*];

            /// Its name in messages.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self {
                    Self::$first => $first_name,
                    $(Self::$variant => $name,)*
                }
            }
        }

        impl std::fmt::Display for $noun {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $noun {
            type Err = $crate::named::UnknownName;

            fn from_str(text: &str) -> Result<Self, $crate::named::UnknownName> {
                const NAMES: &str = concat!($first_name $(, ", ", $name)*);
                let found = Self::ALL.into_iter().find(|one| one.as_str() == text);
                found.ok_or($crate::named::UnknownName(NAMES))
            }
        }
    };
}

pub(crate) use named;
