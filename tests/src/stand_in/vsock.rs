//! The host's end of vsock: `CONNECT <port>` leads to the guest's socket.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};

use super::machine::Machine;

/// Where the guest program listens.
const GUEST_PORT: &str = "5252";
const HOST_PORT: u32 = 1_073_741_824;
const LONGEST_LINE: usize = 32;

/// What is open between host and guest.
#[derive(Debug, Default)]
pub struct Connections(Mutex<Vec<UnixStream>>);

impl Connections {
    fn add(&self, stream: &UnixStream) {
        if let Ok(stream) = stream.try_clone() {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        }
    }

    /// Both sides see the end.
    pub fn reset(&self) {
        for stream in self.0.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// The socket is there as soon as the device is named.
pub fn listen(path: &str, machine: &Arc<Machine>) -> io::Result<()> {
    let listener = UnixListener::bind(path)?;
    let machine = Arc::clone(machine);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let machine = Arc::clone(&machine);
            // A connection that breaks is its own affair.
            std::thread::spawn(move || connect(stream, &machine));
        }
    });
    Ok(())
}

fn connect(mut host: UnixStream, machine: &Machine) -> io::Result<()> {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        host.read_exact(&mut byte)?;
        line.push(byte[0]);
        if line.len() > LONGEST_LINE {
            return Ok(());
        }
    }
    let line = String::from_utf8_lossy(&line).into_owned();
    let Some(port) = line.trim().strip_prefix("CONNECT ") else { return Ok(()) };
    machine.wait_for_guest();
    if port != GUEST_PORT {
        return Ok(());
    }
    // Nobody listens yet: the connection is closed, and the host asks again.
    let guest = UnixStream::connect(Machine::guest_socket())?;
    for stream in [&host, &guest] {
        machine.connections.add(stream);
    }
    host.write_all(format!("OK {HOST_PORT}\n").as_bytes())?;
    let (from, to) = (host.try_clone()?, guest.try_clone()?);
    let upward = std::thread::spawn(move || pump(from, to));
    pump(guest, host);
    let _ = upward.join();
    Ok(())
}

fn pump(mut from: UnixStream, mut to: UnixStream) {
    let _ = io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
