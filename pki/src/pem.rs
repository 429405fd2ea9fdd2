//! PEM text.
