//! What a daemon says on its loopback port for metrics and health.

use std::io::{Read, Write};
use std::net::TcpStream;

/// The whole answer to `GET path`, head and body.
fn get(port: u16, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

/// Whether `/readyz` says yes.
pub fn ready(port: u16) -> bool {
    get(port, "/readyz").is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

/// All metrics.
pub fn metrics(port: u16) -> Option<String> {
    get(port, "/metrics")
}

/// The value of the first metric whose line starts so.
pub fn metric(port: u16, line_start: &str) -> Option<f64> {
    let answer = metrics(port)?;
    answer.lines().find(|line| line.starts_with(line_start))?.rsplit(' ').next()?.parse().ok()
}
