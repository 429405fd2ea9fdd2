//! Links to guests that behave, and to some that do not.
