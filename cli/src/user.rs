//! What the person or program at this process's standard input has for a command in a guest: bytes, and new sizes of the
//! terminal. The two are apart, so that a command that takes no bytes holds up neither a size nor the signal that ends it.

use std::io::Read as _;

use anyhow::Context as _;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::exit::Outcome;
use crate::terminal::{self, Raw};

/// What is read at once.
const PIECE_BYTES: usize = 32 * 1024;
/// Pieces that were read and not taken yet. Beyond it standard input is not read.
const PIECES: usize = 4;
/// SIGCONT, which tokio has no name for.
const CONTINUED: i32 = 18;

/// Pieces of standard input as they are read, until its end.
pub(crate) type Typed = mpsc::Receiver<Vec<u8>>;

/// Which of the two it gives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gives {
    pub(crate) input: bool,
    /// The command has a terminal.
    pub(crate) terminal: bool,
}

impl Gives {
    fn is_raw(self) -> bool {
        self.terminal && self.input
    }

    /// Refuses what this process's standard input can't give.
    pub(crate) fn check(self) -> Result<(), Outcome> {
        if self.is_raw() && !terminal::is_input() {
            return Err(Outcome::Usage(anyhow::anyhow!(
                "-t with -i takes a terminal as standard input, and this is none\nleave one of them away"
            )));
        }
        Ok(())
    }
}

/// While there is one, the terminal of standard input is raw where the command has one and input is given.
#[derive(Debug)]
pub(crate) struct User {
    raw: Option<Raw>,
    signals: Option<Signals>,
}

#[derive(Debug)]
struct Signals {
    resized: Signal,
    continued: Signal,
    hung_up: Signal,
    quit: Signal,
}

impl User {
    /// With what is typed, where that is given.
    pub(crate) fn begin(gives: Gives) -> Result<(Self, Option<Typed>), Outcome> {
        gives.check()?;
        let signals = match gives.terminal {
            true => Some(Signals::listen().context("could not listen for signals")?),
            false => None,
        };
        let raw = match gives.is_raw() {
            true => Some(Raw::enter().context("could not make the terminal raw")?),
            false => None,
        };
        let typed = match gives.input {
            true => Some(read_input().context("could not start a thread")?),
            false => None,
        };
        Ok((Self { raw, signals }, typed))
    }

    /// The rows and columns that the terminal has now, whenever they may have changed; for ever nothing without a terminal.
    /// Dropping the future loses nothing. The exit code, when a signal has ended the command.
    pub(crate) async fn next_size(&mut self) -> Result<(u16, u16), u8> {
        loop {
            match Signals::next(&mut self.signals).await {
                Heard::Resized => {}
                Heard::Continued => {
                    if let Some(raw) = &self.raw {
                        // A terminal that is gone tells by its input.
                        let _ = raw.again();
                    }
                }
                Heard::Ended(code) => return Err(code),
            }
            if let Some(size) = crate::output::terminal_size() {
                return Ok(size);
            }
        }
    }
}

enum Heard {
    Resized,
    Continued,
    /// With this exit code.
    Ended(u8),
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            resized: signal(SignalKind::window_change())?,
            continued: signal(SignalKind::from_raw(CONTINUED))?,
            // Without these the process would end before it can put the terminal back.
            hung_up: signal(SignalKind::hangup())?,
            quit: signal(SignalKind::quit())?,
        })
    }

    async fn next(signals: &mut Option<Self>) -> Heard {
        const HUNG_UP: u8 = 129;
        const QUIT: u8 = 131;
        let Some(signals) = signals else { return std::future::pending().await };
        tokio::select! {
            _ = signals.resized.recv() => Heard::Resized,
            _ = signals.continued.recv() => Heard::Continued,
            _ = signals.hung_up.recv() => Heard::Ended(HUNG_UP),
            _ = signals.quit.recv() => Heard::Ended(QUIT),
        }
    }
}

/// Standard input, read by a thread that ends with the process: a read can't be taken back.
fn read_input() -> std::io::Result<Typed> {
    let (pieces, input) = mpsc::channel(PIECES);
    let read = move || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = vec![0; PIECE_BYTES];
        loop {
            match stdin.read(&mut buffer) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Ok(length) if length > 0 => {
                    if pieces.blocking_send(buffer[..length].to_vec()).is_err() {
                        return;
                    }
                }
                _ => return,
            }
        }
    };
    std::thread::Builder::new().name("input".to_owned()).spawn(read)?;
    Ok(input)
}
