//! Where the agent is reached: a virtio-serial port, vsock, or a unix socket in tests.

pub mod port;
pub mod socket;

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::state::Guest;

/// How long a port may take to appear when there could be one, before vsock is taken instead.
const PORT_WAIT: Duration = Duration::from_secs(1);
/// Between two looks while the machine has no channel at all: devices appear within milliseconds of the boot, or when
/// someone loads a module by hand.
const FIRST_LOOK: Duration = Duration::from_millis(2);
const LAST_LOOK: Duration = Duration::from_secs(1);

/// Serves on whatever channel this machine has, for ever.
pub fn serve_forever(guest: &Guest) -> io::Result<()> {
    let begin = Instant::now();
    let mut pause = FIRST_LOOK;
    loop {
        if let Some(path) = port::find() {
            return port::serve(&path, guest);
        }
        let no_ports = !Path::new("/sys/class/virtio-ports").exists();
        if Path::new("/dev/vsock").exists() && (no_ports || begin.elapsed() > PORT_WAIT) {
            return socket::serve_vsock(guest);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LAST_LOOK);
    }
}
