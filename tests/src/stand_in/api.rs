//! The API's socket: HTTP/1.1 as Firecracker's own server speaks it.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use super::machine::{After, Machine};
use super::rules::Answer;

const MAX_HEAD: usize = 8192;

/// Binds the socket and serves whoever connects, each in a thread.
pub fn listen(path: &str, machine: &Arc<Machine>) -> io::Result<()> {
    let listener = UnixListener::bind(path)?;
    let machine = Arc::clone(machine);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let machine = Arc::clone(&machine);
            std::thread::spawn(move || converse(stream, &machine));
        }
    });
    Ok(())
}

struct Request {
    method: String,
    path: String,
    body: Vec<u8>,
}

fn converse(mut stream: UnixStream, machine: &Arc<Machine>) {
    let mut rest = Vec::new();
    while let Ok(Some(read)) = read_request(&mut stream, &mut rest, machine.max_payload()) {
        let (answer, after) = match read {
            Ok(request) => machine.handle(&request.method, &request.path, &request.body),
            Err(refusal) => (refusal, After::GoOn),
        };
        if stream.write_all(&bytes(&answer)).is_err() {
            return;
        }
        if let After::Exit(code) = after {
            std::process::exit(code);
        }
    }
}

/// One request; nothing at the end of the connection; a refusal when it is too long to be read.
fn read_request(
    stream: &mut UnixStream,
    rest: &mut Vec<u8>,
    max_payload: usize,
) -> io::Result<Option<Result<Request, Answer>>> {
    let mut piece = [0; 4096];
    let end = loop {
        if let Some(at) = rest.windows(4).position(|window| window == b"\r\n\r\n") {
            break at;
        }
        let read = stream.read(&mut piece)?;
        if read == 0 || rest.len() > MAX_HEAD {
            return Ok(None);
        }
        rest.extend_from_slice(&piece[..read]);
    };
    let head = String::from_utf8_lossy(&rest[..end]).into_owned();
    let mut body = rest.split_off(end + 4);
    rest.clear();
    let mut lines = head.split("\r\n");
    let mut first = lines.next().unwrap_or_default().split(' ');
    let (method, path) = (first.next().unwrap_or_default(), first.next().unwrap_or_default());
    let length = lines
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .and_then(|(_, value)| value.trim().parse::<usize>().ok())
        .unwrap_or(0);
    if length > max_payload {
        let fault = format!(
            "Request payload with size {length} is larger than the limit of {max_payload} allowed by server."
        );
        // Read and dropped: closing on what was not read would take the answer with it.
        let left = length.saturating_sub(body.len()) as u64;
        io::copy(&mut stream.take(left), &mut io::sink())?;
        return Ok(Some(Err(Answer::fault(413, &fault))));
    }
    while body.len() < length {
        let read = stream.read(&mut piece)?;
        if read == 0 {
            return Ok(None);
        }
        body.extend_from_slice(&piece[..read]);
    }
    *rest = body.split_off(length);
    Ok(Some(Ok(Request { method: method.to_owned(), path: path.to_owned(), body })))
}

fn bytes(answer: &Answer) -> Vec<u8> {
    let mut head =
        format!("HTTP/1.1 {} \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n", answer.status);
    if let Some(body) = &answer.body {
        head.push_str(&format!(
            "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ));
    } else {
        head.push_str("\r\n");
    }
    head.into_bytes()
}
