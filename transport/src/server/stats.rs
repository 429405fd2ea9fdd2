//! What the server has seen, for metrics and tests.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters since the start, and two gauges. All are cheap to read at any time.
        #[derive(Debug, Default)]
        pub struct ServerStats { $($name: AtomicU64),* }

        impl ServerStats {
            $($(#[$doc])* #[must_use] pub fn $name(&self) -> u64 { self.$name.load(Ordering::Relaxed) })*

            /// All values by name, for metrics.
            #[must_use]
            pub fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name())),*]
            }
        }

        /// Names a counter; only the server counts.
        #[derive(Clone, Copy, Debug)]
        #[allow(non_camel_case_types)]
        pub(crate) enum Count { $($name),* }

        impl ServerStats {
            fn cell(&self, which: Count) -> &AtomicU64 {
                match which { $(Count::$name => &self.$name),* }
            }
        }
    };
}

counters! {
    /// Gauge: connections that exist now, handshakes in flight included.
    connections_open,
    /// Gauge: handshakes in flight now.
    handshakes_open,
    /// Handshakes that ended with a verified connection.
    connections_accepted,
    /// Attempts answered with a Retry, to prove their address.
    retries_sent,
    /// Handshakes that did not end within their time.
    handshakes_timed_out,
    /// Handshakes refused for the peer's certificate, or for the lack of one.
    handshakes_bad_certificate,
    /// Handshakes refused for having no protocol in common.
    handshakes_bad_alpn,
    /// Handshakes that failed otherwise.
    handshakes_failed,
    /// Attempts refused because the server has as many connections with a certificate as it allows.
    refused_total,
    /// Attempts refused because their address has as many connections as it may.
    refused_per_ip,
    /// Connections closed because there are as many without a certificate as may be, in all or from that address.
    refused_anonymous,
    /// Connections closed because their identity has as many as it may.
    refused_per_identity,
    /// Attempts ignored because as many handshakes were in flight as may be, in all or from that address.
    handshakes_ignored,
    /// Handshakes given up for the first packet of an address that has fewer in flight.
    handshakes_displaced,
    /// Connections closed to make room for a newer one.
    connections_displaced,
    /// Connections without a certificate closed at the end of their life.
    anonymous_expired,
    /// Requests that reached the router.
    requests,
    /// Requests refused here: too large, too slow, malformed.
    requests_refused,
    /// Sessions handed to the handler.
    sessions,
    /// Tunnels handed to the handler.
    tunnels,
    /// Connections whose task panicked.
    panics,
}

impl ServerStats {
    pub(crate) fn count(&self, which: Count) {
        self.cell(which).fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, which: Count, value: usize) {
        self.cell(which).store(value as u64, Ordering::Relaxed);
    }
}
