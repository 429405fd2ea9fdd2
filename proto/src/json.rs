//! JSON as a tree that borrows from its text. See the owner's implementation.
