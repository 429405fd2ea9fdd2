//! The peer of fan-out: `nats-server` with as many clients as we have nodes, each with mutual TLS and a subject of its own.
//!
//! The protocol is lines of text, so the client is written here: what the bench needs of it is a hundred lines, and one
//! that batches or reconnects by itself would measure something else. The publisher stands where the coordinator does: on its
//! core, with a file to which every batch of documents is appended and `fdatasync`ed before it is published.

use std::fs::File;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use futures::stream::{StreamExt as _, TryStreamExt as _};
use mvm_tests::{Process, free_port};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::authority::{Certificates, SERVER_NAME};
use crate::bare;
use crate::machine::{Core, cpu_time, pin_process, pin_this_thread, this_thread, thread_cpu_time};

/// As many documents as the coordinator puts into one transaction: one `fdatasync` for each batch on both sides.
const BATCH: usize = 63;
/// What a client says to a document: as many bytes as an ack of ours.
const ACK_BYTES: usize = 90;
const ACKS: &str = "acks";
const DIAL_WIDTH: usize = 32;
const LIMIT: Duration = Duration::from_secs(60);

type Stream = BufReader<TlsStream<TcpStream>>;

/// A server process, and what clients need to reach it.
#[derive(Debug)]
pub struct Nats {
    process: Process,
    address: SocketAddr,
    tls: Arc<rustls::ClientConfig>,
    folder: TempDir,
}

/// What one fan-out took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Taken {
    pub wall: Duration,
    pub server_cpu: Duration,
    pub publisher_cpu: Duration,
}

impl Nats {
    /// None where `nats-server` is not installed.
    pub fn start(certificates: &Certificates) -> Result<Option<Self>> {
        let folder = tempfile::tempdir()?;
        let file = |name: &str| folder.path().join(name);
        std::fs::write(file("server.pem"), certificates.coordinator.current().to_pem().as_bytes())?;
        std::fs::write(file("roots.pem"), certificates.anchors.to_pem())?;
        let port = free_port();
        let settings = format!(
            "listen: \"127.0.0.1:{port}\"\nmax_connections: 20000\ntls {{\n  cert_file: {server:?}\n  key_file: {server:?}\n  \
             ca_file: {roots:?}\n  verify: true\n  timeout: 30\n}}\n",
            server = file("server.pem"),
            roots = file("roots.pem"),
        );
        std::fs::write(file("nats.conf"), settings)?;
        let Some(program) = program() else { return Ok(None) };
        let mut command = Command::new(program);
        command.arg("-c").arg(file("nats.conf"));
        let process = Process::start(command, &file("log"));
        pin_process(process.pid(), Core::Server)?;
        let tls = Arc::new(bare::tcp_client_config(certificates)?);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Ok(Some(Self { process, address, tls, folder }))
    }

    /// Connects so many clients to this runtime, each with a task that acknowledges what its subject brings.
    pub async fn subscribe(&self, clients: usize) -> Result<()> {
        let begun = Instant::now();
        while TcpStream::connect(self.address).await.is_err() {
            ensure!(begun.elapsed() < LIMIT, "nats-server does not listen: {}", self.process.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let all = futures::stream::iter((0..clients).map(|number| async move {
            let mut stream = connect(self.address, &self.tls).await?;
            stream.write_all(format!("SUB {} 1\r\nPING\r\n", subject(number)).as_bytes()).await?;
            stream.flush().await?;
            expect(&mut stream, "PONG").await?;
            tokio::spawn(acknowledge_task(stream));
            anyhow::Ok(())
        }))
        .buffer_unordered(DIAL_WIDTH)
        .try_collect::<Vec<()>>();
        let all = tokio::time::timeout(LIMIT, all).await.context("NATS clients take too long")?;
        all.with_context(|| self.process.log()).map(drop)
    }

    /// Starts the publisher, in a thread of its own on the server's core.
    pub fn publisher(&self, clients: usize) -> Result<Publisher> {
        let (ask, asked) = std::sync::mpsc::channel::<Bytes>();
        let (tell, told) = tokio::sync::mpsc::unbounded_channel();
        let (address, tls, server) = (self.address, Arc::clone(&self.tls), self.process.pid());
        let log = File::create(self.folder.path().join("documents"))?;
        std::thread::spawn(move || -> Result<()> {
            pin_this_thread(Core::Server)?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let mut stream = runtime.block_on(async {
                let mut stream = connect(address, &tls).await?;
                stream.write_all(format!("SUB {ACKS} 1\r\nPING\r\n").as_bytes()).await?;
                stream.flush().await?;
                expect(&mut stream, "PONG").await?;
                anyhow::Ok(stream)
            })?;
            while let Ok(document) = asked.recv() {
                let taken = runtime.block_on(fan_out(&mut stream, &log, server, clients, &document));
                if tell.send(taken).is_err() {
                    break;
                }
            }
            Ok(())
        });
        Ok(Publisher { ask, told })
    }
}

/// Debian puts it where only root's path leads.
fn program() -> Option<std::path::PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&folders).chain(["/usr/sbin".into()]);
    folders.map(|folder| folder.join("nats-server")).find(|path| Path::is_file(path))
}

