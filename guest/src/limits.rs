//! Every bound on what a guest keeps, with its reason. A guest may have 64 MiB of memory in all.

use std::time::Duration;

use crate::protocol::{CHUNK_BYTES, WINDOW_BYTES};

/// Execs that run, or whose end the agent is still being told. Each has a thread and three pipes or a terminal.
pub const MAX_EXECS: usize = 64;
/// Open relays. Each has a thread, a socket and two windows.
pub const MAX_RELAYS: usize = 64;
/// Files and folders that are being read. Each has a thread.
pub const MAX_READS: usize = 16;
/// Other requests under way: sleep, reborn, shutdown, pieces of files that wait to be written.
pub const MAX_WORKING: usize = 32;
/// Files that are being written. The one that was begun first gives way.
pub const MAX_UPLOADS: usize = 16;

/// Answers kept for an agent that may ask again. The oldest goes first.
pub const MAX_ANSWERS: usize = 256;
/// Replies that wait for the writing thread. Beyond it nothing more is read from the agent.
pub const MAX_REPLIES: usize = 256;

/// What is kept of an exec's output unless the request says otherwise, and the least and the most it can say.
pub const KEPT_OUTPUT_BYTES: usize = 1024 * 1024;
pub const MIN_KEPT_OUTPUT_BYTES: usize = 64 * 1024;
pub const MAX_KEPT_OUTPUT_BYTES: usize = 4 * 1024 * 1024;
/// Above this, all execs together, each keeps only the least.
pub const KEPT_OUTPUT_OF_ALL_BYTES: usize = 16 * 1024 * 1024;

/// What is held for a program's input or a relay's port: a window, and the piece with which an agent may overstep it.
pub const INBOUND_BYTES: usize = WINDOW_BYTES + CHUNK_BYTES;

/// Signals that wait for an exec's thread. An agent that sends more meant the first ones.
pub const MAX_PENDING_SIGNALS: usize = 16;
/// What is written to the channel in one piece, and one frame more.
pub const WRITE_BYTES: usize = 32 * 1024;
/// Chunks of a file that wait for the writing thread.
pub const MAX_QUEUED_CHUNKS: usize = 4;
/// Entries of a folder in one frame: with the longest names still half of the longest message.
pub const ENTRIES_PER_FRAME: usize = 200;

/// After an exec's program ended, how long its output may stay silent before it counts as complete, and how much is
/// read at most: a program that it left behind may hold the pipes open for ever.
pub const OUTPUT_GRACE: Duration = Duration::from_millis(250);
pub const OUTPUT_AFTER_END_BYTES: usize = 2 * 1024 * 1024;
/// Between SIGTERM and SIGKILL for an exec that is cancelled.
pub const CANCEL_GRACE: Duration = Duration::from_secs(2);

pub const HEARTBEAT: Duration = Duration::from_secs(10);
/// From a hello to the first heartbeat. An agent that says hello to a guest that just woke or was forked asks something of it
/// next, and waits for that: figures come after it.
pub const FIRST_HEARTBEAT: Duration = Duration::from_millis(200);
/// How long connecting to a port on the loopback may take.
pub const CONNECT: Duration = Duration::from_secs(5);
/// For a disk that a request names, or the disk of the root, to appear.
pub const DISK: Duration = Duration::from_secs(5);
/// How long a workload that was killed may take to be gone.
pub const KILLED: Duration = Duration::from_secs(5);
/// How long a last answer may take to leave before the machine goes down.
pub const FAREWELL: Duration = Duration::from_millis(500);

/// Threads do little; the default of 2 MiB would be most of a small guest's address space.
pub const STACK_BYTES: usize = 256 * 1024;
