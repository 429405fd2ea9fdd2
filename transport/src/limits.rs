//! Every limit on what a peer may make this process hold or wait for.
//!
//! The defaults suit a coordinator of a few thousand nodes and an agent alike; tests and small machines pass others.

use std::time::Duration;

use mvm_proto::envelope::MAX_ENVELOPE_BYTES;

/// Room in a frame beside the largest envelope: field tags, an ack's problem, a trust chain's wrapping.
pub const FRAME_OVERHEAD_BYTES: usize = 64 * 1024;

/// Unidirectional streams a peer may open. HTTP/3 needs three (control and two for QPACK); clients that grease open a
/// fourth. Every stream of the limit costs memory per connection, used or not.
pub const MAX_UNI_STREAMS: u32 = 4;

/// Bytes kept of packets that arrive while a connection attempt waits to be accepted. Attempts are decided at once, so
/// one more flight is plenty.
pub const INCOMING_BUFFER_BYTES: u64 = 16 * 1024;

/// The same, over all waiting attempts.
pub const INCOMING_BUFFER_TOTAL_BYTES: u64 = 4 * 1024 * 1024;

/// TLS messages buffered out of order during a handshake. A chain of three P-256 certificates is about 2 KiB.
pub const CRYPTO_BUFFER_BYTES: usize = 16 * 1024;

/// Bytes the kernel is asked to hold for a socket that many peers send to. With Linux's usual 208 KiB, about two hundred
/// small packets fit: the acks of a thousand agents to one document then overflow it, and each one lost costs its sender
/// a timeout. The kernel gives at most `net.core.rmem_max` unless the process may override it.
pub const SHARED_SOCKET_BYTES: usize = 4 * 1024 * 1024;

/// How long a Retry token proves an address: one round trip and a retransmission, not a licence for later.
pub const RETRY_TOKEN_LIFE: Duration = Duration::from_secs(10);

/// What a peer may use up. Each field is hit by a test in `tests/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a request's or collected response's body: one document. Above: 413.
    pub max_body_bytes: usize,
    /// Bytes of a header section, counted as RFC 9114 does (name + value + 32 each). Above: 431.
    pub max_header_bytes: usize,
    /// Bytes of one session frame. A larger claim ends the session before any of it is read.
    pub max_frame_bytes: usize,
    /// Requests a peer may have open at once on one connection.
    pub max_streams: u32,
    /// Connections with a verified certificate. Neither handshakes nor connections without a certificate count here, so
    /// they can't take these slots. Above: refused.
    pub max_connections: usize,
    /// Connections and handshakes from one address (IPv6: one /64): no address may take the whole table. Above: refused.
    pub max_connections_per_ip: usize,
    /// Connections that showed no certificate, in all. Above: the newest takes the slot of one from the address that
    /// has most.
    pub max_anonymous: usize,
    /// Of those, from one address. Above: the newest takes the slot of one without an open request, or is closed.
    pub max_anonymous_per_ip: usize,
    /// How long a connection without a certificate may last. Enrolment needs one for a second or two.
    pub anonymous_life: Duration,
    /// Connections with one identity, so that a stolen certificate can't crowd out the fleet. Above: the newest takes
    /// the slot of the longest idle, or is closed when all have open requests.
    pub max_connections_per_identity: usize,
    /// Handshakes in flight in all. Above: the newest takes the slot of the oldest of the address that has most, or is
    /// ignored when that is its own, so an honest client's retransmission finds room later.
    pub max_handshakes: usize,
    /// Handshakes in flight from one address (IPv6: one /64). Above: ignored.
    pub max_handshakes_per_ip: usize,
    /// Handshakes in flight above which a new address must first prove with a Retry that it receives what is sent to
    /// it; 0 asks always, and costs every client one round trip.
    pub retry_above: usize,
    /// A connection on which nothing arrives for so long is gone. Also the longest silence between two frames.
    pub idle_timeout: Duration,
    /// After so long without a packet the dialling side shows that it lives. Well below `idle_timeout`, so that one may be lost, and
    /// longer than an agent's heartbeat (ten seconds), which shows it as well.
    pub keep_alive: Duration,
    /// From a peer's first packet to its verified certificate.
    pub handshake_timeout: Duration,
    /// From a request stream's opening to the last byte of its body; a client's wait for response headers; and the
    /// time a frame once begun, in either direction, may take.
    pub request_timeout: Duration,
    /// How long requests in flight may run on after shutdown was asked for.
    pub drain_timeout: Duration,
    /// Bytes a peer may send on one stream before they are read. Bounds memory; 128 KiB still carries an 8 MiB document
    /// in under 7 s over 100 ms of latency.
    pub stream_window: u32,
    /// The same over a whole connection.
    pub connection_window: u32,
    /// Bytes of ours a connection holds until the peer acknowledged them; writers wait above.
    pub send_window: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_body_bytes: MAX_ENVELOPE_BYTES,
            max_header_bytes: 16 * 1024,
            max_frame_bytes: MAX_ENVELOPE_BYTES + FRAME_OVERHEAD_BYTES,
            max_streams: 16,
            max_connections: 4096,
            max_connections_per_ip: 2048,
            max_anonymous: 256,
            max_anonymous_per_ip: 64,
            anonymous_life: Duration::from_secs(10),
            max_connections_per_identity: 16,
            max_handshakes: 1024,
            max_handshakes_per_ip: 256,
            retry_above: 32,
            idle_timeout: Duration::from_secs(30),
            keep_alive: Duration::from_secs(12),
            handshake_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(5),
            stream_window: 128 * 1024,
            connection_window: 256 * 1024,
            send_window: 256 * 1024,
        }
    }
}
