//! Where to dial: `https://HOST:PORT` or `HOST:PORT` as people write it, and the addresses behind it.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

/// A host and a port. The host is also the name that the peer's certificate is checked against.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    host: String,
    port: u16,
}

/// Why a text is not a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    #[error("expected https://HOST:PORT or HOST:PORT, found another scheme")]
    Scheme,
    #[error("expected https://HOST:PORT or HOST:PORT, found a path or a query")]
    Path,
    #[error("expected https://HOST:PORT or HOST:PORT, found no port")]
    NoPort,
    #[error("the port must be a number from 1 to 65535")]
    Port,
    #[error("the host must be a DNS name, an IPv4 address, or an IPv6 address in brackets")]
    Host,
}

/// The name could not be turned into addresses.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    #[error("could not resolve {host}")]
    Lookup {
        host: String,
        #[source]
        cause: io::Error,
    },
    #[error("{host} has no addresses")]
    Empty { host: String },
}

impl Target {
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The addresses to try, in the resolver's order.
    pub async fn resolve(&self) -> Result<Vec<SocketAddr>, ResolveError> {
        if let Ok(ip) = self.host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(ip, self.port)]);
        }
        let found = tokio::net::lookup_host((self.host.as_str(), self.port)).await;
        let addresses: Vec<_> =
            found.map_err(|cause| ResolveError::Lookup { host: self.host.clone(), cause })?.collect();
        if addresses.is_empty() {
            Err(ResolveError::Empty { host: self.host.clone() })
        } else {
            Ok(addresses)
        }
    }
}

impl FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Self, TargetError> {
        let rest = match text.split_once("://") {
            None => text,
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("https") => rest,
            Some(_) => return Err(TargetError::Scheme),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '?', '#', '@']) {
            return Err(TargetError::Path);
        }
        let (host, port) = rest.rsplit_once(':').ok_or(TargetError::NoPort)?;
        let host = parse_host(host)?;
        match port.parse() {
            Ok(port) if port > 0 => Ok(Self { host, port }),
            _ => Err(TargetError::Port),
        }
    }
}

fn parse_host(text: &str) -> Result<String, TargetError> {
    if let Some(inner) = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        let ip: Ipv6Addr = inner.parse().map_err(|_| TargetError::Host)?;
        return Ok(ip.to_string());
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    if text.is_empty() || text.len() > 253 || !text.chars().all(allowed) {
        return Err(TargetError::Host);
    }
    Ok(text.to_ascii_lowercase())
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "https://[{}]:{}", self.host, self.port)
        } else {
            write!(f, "https://{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<(String, u16), TargetError> {
        text.parse::<Target>().map(|target| (target.host().to_owned(), target.port()))
    }

    #[test]
    fn all_ways_to_write_a_target_are_understood() {
        for (text, host) in [
            ("https://Node-1.example:4433", "node-1.example"),
            ("https://node-1.example:4433/", "node-1.example"),
            ("10.0.0.7:4433", "10.0.0.7"),
            ("https://[::1]:4433", "::1"),
        ] {
            assert_eq!(parsed(text), Ok((host.to_owned(), 4433)), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_target_is_refused_with_its_own_reason() {
        for (text, error) in [
            ("http://a:1", TargetError::Scheme),
            ("https://a:1/v1", TargetError::Path),
            ("https://user@a:1", TargetError::Path),
            ("https://a", TargetError::NoPort),
            ("a:0", TargetError::Port),
            ("a:65536", TargetError::Port),
            (":4433", TargetError::Host),
            ("::1:4433", TargetError::Host),
            ("[::1%eth0]:4433", TargetError::Host),
            ("a b:1", TargetError::Host),
        ] {
            assert_eq!(parsed(text), Err(error), "{text}");
        }
    }

    #[test]
    fn display_parses_back() {
        for text in ["https://[fe80::1]:1", "https://a.b:65535"] {
            assert_eq!(text.parse::<Target>().expect("a target").to_string(), text);
        }
    }

    #[tokio::test]
    async fn addresses_resolve_to_themselves() {
        let target: Target = "[::1]:4433".parse().expect("a target");
        assert_eq!(
            target.resolve().await.expect("addresses"),
            [SocketAddr::from((Ipv6Addr::LOCALHOST, 4433))]
        );
    }
}
