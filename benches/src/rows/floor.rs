//! What no arrangement of a coordinator and an agent can avoid: the same bytes made durable twice, once at each end, and
//! round trips between them over bare QUIC.

use std::fs::File;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::runtime;
use crate::authority::{Certificates, SERVER_NAME, now};
use crate::bare;
use crate::machine::{Core, pin_this_thread};

/// Where the floor's server listens, in a thread of its own on the coordinator's core.
pub(super) struct Echo {
    address: SocketAddr,
    certificates: Arc<Certificates>,
}

pub(super) fn start_echo() -> Result<Echo> {
    let certificates = Arc::new(Certificates::make(now())?);
    let (tell, told) = std::sync::mpsc::channel();
    let theirs = Arc::clone(&certificates);
    std::thread::spawn(move || -> Result<()> {
        pin_this_thread(Core::Server)?;
        runtime()?.block_on(async {
            let server = bare::server(&theirs)?;
            tell.send(server.local_addr()?)?;
            bare::echo_task(server).await;
            Ok(())
        })
    });
    Ok(Echo { address: told.recv().context("the echo server did not start")?, certificates })
}

/// A file and a bare connection.
pub(super) struct Floor {
    log: File,
    connection: quinn::Connection,
    /// Keeps the connection.
    _endpoint: quinn::Endpoint,
}

impl Floor {
    pub(super) async fn connect(echo: &Echo, folder: &Path) -> Result<Self> {
        let log = File::options().create(true).append(true).open(folder.join("floor"))?;
        let endpoint = bare::client()?;
        let config = bare::client_config(&echo.certificates, bare::Protocol::Plain)?;
        let connection = endpoint.connect_with(config, echo.address, SERVER_NAME)?.await?;
        Ok(Self { log, connection, _endpoint: endpoint })
    }

    /// `bytes` made durable twice, and sent and echoed as often as said.
    pub(super) async fn take(&self, bytes: &[u8], round_trips: usize) -> Result<Duration> {
        let begun = Instant::now();
        for _ in 0..2 {
            (&self.log).write_all(bytes)?;
            self.log.sync_data()?;
        }
        for _ in 0..round_trips {
            bare::round_trip(&self.connection, bytes).await?;
        }
        Ok(begun.elapsed())
    }
}
