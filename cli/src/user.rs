//! What the person or program at this process's standard input has for a command in a guest: bytes, a new size of the
//! terminal. Whatever carries it there calls [`User::next`].

use std::collections::VecDeque;
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

/// One thing at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FromUser {
    Input(Vec<u8>),
    EndOfInput,
    Resize { rows: u16, columns: u16 },
}

/// Which of the two it gives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gives {
    pub(crate) input: bool,
    /// The command has a terminal.
    pub(crate) terminal: bool,
}

/// While there is one, the terminal of standard input is raw where the command has one and input is given.
#[derive(Debug)]
pub(crate) struct User {
    raw: Option<Raw>,
    input: Option<mpsc::Receiver<Vec<u8>>>,
    waiting: VecDeque<FromUser>,
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
    pub(crate) fn begin(gives: Gives) -> Result<Self, Outcome> {
        let is_raw = gives.terminal && gives.input;
        if is_raw && !terminal::is_input() {
            return Err(Outcome::Usage(anyhow::anyhow!(
                "-t with -i takes a terminal as standard input, and this is none\nleave one of them away"
            )));
        }
        let signals = match gives.terminal {
            true => Some(Signals::listen().context("could not listen for signals")?),
            false => None,
        };
        let raw = match is_raw {
            true => Some(Raw::enter().context("could not make the terminal raw")?),
            false => None,
        };
        let input = match gives.input {
            true => Some(read_input().context("could not start a thread")?),
            false => None,
        };
        Ok(Self { raw, input, waiting: VecDeque::new(), signals })
    }

    /// What comes next; for ever nothing where nothing is left. Dropping the future loses nothing. An error: a signal has
    /// ended the command.
    pub(crate) async fn next(&mut self) -> Result<FromUser, Outcome> {
        loop {
            if let Some(waiting) = self.waiting.pop_front() {
                return Ok(waiting);
            }
            tokio::select! {
                piece = next_piece(&mut self.input) => match piece {
                    Some(piece) => return Ok(FromUser::Input(piece)),
                    None => {
                        self.input = None;
                        return Ok(FromUser::EndOfInput);
                    }
                },
                heard = Signals::next(&mut self.signals) => match heard {
                    Heard::Resized => self.tell_size(),
                    Heard::Continued => {
                        if let Some(raw) = &self.raw {
                            // A terminal that is gone tells by its input.
                            let _ = raw.again();
                        }
                        self.tell_size();
                    }
                    Heard::Ended(code) => return Err(Outcome::Interrupted(code)),
                },
            }
        }
    }

    fn tell_size(&mut self) {
        let size = crate::output::terminal_size();
        self.waiting.extend(size.map(|(rows, columns)| FromUser::Resize { rows, columns }));
    }
}

async fn next_piece(input: &mut Option<mpsc::Receiver<Vec<u8>>>) -> Option<Vec<u8>> {
    match input {
        Some(input) => input.recv().await,
        None => std::future::pending().await,
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
fn read_input() -> std::io::Result<mpsc::Receiver<Vec<u8>>> {
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
