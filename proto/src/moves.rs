//! Moves of sleeping instances between nodes: what a coordinator orders an agent to do.

use crate::named::named;

named! {
    /// One step of a move, as its node carries it out. Asking twice is asking once.
    pub enum MoveStep {
        /// Of the source: the instance is put to sleep and runs here no more, unless the move is given up. Answers which
        /// snapshot it has.
        Depart = "depart",
        /// Of the source: the move was given up, and the instance is as any other again.
        Stay = "stay",
        /// Of the target: one stream may bring it, and nothing else but it.
        Expect = "expect",
        /// Of the target: what came by a move that was given up goes again.
        Discard = "discard",
        /// Of the source: removes what has arrived elsewhere.
        Release = "release",
        /// Of the target: the source has let go, and the instance may run here.
        Activate = "activate",
    }
}

/// Bytes of a ticket: not to be guessed.
pub const TICKET_BYTES: usize = 32;