/// Publishes one document to all clients when it is asked to.
#[derive(Debug)]
pub struct Publisher {
    ask: std::sync::mpsc::Sender<Bytes>,
    told: tokio::sync::mpsc::UnboundedReceiver<Result<Taken>>,
}

impl Publisher {
    /// One document to each client, until the last has acknowledged it.
    pub async fn fan_out(&mut self, document: Bytes) -> Result<Taken> {
        self.ask.send(document).ok().context("the publisher has ended")?;
        let taken = tokio::time::timeout(LIMIT, self.told.recv()).await.context("acks are missing")?;
        taken.context("the publisher has ended")?
    }
}

async fn fan_out(
    stream: &mut Stream,
    mut log: &File,
    server: u32,
    clients: usize,
    document: &[u8],
) -> Result<Taken> {
    let thread = this_thread();
    let (server_before, own_before) = (cpu_time(server)?, thread_cpu_time(&thread)?);
    let begun = Instant::now();
    let mut acked = 0;
    let numbers: Vec<usize> = (0..clients).collect();
    for batch in numbers.chunks(BATCH) {
        let mut out = Vec::with_capacity(batch.len() * (document.len() + 32));
        for number in batch {
            log.write_all(document)?;
            out.extend_from_slice(format!("PUB {} {}\r\n", subject(*number), document.len()).as_bytes());
            out.extend_from_slice(document);
            out.extend_from_slice(b"\r\n");
        }
        log.sync_data()?;
        stream.write_all(&out).await?;
        stream.flush().await?;
    }
    while acked < clients {
        match next(stream).await? {
            Said::Message => acked += 1,
            Said::Other => {}
        }
    }
    let wall = begun.elapsed();
    Ok(Taken {
        wall,
        server_cpu: cpu_time(server)?.saturating_sub(server_before),
        publisher_cpu: thread_cpu_time(&thread)?.saturating_sub(own_before),
    })
}

fn subject(number: usize) -> String {
    format!("document.{number}")
}

async fn connect(address: SocketAddr, tls: &Arc<rustls::ClientConfig>) -> Result<Stream> {
    let mut tcp = TcpStream::connect(address).await?;
    tcp.set_nodelay(true)?;
    // The server greets in the clear, byte by byte so that nothing of the handshake is taken.
    let mut greeting = Vec::new();
    while !greeting.ends_with(b"\r\n") {
        ensure!(greeting.len() < 1 << 16, "the greeting has no end");
        greeting.push(tcp.read_u8().await?);
    }
    ensure!(greeting.starts_with(b"INFO "), "it is no NATS server");
    let stream = TlsConnector::from(Arc::clone(tls)).connect(SERVER_NAME.try_into()?, tcp).await?;
    let mut stream = BufReader::new(stream);
    let options = r#"{"verbose":false,"pedantic":false,"tls_required":true,"echo":false,"lang":"rust","version":"1","protocol":1}"#;
    stream.write_all(format!("CONNECT {options}\r\nPING\r\n").as_bytes()).await?;
    stream.flush().await?;
    expect(&mut stream, "PONG").await?;
    Ok(stream)
}

async fn expect(stream: &mut Stream, word: &str) -> Result<()> {
    let mut line = String::new();
    loop {
        line.clear();
        ensure!(stream.read_line(&mut line).await? > 0, "the server hung up");
        if line.starts_with(word) {
            return Ok(());
        }
        ensure!(!line.starts_with("-ERR"), "the server says {line}");
    }
}

enum Said {
    /// One whose bytes were read.
    Message,
    Other,
}

/// The next thing that the server says; its pings are answered here.
async fn next(stream: &mut Stream) -> Result<Said> {
    let mut line = String::new();
    ensure!(stream.read_line(&mut line).await? > 0, "the server hung up");
    if line.starts_with("PING") {
        stream.write_all(b"PONG\r\n").await?;
        stream.flush().await?;
    }
    if line.starts_with("-ERR") {
        bail!("the server says {line}");
    }
    let Some(head) = line.strip_prefix("MSG ") else { return Ok(Said::Other) };
    let length: usize = head.trim_end().rsplit(' ').next().context("a message has a length")?.parse()?;
    let mut body = vec![0; length + 2];
    stream.read_exact(&mut body).await?;
    Ok(Said::Message)
}

async fn acknowledge_task(mut stream: Stream) {
    let ack = format!("PUB {ACKS} {ACK_BYTES}\r\n{}\r\n", "a".repeat(ACK_BYTES));
    while let Ok(said) = next(&mut stream).await {
        if matches!(said, Said::Message)
            && (stream.write_all(ack.as_bytes()).await.is_err() || stream.flush().await.is_err())
        {
            return;
        }
    }
}
